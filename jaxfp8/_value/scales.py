"""Tiles of values that share a scale, and the choice of that scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxfp8._value.dtypes import E8M0, WIDE_FLOAT, finite_range
from jaxfp8._value.qarray import Tiles
from jaxfp8._value.spec import Shape
from jaxfp8._value.tiles import reduce_tiles

# A scale so little above a power of two is rounded down to it: multiplying by a reciprocal may be
# off by an ulp, and both scales give the same codes.
_SLACK = 1 - 2.0**-22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Granularity:
    """The cut of an array of `shape` into tiles, one scale each."""

    shape: Shape  # shape of the array
    tiles: Shape  # size of the tile on each axis, at least 1
    counts: Shape  # number of tiles on each axis; the last may be partial

    @property
    def stated_tiles(self) -> Tiles | None:
        """The field `QArray.tiles`: the sizes not derivable from the shapes."""
        axes = zip(self.shape, self.tiles, self.counts, strict=True)
        stated = tuple(
            tile if count * tile != size and count > 1 else None for size, tile, count in axes
        )
        while stated and stated[0] is None:
            stated = stated[1:]
        return stated or None


def granularity(shape: Shape, named: Mapping[int, int]) -> Granularity:
    """The tiles of an array of `shape`: of the size `named` for an axis, else the whole axis."""
    tiles = tuple(named.get(axis, max(size, 1)) for axis, size in enumerate(shape))
    counts = tuple(-(-n // tiles[axis]) if axis in named else 1 for axis, n in enumerate(shape))
    return Granularity(shape=shape, tiles=tiles, counts=counts)


def choose_scale(
    x: jax.Array,
    grain: Granularity,
    dtype: np.dtype,
    zero_point: jax.Array | None,
    choose_zero: bool,
) -> jax.Array:
    """The smallest float32 scale without saturation of finite values in a tile; 0 if all are 0.

    `x` is float32; NaN and infinities are ignored. With `choose_zero` a zero point will suit it.
    """
    lowest, highest = finite_range(dtype)
    if choose_zero:
        below, above = extent(x, grain)
        return below * per(highest - lowest) + above * per(highest - lowest)
    if zero_point is not None:
        below, above = extent(x, grain)
        zero = zero_point.astype(jnp.float32)
        return jnp.maximum(_ratio(below, zero - lowest), _ratio(above, highest - zero))
    if lowest == 0:
        return extent(x, grain)[1] * per(highest)
    largest = reduce_tiles(jnp.max, jnp.abs(_finite(x)), grain.tiles, grain.counts)
    return largest * per(highest)


def choose_zero_point(
    x: jax.Array, grain: Granularity, dtype: np.dtype, scale: jax.Array
) -> jax.Array:
    """The code of 0, in `dtype`; it gives a tile's lowest value the lowest code."""
    lowest, highest = finite_range(dtype)
    below = extent(x, grain)[0]
    code = jnp.round(lowest + below / jnp.where(scale == 0, 1, scale))
    return jax.lax.stop_gradient(jnp.clip(code, lowest, highest)).astype(dtype)


def extent(x: jax.Array, grain: Granularity) -> tuple[jax.Array, jax.Array]:
    """How far the finite values of each tile reach below and above zero; both at least 0."""
    x = _finite(x)
    return (
        reduce_tiles(jnp.max, jnp.maximum(-x, 0), grain.tiles, grain.counts),
        reduce_tiles(jnp.max, jnp.maximum(x, 0), grain.tiles, grain.counts),
    )


def store_scale(scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A chosen float32 scale in the stored dtype, within its normal range; 0 becomes 1.

    float8_e8m0fnu holds powers of two. The scale is rounded up, so nothing saturates.
    """
    dtype = np.dtype(dtype)
    if dtype not in WIDE_FLOAT:
        return exponents(power_of_two(scale))
    info = jnp.finfo(dtype)
    inside = jnp.clip(scale, float(info.tiny), float(info.max))
    return jnp.where(scale > 0, inside, 1.0).astype(dtype)


def power_of_two(scale: jax.Array) -> jax.Array:
    """The least power of two not below a float32 `scale`, within the normal range; 0 becomes 1."""
    scale = jax.lax.stop_gradient(jnp.where(scale > 0, scale, 1.0))
    bits = jax.lax.bitcast_convert_type(scale * jnp.float32(_SLACK), jnp.int32)
    code = jnp.clip((bits >> 23) + 1, 1, 254)
    return jax.lax.bitcast_convert_type(code << 23, jnp.float32)


def exponents(scale: jax.Array) -> jax.Array:
    """Normal powers of two of float32 in float8_e8m0fnu, which is the exponent field of float32."""
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(scale), jnp.int32)
    return jax.lax.bitcast_convert_type((bits >> 23).astype(jnp.uint8), E8M0)


def per(steps: float) -> np.float32:
    """The reciprocal. XLA divides by a constant so; this has the same bits without `jit`."""
    return np.float32(1) / np.float32(steps)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _ratio(span: jax.Array, steps: jax.Array) -> jax.Array:
    """`span / steps`, or 0 if there is no code on this side of 0."""
    return jnp.where(steps > 0, span / jnp.maximum(steps, 1), 0)
