"""How tiles of a scale and shards of a mesh fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxfp8._errors import message


def check_tiles_fit_shards(operand: str, x: jax.Array, tiles: Mapping[int, int]) -> None:
    """Refuses a tile that a shard of `x` would cut, as far as the sharding of `x` is known.

    It is known of an array that is there, and of a traced one on a mesh with explicit axes.

    Args:
      operand: what the error calls `x`.
      x: an array, perhaps traced.
      tiles: size of the tile by axis.

    Raises:
      ValueError: a tile does not divide the shards of its axis.
    """
    for axis, parts in _parts(x).items():
        tile = tiles.get(axis, 1)
        if tile < x.shape[axis] and parts > 1 and (x.shape[axis] // parts) % tile:
            got = f"has {x.shape[axis] // parts} values per shard on axis {axis}"
            needs = f"tiles of {tile} have to lie within a shard"
            remedy = "choose a tile that divides it, or shard another axis"
            raise ValueError(message("jaxfp8.Quantization", f"`{operand}`", got, needs, remedy))


def _parts(x: jax.Array) -> dict[int, int]:
    """Into how many shards each axis is cut; nothing where that is not known."""
    sharding = _sharding(x)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return {}
    sizes = sharding.mesh.shape
    return {
        axis: math.prod(sizes[name] for name in _names(entry))
        for axis, entry in enumerate(sharding.spec)
    }


def _sharding(x: jax.Array) -> Any:
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None or isinstance(entry, str):
        return (entry,) if entry else ()
    return tuple(entry) if isinstance(entry, tuple) else ()
