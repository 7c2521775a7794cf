"""The documented bounds, for `--verify`: of roundings, and of sums.

An operand has to lie within half a step of its float (docs/quantization.md), and a product within
the error of float32 sums of the exact product of its operands (docs/design.md). Together they bound
the error of the whole. Roundings reach theirs; sums stay far below.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import QArray
from jaxfp8._bench._ways import Way
from jaxfp8._bench.compare.data import Data
from jaxfp8._ops import int8_compute
from jaxfp8._value import dtypes

_UNIT = 2.0**-24  # of a float32 rounding
# Error of a device's sums, as a share of the sum of magnitudes; `tests/gpu` has the same.
_FAST_FP8, _TENSOR_CORES = 2.0**-10, 2.0**-21
# Divisions in float32 move a value by so much of a step at most.
_SLACK = 1e-4
# Half a step of a float as a share of it, and of the scale if the float is a denormal.
_STEPS = {
    np.dtype(jnp.float8_e4m3fn): (2.0**-4, 2.0**-10),
    np.dtype(jnp.float8_e5m2): (2.0**-3, 2.0**-17),
    np.dtype(jnp.bfloat16): (2.0**-8, 0.0),
    np.dtype(np.float32): (0.0, 0.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Whether a way stays within its bounds."""

    share: float  # the largest error, as a share of its bound
    what: str  # its place

    @property
    def passed(self) -> bool:
        """Whether nothing leaves its bound; NaN does."""
        return self.share <= 1


def check(way: Way, data: Data, x: Any, w: Any, y: np.ndarray, platform: str) -> Check:
    """Compares held operands and their product with the bounds."""
    product = _product_in_terms if way.recipe.terms is not None else _product
    checks = [
        _operand("x", x, data.x),
        _operand("w", w, data.w),
        product(way, x, w, y, platform),
    ]
    # NaN is worse than any number.
    return max(checks, key=lambda check: np.inf if np.isnan(check.share) else check.share)


def _operand(name: str, held: Any, exact: np.ndarray) -> Check:
    values = _values(held)
    dtype = np.dtype(held.qvalue.dtype if isinstance(held, QArray) else held.dtype)
    scale = _scale_of(held) if isinstance(held, QArray) else np.ones(())
    if dtypes.is_int8(dtype):
        bound = np.broadcast_to((0.5 + _SLACK) * scale, exact.shape)
    else:
        share, step = _STEPS[dtype]
        bound = np.maximum(share * np.abs(exact), step * scale) * (1 + _SLACK)
    return _worst(f"operand {name}", np.abs(values - exact), bound)


def _product(way: Way, x: Any, w: Any, y: np.ndarray, platform: str) -> Check:
    x, x_near = _multiplied(way, x, 1)
    w, w_near = _multiplied(way, w, 0)
    magnitude = np.abs(x) @ np.abs(w)
    share = (x.shape[1] + 4) * _UNIT  # the operands were dequantized in float32
    if platform != "cpu":
        fast = way.recipe.compute is None and way.name.startswith(("FP8", "MX"))
        share += _FAST_FP8 if fast else _TENSOR_CORES
    bound = share * magnitude + np.abs(y) * _UNIT
    if way.recipe.compute is not None:
        bound = bound + x_near @ np.abs(w) + np.abs(x) @ w_near + x_near @ w_near
    return _worst("product", np.abs(y - x @ w), bound)


def _product_in_terms(way: Way, x: Any, w: Any, y: np.ndarray, platform: str) -> Check:
    """The bound of `jaxfp8.split_dot`."""
    del platform
    x, w = (np.asarray(v, np.float64) for v in (x, w))
    terms = way.recipe.terms
    assert terms is not None
    largest = np.abs(x).max(1)[:, None] * np.abs(w).max(0)[None]
    bound = 2 ** (2.3 - 8 * terms) * x.shape[1] * largest + 2.0**-21 * (np.abs(x) @ np.abs(w))
    return _worst("product", np.abs(y - x @ w), bound)


def _multiplied(way: Way, held: Any, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The multiplied values, and by value the int8 step if it lies on a tie, else 0."""
    values = _values(held)
    is_int = isinstance(held, QArray) and dtypes.is_int8(held.qvalue.dtype)
    if way.recipe.compute is None or is_int:
        return values, np.zeros_like(values)
    codes, scale = (
        np.asarray(part, np.float64)
        for part in int8_compute.rounded(jnp.asarray(values, jnp.float32), (axis,))
    )
    near = np.abs(np.abs(values / scale % 1) - 0.5) < _SLACK
    return codes * scale, near * scale


def _values(held: Any) -> np.ndarray:
    wide = jaxfp8.dequantize(held, jnp.float32) if isinstance(held, QArray) else held
    return np.asarray(wide, np.float64)


def _scale_of(q: QArray) -> np.ndarray:
    """The scale of each value."""
    ones = jnp.ones(q.shape, jnp.int8)
    per_value = QArray(ones, q.scale, tiles=q.tiles)
    return np.asarray(jaxfp8.dequantize(per_value, jnp.float32), np.float64)


def _worst(what: str, error: np.ndarray, bound: np.ndarray) -> Check:
    """The largest error as a share of its bound; 0 of 0 counts as 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / bound)
    share = np.where(np.isnan(share), np.inf, share)
    place = np.unravel_index(int(np.argmax(share)), share.shape)
    at = ", ".join(map(str, map(int, place)))
    return Check(share=float(share[place]), what=f"{what} at [{at}]")
