"""The dtype of sums over devices: float32, or what the user chose."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxfp8._value import checks

_FLOAT32 = np.dtype(np.float32)
_ALLOWED = (_FLOAT32, np.dtype(jnp.bfloat16))
_DTYPE = contextvars.ContextVar("jaxfp8_sums_over_devices", default=_FLOAT32)
# A part of the key of JAX's caches: a function is traced again if the choice changes.
_KEY = jax.make_user_context("float32")


@contextlib.contextmanager
def sums_over_devices(dtype: DTypeLike) -> Iterator[None]:
    """Within this context, devices add up their parts of a product in this dtype.

    A product that is split along its contracted axis is a sum over devices: y = sum_d y_d. By
    default the parts y_d are float32. In bfloat16 they are rounded before they are sent, as XLA
    does for a product of bfloat16. Half the bytes travel then. The error of each part grows by its
    rounding, 2^-9 of it, and that of each addition. Sums of int32 stay exact. The context covers
    programs that are lowered inside it, as `jax.jit` does at its first call. Inside
    `jax.shard_map` a product is local, and the function's own `psum` decides.

    Args:
      dtype: float32 or bfloat16.

    Raises:
      TypeError: another dtype.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.ones((8, 4)), channelwise_axes=(1,))
      >>> with jaxfp8.sums_over_devices(jnp.bfloat16):
      ...     y = jax.jit(jaxfp8.matmul)(jnp.ones((2, 8)), w)
      >>> float(y[0, 0])
      8.0
    """
    chosen = checks.as_dtype("jaxfp8.sums_over_devices", "dtype", dtype, _ALLOWED)
    with _KEY(chosen.name), within(chosen):
        yield


@contextlib.contextmanager
def within(dtype: np.dtype) -> Iterator[None]:
    """The same, for XLA's callbacks on a thread of its own."""
    token = _DTYPE.set(dtype)
    try:
        yield
    finally:
        _DTYPE.reset(token)


def chosen() -> np.dtype:
    """The dtype that the caller chose."""
    return _DTYPE.get()
