"""oneDNN through PyTorch, if installed, with weights packed ahead."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfp8._bench import _peaks
from jaxfp8._bench._measure import Contender, Missing, attempt

# The same numbers as uint8 with a zero point: oneDNN 3.12 has no fast path for int8 activations.
_OFFSET = 128
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def linear(x: jax.Array, w: jax.Array) -> Contender | Missing:
    """`x @ w.T` for operands x [M, K] and w [N, K] of one float dtype; the output has it too."""

    def prepare() -> Callable[[], Any]:
        torch = _torch()
        left, packed = _tensor(x), torch.ops.mkldnn._reorder_linear_weight(_tensor(w), x.shape[0])
        product = torch.ops.mkldnn._linear_pointwise
        return lambda: product(left, packed, None, "none", [], "")

    return _contender(prepare)


def linear_int8(
    x: jax.Array, w: jax.Array, x_scale: float, w_scale: jax.Array, bias: jax.Array
) -> Contender | Missing:
    """`(x @ w.T) * x_scale * w_scale + bias` in float32 for int8 x [M, K] and w [N, K]."""

    def prepare() -> Callable[[], Any]:
        if _saturates():
            raise ArithmeticError("wrong numbers here: sums of two products saturate at 16 bits")
        return _int8_product(x, w, x_scale, w_scale, bias)

    return _contender(prepare)


def _int8_product(x: Any, w: Any, x_scale: float, w_scale: Any, bias: Any) -> Callable[[], Any]:
    torch = _torch()
    left = (_tensor(x).int() + _OFFSET).to(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(_tensor(w), list(x.shape))
    scale, addend = _tensor(w_scale), _tensor(bias)
    zeros = torch.zeros(w.shape[0], dtype=torch.int32)
    product = torch.ops.onednn.qlinear_pointwise
    after: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    return lambda: product(left, x_scale, _OFFSET, packed, scale, zeros, addend, *after)


@functools.cache
def _saturates() -> bool:
    """Whether sums of large codes are wrong: without VNNI, pairs of products saturate in 16 bits.

    On an AMD Zen 3, uniform codes are off by 21 % of their norm; codes below 64 are exact.
    """
    rows, depth = 16, 64
    most = np.full((rows, depth), np.iinfo(np.int8).max, np.int8)
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    sums = np.asarray(_int8_product(most, most, 1.0, ones, zeros)())
    return bool((sums != depth * np.iinfo(np.int8).max ** 2).any())


def _contender(prepare: Callable[[], Callable[[], Any]]) -> Contender | Missing:
    if importlib.util.find_spec("torch") is None:
        return Missing(f"PyTorch is not installed: {INSTALL}")

    def made() -> Contender:
        try:
            return Contender(prepare(), lambda last: None)
        except AttributeError as error:
            raise NotImplementedError(f"this PyTorch lacks an operation: {error}") from error

    return attempt(made)


@functools.cache
def _torch() -> Any:
    """PyTorch with as many threads as XLA has."""
    import torch  # noqa: PLC0415 (an optional peer; it takes seconds to import)

    torch.set_num_threads(_peaks.threads())
    torch.set_grad_enabled(False)
    return torch


def _tensor(x: jax.Array) -> Any:
    """The same numbers in PyTorch."""
    torch = _torch()
    array = np.array(x)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
