"""A scaled dot on shards that cut tiles: each device takes its own part of the scales.

It is for automatic mesh axes: their shards are known only when XLA partitions a program. Along a
cut axis each device has the scales of all tiles. They are small.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax import lax

from jaxfp8._call.mesh import sharded_dot
from jaxfp8._call.mesh.shards import Factors, Names, Shards
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec
from jaxfp8._value.tiles import repeated

_SIDE_OF = {f"{side}_{part}": side for side in ("lhs", "rhs") for part in ("scale", "zero_point")}


def factors(spec: ScaledDotSpec) -> Factors | None:
    """The factors with shards free to cut tiles; None if no tile can be cut."""
    tiled = {name: _tiled(getattr(spec, name)) for name in ("lhs", "rhs")}
    if not any(tiled.values()):
        return None

    def whole(operand: str, names: Names) -> Names:
        axes = tiled.get(_SIDE_OF.get(operand, ""), ())
        return tuple(None if axis in axes else name for axis, name in enumerate(names))

    table = sharded_dot.factors(spec)
    operands = tuple(map(whole, spec.operand_names(), table.operands))
    sizes: dict[str, int] = {}
    for name, side, axis in sharded_dot.split_axes(spec):
        sizes[name] = max(side.shape[axis], sizes.get(name, 0))
    return dataclasses.replace(table, operands=operands, pieces=sizes)


def _tiled(side: OperandSpec) -> tuple[int, ...]:
    """The axes of an operand with several tiles of several elements."""
    pairs = enumerate(zip(side.tiles, side.shape, strict=True))
    scaled = side.scale or side.zero_point
    return tuple(axis for axis, (tile, size) in pairs if scaled and 1 < tile < size)


def on_shards(
    spec: ScaledDotSpec, bind: sharded_dot.Bind, shards: Shards
) -> Callable[..., list[jax.Array]]:
    """The scaled dot of each device, with smaller tiles if its shard cuts one."""
    names = sharded_dot.names_of(spec)
    lhs, rhs = _uncut(spec.lhs, names["lhs"], shards), _uncut(spec.rhs, names["rhs"], shards)
    finer = dataclasses.replace(spec, lhs=lhs, rhs=rhs)
    call = sharded_dot.on_shards(finer, bind, shards)

    def own(operand: str, x: jax.Array) -> jax.Array:
        if operand not in _SIDE_OF:
            return x
        name = _SIDE_OF[operand]
        old, new = getattr(spec, name), getattr(finer, name)
        for axis in _tiled(old):
            x = _part(x, axis, old, new, shards, names[name][axis])
        return x

    return lambda *operands: call(*map(own, spec.operand_names(), operands))


def _uncut(side: OperandSpec, names: Names, shards: Shards) -> OperandSpec:
    tiles = list(side.tiles)
    for axis in _tiled(side):
        if shards.axes(names[axis]):
            tiles[axis] = math.gcd(tiles[axis], side.shape[axis] // shards.parts(names[axis]))
    return dataclasses.replace(side, tiles=tuple(tiles))


def _part(
    scale: jax.Array,
    axis: int,
    old: OperandSpec,
    new: OperandSpec,
    shards: Shards,
    name: str | None,
) -> jax.Array:
    """A device's part of a scale along a tiled axis, for the smaller tiles."""
    mesh_axes = shards.axes(name)
    if not mesh_axes:
        return scale
    tile, size = new.tiles[axis], old.shape[axis]
    scale = repeated(scale, axis, old.tiles[axis] // tile, size // tile)
    length = size // tile // shards.parts(name)
    return lax.dynamic_slice_in_dim(scale, lax.axis_index(mesh_axes) * length, length, axis)
