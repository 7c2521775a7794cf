"""Masks: the positions of zeros in dequantized values, from a select or padding.

Such zeros are bytes of zero. But a product multiplies them by their scale, and 0 times an infinite
scale is NaN. (The scale of a column of zeros may be infinite, and the zeros may be meant for it.) A
mask therefore records them: a factor of dtype bool among the scales. A False entry cancels the
scales before it.

Masks are settled at the dot, because the dot decides the elements of each sum. The scale of a fully
masked tile becomes 1. A tile with zeros and other values in different sums is cut. Along a
contracting axis it is not cut: its remaining values make the same sums infinite or NaN as before.
If there would be nearly as many cut tiles as elements, the scales stay. A guard then checks at run
time that they are all finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, full_tiles, refine
from jaxfp8._rewrite.ir.graph import Array, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._value.spec import Shape, tile_counts

_BOOL = np.dtype(bool)


def masked(fact: Scaled, masks: Sequence[Factor]) -> Scaled:
    """The fact with zeros put over it. Without scales no mask is needed."""
    return fact.scaled(tuple(masks)) if fact.factors else fact


def where(which: Factor, case: int) -> Factor:
    """The mask of a select: True for data, at entries of `which` equal to `case`."""
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


# Cut tiles must hold this many elements on average. float32 scales then take a quarter of the bytes
# of the data.
_LEAST_OF_A_TILE = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """The scales of an operand without its masks, and the guards needed for that."""

    scales: Factors
    guards: tuple[Value, ...] = ()


def settle(factors: Factors, shape: Shape, contracting: Shape) -> Settled:
    """Settle the masks among the factors of an operand of a dot."""
    scales: Factors = ()
    guards: tuple[Value, ...] = ()
    for factor in factors:
        if not factor.is_mask:
            scales += (factor,)
            continue
        covered = [_cover(scale, factor, shape, contracting) for scale in scales]
        pairs = list(zip(scales, covered, strict=True))
        guards += tuple(_finite(s.small) for s, c in pairs if c is None)
        scales = tuple(s if c is None else c for s, c in pairs)
    return Settled(scales, guards)


def _cover(scale: Factor, mask: Factor, shape: Shape, contracting: Shape) -> Factor | None:
    """The scale with 1 for each fully masked tile; None if tiles are too small."""
    number = constants.number(scale.small)
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
    """The largest common divisor of the scale's and the mask's tile along an axis."""
    finer = [f.tiles[axis] for f in (scale, mask) if f.small.shape[axis] > 1]
    return math.gcd(*finer) if finer else max(size, 1)


def _per_tile(mask: Factor, axis: int, tile: int, shape: Shape) -> Factor:
    """The mask reduced along an axis to one entry per tile: whether it keeps any element."""
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

    def any_left(kept: Array) -> Array:
        return jnp.pad(kept, edges).reshape(split).any(axis + 1)

    if small.literal is not None:
        padded = np.pad(small.literal, edges)
        left = graph.literal(np.asarray(padded.reshape(split).any(axis + 1)))
    else:
        left = graph.derived("any", any_left, [small], counts, _BOOL)
    return Factor(left, (*mask.tiles[:axis], tile, *mask.tiles[axis + 1 :]))


def _finite(small: Value) -> Value:
    """A guard: whether all scales are finite."""
    return graph.derived("finite", lambda x: jnp.isfinite(x).all(), [small], (), _BOOL)
