"""Zeros put over dequantised values, by a select or as padding: zeros whatever the scales are.

Such zeros are bytes of zero. But a product multiplies them by their scale, and 0 times an infinite
scale (that of a column of zeros, say, which the zeros were meant for) is NaN. So the zeros are
remembered as a mask, a factor of dtype bool among the scales: where it is False, the scales before
it do not count. At the dot, where it is known which elements share a sum, those scales become 1
wherever a mask leaves nothing of their tile. Elsewhere what is left of the tile makes the same
sums infinite or NaN as before, if no sum holds zeros alone; if one may, there is no product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite import _graph
from jaxfp8._rewrite._facts import Factor, Factors, Scaled, all_found, full_tiles, refine
from jaxfp8._spec import Shape, tile_counts

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
    kept = _graph.derived(
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
            masks.append(Factor(_graph.literal(kept.reshape(counts)), tuple(tiles)))
    return masks


def settle(factors: Factors, shape: Shape, contracting: Shape) -> Factors | None:
    """The scales alone, with 1 where masks leave nothing; None if zeros would be lost."""
    scales: Factors = ()
    for factor in factors:
        if not is_mask(factor):
            scales += (factor,)
            continue
        covered = all_found([_cover(scale, factor, shape, contracting) for scale in scales])
        if covered is None:
            return None
        scales = covered
    return scales


def _cover(scale: Factor, mask: Factor, shape: Shape, contracting: Shape) -> Factor | None:
    """A scale that is 1 where the mask leaves nothing of its tile."""
    number = _graph.number(scale.small)
    if number is not None and math.isfinite(number):
        return scale
    kept: Factor | None = mask
    for axis, tile in enumerate(scale.tiles):
        kept = _per_tile(kept, axis, tile, shape[axis], axis in contracting) if kept else None
    if kept is None:
        return None
    if kept.small.literal is not None and np.all(kept.small.literal):
        return scale
    small = _graph.derived(
        "where",
        lambda kept, scale: jnp.where(kept, scale, jnp.ones((), scale.dtype)),
        [refine(kept, shape, scale.tiles), scale.small],
        scale.small.shape,
        scale.small.dtype,
    )
    return Factor(small, scale.tiles)


def _per_tile(mask: Factor, axis: int, tile: int, size: int, contracted: bool) -> Factor | None:
    """The mask with one entry for each tile along an axis, or for several.

    Zeros beside other elements of a tile are in the same sums only along a contracted axis.
    """
    if mask.small.shape[axis] == 1 or mask.tiles[axis] % tile == 0:
        return mask
    if not contracted or mask.tiles[axis] != 1:
        return None
    counts = list(mask.small.shape)
    counts[axis] = -(-size // tile)
    edges = [(0, counts[axis] * tile - size if a == axis else 0) for a in range(len(counts))]
    split = (*counts[: axis + 1], tile, *counts[axis + 1 :])

    def any_left(kept: Any, numpy: Any = jnp) -> Any:
        return numpy.pad(kept, edges).reshape(split).any(axis + 1)

    literal = mask.small.literal
    if literal is not None:
        small = _graph.literal(any_left(literal, np))
    else:
        small = _graph.derived("any", any_left, [mask.small], tuple(counts), _BOOL)
    return Factor(small, (*mask.tiles[:axis], tile, *mask.tiles[axis + 1 :]))
