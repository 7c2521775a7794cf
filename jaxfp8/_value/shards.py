"""How tiles of a scale and shards of a mesh fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxfp8._value.errors import message
from jaxfp8._value.spec import Shape


def check_tiles_fit_shards(operand: str, x: jax.Array, tiles: Mapping[int, int]) -> None:
    """Refuses shards that cut a tile of `x` (sizes by axis), if the sharding of `x` is known.

    It is known of a concrete array, and of a traced one on a mesh with explicit axes.
    """
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    check_tiles_fit("jaxfp8.Quantization", operand, x.shape, sharding, tiles)


def check_tiles_fit(
    operation: str, operand: str, shape: Shape, sharding: Any, tiles: Mapping[int, int]
) -> None:
    """Refuses shards that cut a tile of a future array; only a `NamedSharding` is checked."""
    for axis, parts in _parts(sharding).items():
        tile = tiles.get(axis, shape[axis])
        if parts > 1 and tile < shape[axis] and (shape[axis] // parts) % tile:
            got = f"has {shape[axis] // parts} values per shard on axis {axis}"
            needs = f"tiles of {tile} have to lie within a shard"
            remedy = "choose a tile that divides it, or shard another axis"
            raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))


def _parts(sharding: Any) -> dict[int, int]:
    """The number of shards by axis; empty if unknown."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return {}
    sizes = sharding.mesh.shape
    return {
        axis: math.prod(sizes[name] for name in mesh_axes(entry))
        for axis, entry in enumerate(sharding.spec)
    }


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, outermost first."""
    if entry is None or isinstance(entry, str):
        return (entry,) if entry else ()
    return tuple(entry) if isinstance(entry, tuple) else ()
