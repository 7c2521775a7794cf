"""The packed weight layout of the CPU kernels, and conversions to and from it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._value.dtypes import as_bytes, bits_as
from jaxfp8._value.qarray import QArray, given_tiles
from jaxfp8._value.spec import Shape, tile_counts

# N columns per group, and contiguous K values of each.
COLUMNS, QUAD = 64, 4


def with_last(axes: tuple[Any, ...], contracting: int) -> tuple[Any, ...]:
    """The entries of each axis, the contracted axis's last."""
    rest = list(axes)
    moved = rest.pop(contracting)
    return (*rest, moved)


def logical_shape(packed: Shape, contracting: int) -> Shape:
    """The shape of the array before packing."""
    *lead, groups, quads, _, _ = packed
    shape = [*lead, groups * COLUMNS]
    shape.insert(len(shape) + 1 + contracting, quads * QUAD)
    return tuple(shape)


def split_tile(tile: int, size: int, inner: int) -> tuple[int, int] | None:
    """The tile of an axis of `size` once it is two axes, the second of size `inner`.

    None if no tile of two axes is the same.
    """
    if tile >= size:
        return size // inner, inner
    if tile % inner == 0:
        return tile // inner, inner
    return (1, tile) if inner % tile == 0 else None


def _split_entries(entries: int, tile: int, size: int, inner: int) -> Shape:
    """The two sizes of an axis of a scale once the axis is split in two."""
    tiles = split_tile(tile, size, inner)
    assert tiles is not None
    return (1, 1) if entries == 1 else tile_counts((size // inner, inner), tiles)


@functools.partial(jax.jit, static_argnums=1)
def pack_columns(q: QArray, contracting: int) -> QArray:
    """An array as `[..., N / 64, K / 4, 64, 4]`, for K the contracted axis, N the last other."""
    *_, columns, depth = with_last(q.shape, contracting)
    *_, wide, deep = with_last(q.tile_sizes, contracting)

    def pack(array: jax.Array | None, wide: int = 1, deep: int = 1) -> jax.Array | None:
        if array is None or array.ndim == 0:
            return array
        codes = jnp.moveaxis(as_bytes(array), contracting, -1)
        *lead, across, along = codes.shape
        parts = _split_entries(across, wide, columns, COLUMNS)
        parts += _split_entries(along, deep, depth, QUAD)
        return bits_as(codes.reshape(*lead, *parts).swapaxes(-3, -2), array.dtype)

    *lead, _, _ = with_last(given_tiles(q), contracting)
    tiles = [split_tile(wide, columns, COLUMNS), split_tile(deep, depth, QUAD)]
    outer, inner = zip(*(tile for tile in tiles if tile), strict=True)
    return QArray(
        jnp.asarray(pack(q.qvalue)),
        jnp.asarray(pack(q.scale, wide, deep)),
        pack(q.zero_point, wide, deep),
        tiles=(*lead, *outer, *inner),
    )


@functools.partial(jax.jit, static_argnums=1)
def unpack_columns(packed: QArray, contracting: int) -> QArray:
    """The inverse of `pack_columns`; `tiles` are given only if they cannot be derived."""

    def unpack(array: jax.Array | None) -> jax.Array | None:
        if array is None or array.ndim == 0:
            return array
        codes = as_bytes(array).swapaxes(-3, -2)
        *lead, groups, columns, quads, depth = codes.shape
        codes = codes.reshape(*lead, groups * columns, quads * depth)
        return bits_as(jnp.moveaxis(codes, -1, contracting), array.dtype)

    qvalue, scale = jnp.asarray(unpack(packed.qvalue)), jnp.asarray(unpack(packed.scale))
    plain = QArray(qvalue, scale, unpack(packed.zero_point))
    *lead, groups, quads, columns, depth = packed.tile_sizes
    tiles = [*lead, groups * columns]
    tiles.insert(plain.ndim + contracting, quads * depth)
    derived = plain.tile_sizes
    given = tuple(None if a == b else a for a, b in zip(tiles, derived, strict=True))
    return dataclasses.replace(plain, tiles=given) if any(given) else plain
