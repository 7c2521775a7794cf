"""The dtypes of the project: their names, ranges, and bytes at the call."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
# FP8 dtypes of JAX without a kernel.
UNSERVED_FLOAT8 = (
    np.dtype(jnp.float8_e4m3fnuz),
    np.dtype(jnp.float8_e5m2fnuz),
    np.dtype(jnp.float8_e4m3b11fnuz),
    np.dtype(jnp.float8_e4m3),
    np.dtype(jnp.float8_e3m4),
)
EIGHT_BIT_INTS = (np.dtype(np.int8), np.dtype(np.uint8))
EIGHT_BIT = FLOAT8 + EIGHT_BIT_INTS
BFLOAT16 = np.dtype(jnp.bfloat16)
SIXTEEN_BIT_FLOATS = (BFLOAT16, np.dtype(np.float16))
WIDE_FLOAT = (np.dtype(np.float32), *SIXTEEN_BIT_FLOATS)
E8M0 = np.dtype(jnp.float8_e8m0fnu)
SCALE = (*WIDE_FLOAT, E8M0)
INT32 = np.dtype(np.int32)


def is_float8(dtype: DTypeLike) -> bool:
    """Whether `dtype` is an FP8 type for values (e4m3fn, e5m2)."""
    return np.dtype(dtype) in FLOAT8


def is_int8(dtype: DTypeLike) -> bool:
    """Whether `dtype` is int8 or uint8."""
    return np.dtype(dtype) in EIGHT_BIT_INTS


def is_eight_bit(dtype: DTypeLike) -> bool:
    """Whether `dtype` is one of the four types a `QArray` can store."""
    return np.dtype(dtype) in EIGHT_BIT


def storage(dtype: DTypeLike) -> np.dtype:
    """The dtype of a logical `dtype` at the call: FP8 as uint8, all else as itself."""
    return np.dtype(np.uint8) if is_float8(dtype) else np.dtype(dtype)


def is_byte_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a float of one byte: XLA:CPU widens these to move them, so bytes move."""
    dtype = np.dtype(dtype)
    return dtype.itemsize == 1 and dtype.kind not in "iub"


def as_bytes(x: jax.Array) -> jax.Array:
    """Floats of one byte (FP8, float8_e8m0fnu) as uint8; any other array as it is."""
    return bits_as(x, np.dtype(np.uint8)) if is_byte_float(x.dtype) else jnp.asarray(x)


def bits_as(x: jax.Array | np.ndarray, dtype: DTypeLike) -> jax.Array:
    """The bits of an array as another dtype of the same width, such as bytes as FP8."""
    return jnp.asarray(x) if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def moved(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`move(x)`, which changes no value. FP8 moves as bytes: XLA:CPU widens float8 to move it."""
    return bits_as(move(as_bytes(x)), x.dtype)


def of_exponents(codes: jax.Array) -> jax.Array:
    """The float32 powers of two of bytes of float8_e8m0fnu: 2^(byte - 127), and NaN for 255.

    By bits: XLA may flush 2^-127, which is subnormal.
    """
    bits = codes.astype(jnp.uint32) << 23
    ends = (codes == 0) | (codes == 255)
    return jax.lax.bitcast_convert_type(jnp.where(ends, bits | 0x400000, bits), jnp.float32)


def finite_range(dtype: DTypeLike) -> tuple[float, float]:
    """The lowest and highest finite value of an 8-bit `dtype`."""
    info = jnp.finfo(dtype) if is_float8(dtype) else jnp.iinfo(dtype)
    return float(info.min), float(info.max)


def names(dtypes: tuple[np.dtype, ...]) -> str:
    """A list of dtypes for a sentence: `a, b or c`."""
    *head, last = [d.name for d in dtypes]
    return f"{', '.join(head)} or {last}" if head else last
