"""The definition of a scaled dot in plain jnp: the lowering without a kernel, and for gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import AS_STORED, EpilogueSpec, OperandSpec, ScaledDotSpec
from jaxfp8._value.tiles import repeated

ACTIVATIONS = {
    "none": lambda y: y,
    "relu": lambda y: jnp.maximum(y, 0),
    "gelu_tanh": lambda y: jax.nn.gelu(y, approximate=True),
    "gelu_erf": lambda y: jax.nn.gelu(y, approximate=False),
    "silu": jax.nn.silu,
}

# |q - zero_point| of an 8-bit integer is at most 255 for a zero point in the type's range.
_INT32_SAFE_K = (2**31 - 1) // 255**2


def scaled_dot(
    spec: ScaledDotSpec,
    *operands: jax.Array,
    out_sharding: Any = None,
    multiplied_in: DTypeLike | None = None,
) -> tuple[jax.Array, ...]:
    """The scaled dot of `docs/custom_call.md` on widened operands: `(out,)` or `(out, amax)`.

    `multiplied_in` is a type able to hold the values of both sides, for scales constant along the
    sum; None multiplies in float32, or in int32 if both sides are integers.
    """
    named = widened(spec, dict(zip(spec.operand_names(), operands, strict=True)))
    total = _accumulate(spec, named, out_sharding, multiplied_in)
    for name in ("residual", "bias"):
        if name in named:
            total = total + named[name].astype(jnp.float32)
    return finish(spec.epilogue, total, named.get("out_scale"))


def widened(spec: ScaledDotSpec, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands of a call by name, in the call's own dtypes; scales are rounded."""
    wide = {name: dtype for name, (dtype, _) in AS_STORED.items()}
    named = {n: dtypes.of_exponents(x) if spec.has_exponents(n) else x for n, x in named.items()}
    rounded = {n: x.astype(jnp.bfloat16) if spec.rounds(n) else x for n, x in named.items()}
    return {name: x.astype(wide[name]) if name in wide else x for name, x in rounded.items()}


def finish(
    epilogue: EpilogueSpec, total: jax.Array, out_scale: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Activation, amax and output cast of a sum with residual and bias."""
    y = ACTIVATIONS[epilogue.activation](total)
    out = cast_output(y if out_scale is None else y / out_scale, epilogue.out_dtype)
    if epilogue.amax is None:
        return (out,)
    reduced = tuple(axis for axis, size in enumerate(epilogue.amax) if size == 1)
    return out, jnp.max(jnp.abs(y), axis=reduced, keepdims=True, initial=0)


def cast_output(y: jax.Array, dtype: str) -> jax.Array:
    """Casts to a logical dtype as stored: saturating to 8 bit, FP8 as bytes, NaN to 0 for int8."""
    if not dtypes.is_eight_bit(dtype):
        return y.astype(dtype)
    low, high = dtypes.finite_range(dtype)
    y = jnp.clip(y, low, high)
    if dtypes.is_float8(dtype):
        return lax.bitcast_convert_type(y.astype(dtype), np.uint8)
    return jnp.where(jnp.isnan(y), 0, jnp.round(y)).astype(dtype)


def _accumulate(
    spec: ScaledDotSpec,
    named: dict[str, jax.Array],
    out_sharding: Any,
    multiplied_in: DTypeLike | None,
) -> jax.Array:
    """The sum of products: exact in int32 if both sides are integers, else in float32."""
    sides = {"lhs": spec.lhs, "rhs": spec.rhs}
    exact = (
        multiplied_in is None
        and all(dtypes.is_int8(side.dtype) and _one_tile_along_k(side) for side in sides.values())
        and spec.contracting_size <= _INT32_SAFE_K
    )
    dtype = jnp.int32 if exact else jnp.float32
    scaled_after = exact or multiplied_in is not None
    narrow = multiplied_in in dtypes.SIXTEEN_BIT_FLOATS
    values = []
    for name, side in sides.items():
        zero_point = named.get(name + "_zero_point")
        value = _centred(side, named[name], zero_point, multiplied_in or dtype)
        if side.scale and not scaled_after:
            scale = expand_tiles(named[name + "_scale"], side)
            value = value * compat.laid_along(scale, value)
        values.append(_broadcast_batch(spec, side, value))
    values = compat.batch_alike(values, (spec.lhs.batch, spec.rhs.batch))
    total = lax.dot_general(
        values[0],
        values[1],
        spec.dimension_numbers,
        precision=None if narrow else lax.Precision.HIGHEST,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    if scaled_after and spec.epilogue.out_dtype != "int32":
        total = total.astype(jnp.float32)
        for name, side in sides.items():
            if side.scale:
                scale = _scale_in_output(spec, name, named[name + "_scale"])
                total = total * compat.laid_along(scale, total)
    return total


def _centred(
    side: OperandSpec, values: jax.Array, zero_point: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    if dtypes.is_float8(side.dtype) and values.dtype == np.uint8:
        values = lax.bitcast_convert_type(values, np.dtype(side.dtype))
    if zero_point is not None:
        values = values.astype(jnp.int32)
        values = values - compat.laid_along(expand_tiles(zero_point, side), values)
    return values.astype(dtype)


def expand_tiles(scale: jax.Array, side: OperandSpec) -> jax.Array:
    """A scale or zero point given by tile, repeated to broadcast against the values."""
    for axis, (size, tile) in enumerate(zip(side.shape, side.tiles, strict=True)):
        if tile != 1 and scale.shape[axis] != 1:
            scale = repeated(scale, axis, tile, size)
    return scale


def _one_tile_along_k(side: OperandSpec) -> bool:
    return not (side.scale and side.scale_varies)


def _broadcast_batch(spec: ScaledDotSpec, side: OperandSpec, value: jax.Array) -> jax.Array:
    shape = list(value.shape)
    for axis, size in zip(side.batch, spec.batch_shape, strict=True):
        shape[axis] = size
    return jnp.broadcast_to(value, shape)


def _scale_in_output(spec: ScaledDotSpec, name: str, scale: jax.Array) -> jax.Array:
    """The scale of a side with one tile along K, laid out to broadcast over the output."""
    side = spec.lhs if name == "lhs" else spec.rhs
    scale = expand_tiles(scale, side)
    scale = jnp.transpose(scale, (*side.batch, *side.free, *side.contracting))
    kept = scale.shape[: len(side.batch) + len(side.free)]
    batch, free = kept[: len(side.batch)], kept[len(side.batch) :]
    if math.prod(scale.shape) == 0:
        return jnp.ones((1,) * len(spec.out_shape), scale.dtype)
    if name == "lhs":
        return scale.reshape(*batch, *free, *(1 for _ in spec.rhs.free))
    return scale.reshape(*batch, *(1 for _ in spec.lhs.free), *free)
