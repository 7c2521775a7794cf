"""Quantising as programs write it: the largest magnitude of rows, codes for given scales.

    amax  = max|x|, NaN before infinity before numbers
    codes = clip(round(x / scale), lowest, highest), the division plain

Each is one FFI call on the CPU, and elsewhere the plain jnp that it means.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8._call import ffi
from jaxfp8._call.partitioning import Factors, is_wanted, lowering, partitioned
from jaxfp8._value import compat
from jaxfp8._value.dtypes import finite_range, is_float8

amax_rows_p = Primitive("amax_rows")
encode_rows_p = Primitive("encode_rows")


def amax_rows(x: jax.Array) -> jax.Array:
    """The largest magnitude along the last axis of a wide float array, in its dtype."""
    return _bind(amax_rows_p, x)


def encode_rows(x: jax.Array, scale: jax.Array, dtype: np.dtype, lowest: int) -> jax.Array:
    """Codes of `x` for scales that are given.

    Args:
      x: float32, bfloat16 or float16, of two axes or more, none empty.
      scale: float32; of one element, or of the shape of `x` with 1 for the last axis.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      lowest: the lowest code of int8; FP8 has its whole range.
    """
    x, scale = compat.vary_alike([x, scale])
    return _bind(encode_rows_p, x, scale, dtype=np.dtype(dtype), lowest=lowest)


def _bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> jax.Array:
    split = None
    if is_wanted(operands):
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        split = _split(primitive, avals, **params)
    return primitive.bind(*operands, **params, split=split)


# What they mean


def _amax_meaning(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=-1)


def _encode_meaning(x: jax.Array, scale: jax.Array, *, dtype: np.dtype, lowest: int) -> jax.Array:
    steps = x.astype(jnp.float32) / scale.reshape(_scale_shape(x, scale))
    low, high = finite_range(dtype)
    if not is_float8(dtype):
        low, steps = float(lowest), jnp.round(steps)
    return jnp.clip(steps, low, high).astype(dtype)


def _scale_shape(x: jax.Array, scale: jax.Array) -> tuple[int, ...]:
    return (1,) * x.ndim if scale.size == 1 else (*x.shape[:-1], 1)


@amax_rows_p.def_abstract_eval
def _amax_aval(x: jax.core.ShapedArray, *, split: Any) -> jax.core.ShapedArray:
    del split
    return compat.output_aval([x], x.shape[:-1], x.dtype)


@encode_rows_p.def_abstract_eval
def _encode_aval(
    x: jax.core.ShapedArray,
    scale: jax.core.ShapedArray,
    *,
    dtype: np.dtype,
    lowest: int,
    split: Any,
) -> jax.core.ShapedArray:
    del lowest, split
    return compat.output_aval([x, scale], x.shape, dtype)


def _impl(primitive: Primitive, *operands: jax.Array, **params: Any) -> jax.Array:
    with jax.disable_jit(False):
        return _jitted(primitive, **params)(*operands)


@functools.lru_cache(maxsize=64)
def _jitted(primitive: Primitive, **params: Any) -> Any:
    return jax.jit(functools.partial(primitive.bind, **params))


# Batching: one more axis of rows.


def _amax_batch(
    operands: tuple[jax.Array], axes: tuple[int], *, split: Any
) -> tuple[jax.Array, int]:
    del split  # `_bind` makes that of the new array
    return amax_rows(jnp.moveaxis(operands[0], axes[0], 0)), 0


def _encode_batch(
    operands: tuple[jax.Array, jax.Array], axes: tuple[Any, Any], *, split: Any, **params: Any
) -> tuple[jax.Array, int]:
    del split
    (x, scale), (x_axis, scale_axis) = operands, axes
    size = scale.shape[scale_axis] if x_axis is None else x.shape[x_axis]
    x = _leading(x, x_axis, size)
    shape = (*x.shape[:-1], 1)
    scale = _leading(scale, scale_axis, size)
    scale = scale.reshape(size, *([1] * (x.ndim - 1))) if scale[0].size == 1 else scale
    return encode_rows(x, jnp.broadcast_to(scale, shape), **params), 0


def _leading(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


# Differentiation


def _amax_jvp(
    primals: tuple[jax.Array], tangents: tuple[Any], *, split: Any
) -> tuple[jax.Array, Any]:
    del split
    return jax.jvp(_amax_meaning, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _encode_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any], *, split: Any, **params: Any
) -> tuple[jax.Array, Any]:
    del split
    codes = encode_rows(*primals, **params)
    return codes, ad.Zero(jax.typeof(codes).to_tangent_aval())


# Splitting over a mesh


@functools.lru_cache(maxsize=1024)
def _split(primitive: Primitive, avals: tuple[jax.ShapeDtypeStruct, ...], **params: Any) -> Any:
    """The call as XLA may split it: between rows."""
    x, *scales = avals
    names = (*(f"a{axis}" for axis in range(len(x.shape) - 1)), None)

    def call(*operands: jax.Array) -> list[jax.Array]:
        return [primitive.bind(*operands, **params, split=None)]

    factors = Factors(
        operands=(names, *((None,) * len(s.shape) if s.size == 1 else names for s in scales)),
        results=(names[:-1] if primitive is amax_rows_p else names,),
        pieces={name: size for name, size in zip(names, x.shape, strict=True) if name},
    )
    what = repr((primitive, avals, params))
    return partitioned(call, avals, factors, lambda shards: call, what)


# Lowering


def why_not_here(x_shape: tuple[int, ...]) -> str | None:
    """Why the CPU does not compute rows of this shape in one call, or None."""
    if len(x_shape) < 2 or math.prod(x_shape) == 0:
        return "it has no rows"
    if x_shape[-1] < _SHORTEST:
        return f"its rows have fewer than {_SHORTEST} values"
    return ffi.why_unavailable("cpu")


_SHORTEST = 16


def _amax_call(x: jax.Array) -> list[jax.Array]:
    if why_not_here(x.shape):
        return [_amax_meaning(x)]
    ffi.ensure_registered("cpu")
    rows = math.prod(x.shape[:-1])
    result = jax.ShapeDtypeStruct((rows,), np.float32)
    largest = jax.ffi.ffi_call(ffi.AMAX_TARGET, result)(x.reshape(rows, x.shape[-1]))
    return [largest.reshape(x.shape[:-1]).astype(x.dtype)]


def _encode_call(
    x: jax.Array, scale: jax.Array, *, dtype: np.dtype, lowest: int
) -> list[jax.Array]:
    if why_not_here(x.shape):
        return [_encode_meaning(x, scale, dtype=dtype, lowest=lowest)]
    ffi.ensure_registered("cpu")
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    bound = {} if is_float8(dtype) else {"lowest": np.int64(lowest)}
    codes = jax.ffi.ffi_call(ffi.QUANTIZE_TARGET, [jax.ShapeDtypeStruct((rows, columns), dtype)])(
        x.reshape(rows, columns),
        scale.reshape(scale.size, 1),
        out_dtype=dtype.name,
        tile_rows=np.int64(rows if scale.size == 1 else 1),
        tile_columns=np.int64(columns),
        given_scale=True,
        plain=True,
        **bound,
    )[0]
    return [codes.reshape(x.shape)]


def _register(primitive: Primitive, meaning: Any, call: Any, batch: Any, jvp: Any) -> None:
    primitive.def_impl(functools.partial(_impl, primitive))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    elsewhere, here = (
        lowering(mlir.lower_fun(function, multiple_results=several))
        for function, several in ((meaning, False), (call, True))
    )
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, here, platform="cpu")


_register(amax_rows_p, _amax_meaning, _amax_call, _amax_batch, _amax_jvp)
_register(encode_rows_p, _encode_meaning, _encode_call, _encode_batch, _encode_jvp)
