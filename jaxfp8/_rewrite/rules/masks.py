"""Zeros put over dequantised values, by a select or as padding: zeros whatever the scales are.

Such zeros are bytes of zero. But a product multiplies them by their scale, and 0 times an infinite
scale (that of a column of zeros, say, which the zeros were meant for) is NaN. So the zeros are
remembered as a mask, a factor of dtype bool among the scales: where it is False, the scales before
it do not count. At the dot, where it is known which elements share a sum, those scales become 1
wherever a mask leaves nothing of their tile. Tiles are cut where they hold zeros and other values
of different sums; along a contracted axis what is left of a tile makes the same sums infinite or
NaN as before. Where cut tiles were nearly as many as the data, the scales stay as they are, and a
guard asks when the program runs whether they are all finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.facts import Factor, Factors, Scaled, full_tiles, refine
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._value.spec import Shape, tile_counts

_BOOL = np.dtype(bool)


def is_mask(factor: Factor) -> bool:
    """Whether a factor says where zeros are, and is no scale."""
    return factor.small.dtype == _BOOL


def masked(fact: Scaled, masks: Sequence[Factor]) -> Scaled:
    """The fact with zeros put over it; without scales there is nothing to remember."""
    return fact.scaled(tuple(masks)) if fact.factors else fact


def where(which: Factor, case: int) -> Factor:
    """The mask of a select that keeps the data where `which` is `case`."""
    small = which.small
    kept = graph.derived(
        "kept", lambda x: (x != 0) if case else (x == 0), [small], small.shape, _BOOL
    )
    return Factor(kept, which.tiles)


def padding(config: Sequence[tuple[int, int, int]], before: Shape, after: Shape) -> list[Factor]:
    """The masks of padding, one for each padded axis."""
    masks = []
    for axis, ((low, _, inner), size) in enumerate(zip(config, before, strict=True)):
        places = low + np.arange(size) * (inner + 1)
        kept = np.zeros(after[axis], bool)
        kept[places[(places >= 0) & (places < after[axis])]] = True
        if not kept.all():
            tiles = list(full_tiles(after))
            tiles[axis] = 1
            counts = tile_counts(after, tuple(tiles))
            masks.append(Factor(graph.literal(kept.reshape(counts)), tuple(tiles)))
    return masks


# Entries of a tile, at the least, for it to be cut: in float32, scales then take a quarter of the
# bytes that the data does.
_LEAST_OF_A_TILE = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """The scales alone, with 1 where masks leave nothing, and the guards that they need."""

    scales: Factors
    guards: tuple[Value, ...] = ()


def settle(factors: Factors, shape: Shape, contracting: Shape) -> Settled:
    """The scales of an operand of a dot, without the masks among its factors."""
    scales: Factors = ()
    guards: tuple[Value, ...] = ()
    for factor in factors:
        if not is_mask(factor):
            scales += (factor,)
            continue
        covered = [_cover(scale, factor, shape, contracting) for scale in scales]
        pairs = list(zip(scales, covered, strict=True))
        guards += tuple(_finite(s.small) for s, c in pairs if c is None)
        scales = tuple(s if c is None else c for s, c in pairs)
    return Settled(scales, guards)


def _cover(scale: Factor, mask: Factor, shape: Shape, contracting: Shape) -> Factor | None:
    """A scale that is 1 where the mask leaves nothing of its tile; None if that takes too many."""
    number = graph.number(scale.small)
    if number is not None and math.isfinite(number):
        return scale
    if mask.small.literal is not None and np.all(mask.small.literal):
        return scale
    tiles = tuple(
        scale.tiles[axis] if axis in contracting else _cut(scale, mask, axis, size)
        for axis, size in enumerate(shape)
    )
    counts = tile_counts(shape, tiles)
    if tiles != scale.tiles and math.prod(counts) * _LEAST_OF_A_TILE > math.prod(shape):
        return None
    kept = mask
    for axis, tile in enumerate(tiles):
        kept = _per_tile(kept, axis, tile, shape)
    if kept.small.literal is not None and np.all(kept.small.literal):
        return scale
    small = graph.derived(
        "where",
        lambda kept, scale: jnp.where(kept, scale, jnp.ones((), scale.dtype)),
        [refine(kept, shape, tiles), refine(scale, shape, tiles)],
        counts,
        scale.small.dtype,
    )
    return Factor(small, tiles)


def _cut(scale: Factor, mask: Factor, axis: int, size: int) -> int:
    """The largest tile along an axis within tiles of the scale and of the mask."""
    finer = [f.tiles[axis] for f in (scale, mask) if f.small.shape[axis] > 1]
    return math.gcd(*finer) if finer else max(size, 1)


def _per_tile(mask: Factor, axis: int, tile: int, shape: Shape) -> Factor:
    """The mask with one entry for each tile along an axis, or for several: what any keeps."""
    if mask.small.shape[axis] == 1 or mask.tiles[axis] % tile == 0:
        return mask
    finer = list(mask.tiles)
    finer[axis] = math.gcd(mask.tiles[axis], tile)
    small = refine(mask, shape, tuple(finer))
    times, count = tile // finer[axis], -(-shape[axis] // tile)
    edges = [(0, 0)] * len(shape)
    edges[axis] = (0, count * times - small.shape[axis])
    counts = (*small.shape[:axis], count, *small.shape[axis + 1 :])
    split = (*counts[: axis + 1], times, *counts[axis + 1 :])

    def any_left(kept: Any, numpy: Any = jnp) -> Any:
        return numpy.pad(kept, edges).reshape(split).any(axis + 1)

    if small.literal is not None:
        left = graph.literal(any_left(small.literal, np))
    else:
        left = graph.derived("any", any_left, [small], counts, _BOOL)
    return Factor(left, (*mask.tiles[:axis], tile, *mask.tiles[axis + 1 :]))


def _finite(small: Value) -> Value:
    """Whether all scales are finite, as the program runs."""
    return graph.derived("finite", lambda x: jnp.isfinite(x).all(), [small], (), _BOOL)
