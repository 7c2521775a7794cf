"""Arithmetic between an array and values shared per tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxfp8._value.spec import Shape


def map_tiles(
    fun: Callable[..., jax.Array], x: jax.Array, shared: Sequence[jax.Array], tiles: Shape
) -> jax.Array:
    """`fun(x, *shared)` elementwise; each entry of a shared array goes with one tile of `x`.

    Shared arrays have rank 0 or that of `x`, each axis 1 or one entry per tile. An axis of one
    tile, or of tiles of one, broadcasts. Tiles that divide their axis take a reshape. Only for a
    partial tile are the shared arrays repeated to the size of the axis.
    """
    shared = [_repeat_partial(s, x.shape, tiles) for s in shared]
    split = tuple(_split(axis, x.shape, shared) for axis in range(x.ndim))
    y = fun(_reshape(x, split), *(_reshape(s, _shared_split(s, split)) for s in shared))
    return _reshape(y, (x.shape,))


def reduce_tiles(
    fun: Callable[..., jax.Array], x: jax.Array, tiles: Shape, counts: Shape
) -> jax.Array:
    """`fun(tile, axis=...)` for each tile, as an array of shape `counts`.

    A partial tile is padded with zeros, and so is the one tile of an empty axis. `fun` must allow
    zeros, as a largest magnitude does.
    """
    edges = [(0, n * tile - size) for n, tile, size in zip(counts, tiles, x.shape, strict=True)]
    x = jnp.pad(x, edges) if any(high for _, high in edges) else x
    blocks = x.reshape([n for pair in zip(counts, tiles, strict=True) for n in pair])
    return fun(blocks, axis=tuple(range(1, blocks.ndim, 2)))


def repeated(x: jax.Array, axis: int, times: int, size: int) -> jax.Array:
    """Each index of an axis a number of times, up to a size; split over devices as `x` is."""
    before, full, after = x.shape[:axis], x.shape[axis] * times, x.shape[axis + 1 :]
    apart = jnp.expand_dims(x, axis + 1)
    shape = (*x.shape[: axis + 1], times, *after)
    whole = jnp.broadcast_to(apart, shape).reshape(*before, full, *after)
    return whole if full == size else jax.lax.slice_in_dim(whole, 0, size, axis=axis)


def _repeat_partial(shared: jax.Array, shape: Shape, tiles: Shape) -> jax.Array:
    """`shared` at full size on each axis with a partial tile."""
    for axis, count in enumerate(shared.shape):
        if count not in (0, 1, shape[axis]) and count * tiles[axis] != shape[axis]:
            shared = repeated(shared, axis, tiles[axis], shape[axis])
    return shared


def _split(axis: int, shape: Shape, shared: Sequence[jax.Array]) -> Shape:
    """An axis as (tiles, size of a tile), or as it is if it broadcasts already."""
    size = shape[axis]
    counts = {s.shape[axis] for s in shared if s.ndim} - {1, size}
    count = next(iter(counts), size)
    return (size,) if count == size else (count, size // count)


def _shared_split(shared: jax.Array, split: Sequence[Shape]) -> Sequence[Shape]:
    """The shape of `shared` to broadcast against an array split by `split`."""
    if shared.ndim == 0:
        return ()
    pairs = zip(shared.shape, split, strict=True)
    return [_shared_axis(size, parts) for size, parts in pairs]


def _shared_axis(size: int, parts: Shape) -> Shape:
    """Sizes of a shared axis of `size` if the array's axis has these parts."""
    if len(parts) == 1:
        return (size,)
    return parts if size == math.prod(parts) else (size, 1)


def _reshape(x: jax.Array, split: Sequence[Shape]) -> jax.Array:
    """`x` with each axis replaced by its parts; `x` itself if the shape stays the same."""
    shape = tuple(n for parts in split for n in parts)
    return x if shape == x.shape else x.reshape(shape)
