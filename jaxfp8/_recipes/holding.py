"""The recipe of a weight already quantised."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8._recipes.quantization import Granularity, Quantization
from jaxfp8._recipes.recipes import FP8_W8A16, INT8_W8A16, Recipe
from jaxfp8._value.joining import tiles_within
from jaxfp8._value.prepared import stored
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import TransposedArray


def recipe_for(
    q: QArray | TransposedArray, recipe: Recipe, contracting: Shape, batch: Shape
) -> Recipe:
    """`recipe` for activations, with the weight's part derived from `q` if it differs."""
    own = quantization_of(q, contracting, batch)
    for known in (recipe, FP8_W8A16, INT8_W8A16):
        alike = (known.activation, known.compute) == (recipe.activation, recipe.compute)
        if alike and _same(known.weight, own, q, contracting, batch):
            return known
    name = f"{recipe.name}, weight {own.dtype} {_worded(own.granularity)}"
    return dataclasses.replace(recipe, name=name, weight=own)


def quantization_of(q: QArray | TransposedArray, contracting: Shape, batch: Shape) -> Quantization:
    """The weight's part of a recipe, from a weight; the finest granularity if none fits."""
    codes = stored(q)
    common: dict[str, Any] = {
        "dtype": codes.qvalue.dtype,
        "symmetric": codes.zero_point is None,
        "scale_dtype": codes.scale.dtype,
    }
    free = [axis for axis in range(q.ndim) if axis not in {*contracting, *batch}]
    sizes = q.tile_sizes
    pair = tuple(sizes[max(axes)] if axes else None for axes in (contracting, free))
    kinds: tuple[Any, ...] = ("tensor", "channel", pair)
    made = [Quantization(granularity=kind, **common) for kind in kinds]
    fitting = [how for how in made if _tiles(how, q, contracting, batch) == tiles_within(q)]
    return (fitting or made)[0 if fitting else -1]


def _same(
    how: Quantization | None, own: Quantization, q: Any, contracting: Shape, batch: Shape
) -> bool:
    if how is None or (how.dtype, how.symmetric) != (own.dtype, own.symmetric):
        return False
    return _tiles(how, q, contracting, batch) == tiles_within(q)


def _tiles(how: Quantization, q: Any, contracting: Shape, batch: Shape) -> Shape:
    tiles = how.tiles(q.shape, contracting, batch)
    return tuple(min(tiles.get(axis, size), size) for axis, size in enumerate(q.shape))


def _worded(granularity: Granularity) -> str:
    if isinstance(granularity, str):
        return f"per {granularity}"
    return "in tiles of " + " x ".join(map(str, granularity))
