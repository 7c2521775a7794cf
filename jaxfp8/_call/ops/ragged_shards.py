"""A ragged dot on the shards of a mesh: its factors, and the groups of each device.

    b0 groups with a matrix of their own    g0 groups of sums, an axis of the output alone
    m0 free axis of lhs                     n0 free axis of rhs    k0 contracted

Every device has all sizes, and computes those of its own part. Split rows, or positions of K, hold
a part of each group. Split groups see all rows, or all of K. Each device multiplies those of its
own groups. Its other rows are zeros, so the sum over devices adds zeros to each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._call.mesh import sharded_dot, sums
from jaxfp8._call.mesh.shards import Factors, Names, Shards
from jaxfp8._call.ops.ragged_reference import RaggedSpec, group_ends
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, Shape
from jaxfp8._value.tiles import repeated

_Named = dict[str, Any]
# The groups to be divided: those of weights, or of sums. Masked groups lie by themselves.
_OWN = {"rows": "b0", "contracted": "g0"}
# The groups, in front of the other axes of the output.
_GROUPS: dict[str, Names] = {"rows": (), "masked": ("b0",), "contracted": ("g0",)}


def factors(spec: RaggedSpec) -> Factors:
    """The axes of a ragged dot's operands and result that are split together."""
    named = _names(spec)
    return Factors(
        operands=tuple(named[name] for name in spec.operand_names()),
        results=(named["out"],),
        pieces={"g0": spec.groups, **sharded_dot.pieces(spec)},
        ragged=sharded_dot.unequal(spec) & {"m0", "n0"},
    )


def _names(spec: RaggedSpec) -> dict[str, Names]:
    """The factor of each axis, by array; sizes are never split."""
    out: Names = (*_GROUPS[spec.grouping], "m0", "n0")
    named: dict[str, Names] = {"out": sharded_dot.where_full(spec.out_shape, out)}
    for name in spec.operand_names():
        side, free = (spec.lhs, "m") if name.startswith("lhs") else (spec.rhs, "n")
        shape = side.shape if name in ("lhs", "rhs") else side.scale_shape
        if name == "group_sizes":
            named[name] = (None,)
        else:
            named[name] = sharded_dot.where_full(shape, sharded_dot.side_names(side, free))
    return named


def on_shards(
    spec: RaggedSpec, bind: Callable[..., list[jax.Array]], shards: Shards
) -> Callable[..., list[jax.Array]]:
    """The ragged dot of each device, and the sum over devices."""
    local, own = _local(spec, shards), _OWN.get(spec.grouping)
    summed = (*shards.axes("k0"), *(shards.axes("b0") if own == "b0" else ()))

    def call(*operands: jax.Array) -> list[jax.Array]:
        named: _Named = dict(zip(spec.operand_names(), operands, strict=True))
        for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
            if named[name].dtype != side.dtype:  # FP8 moves between devices as bytes
                named[name] = lax.bitcast_convert_type(named[name], np.dtype(side.dtype))
        named["group_sizes"] = _sizes(spec, local, shards, named["group_sizes"])
        if own is not None and shards.axes(own):
            y = _of_own_groups(local, bind, _index(shards, own), named)
        else:
            (y,) = bind(local, *(named[name] for name in local.operand_names()))
        if summed:
            y = sharded_dot.over_devices(_names(spec)["out"], summed, shards, y)
        return [y.astype(spec.out_dtype)]

    return call


def _local(spec: RaggedSpec, shards: Shards) -> RaggedSpec:
    """The problem of one device. Parts of sums have the dtype of `sums`."""
    named = _names(spec)
    lhs, rhs = (
        dataclasses.replace(side, shape=shards.shape(side.shape, named[name]))
        for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs))
    )
    out_dtype = sums.chosen().name if shards.axes("k0") else spec.out_dtype
    return dataclasses.replace(
        spec,
        lhs=lhs,
        rhs=rhs,
        groups=rhs.shape[rhs.batch[0]] if rhs.batch else spec.groups // shards.parts("g0"),
        epilogue=EpilogueSpec(out_dtype=out_dtype),
    )


def _sizes(spec: RaggedSpec, local: RaggedSpec, shards: Shards, sizes: jax.Array) -> jax.Array:
    """The sizes of all groups in the rows, or positions of K, of this device."""
    name = "k0" if spec.grouping == "contracted" else "m0"
    whole, own = ((s.lhs.depth, s.rows)[name == "m0"] for s in (spec, local))
    start = _index(shards, name) * own
    if spec.grouping == "masked":
        mine = _index(shards, "b0") * local.groups
        sizes = lax.dynamic_slice_in_dim(jnp.clip(sizes, 0, whole), mine, local.groups)
        return jnp.clip(sizes - start, 0, own)
    if not shards.axes(name):
        return sizes
    return jnp.diff(jnp.clip(group_ends(sizes, whole) - start, 0, own), prepend=0)


def _index(shards: Shards, name: str) -> jax.Array | np.int32:
    """The place of this device along a factor."""
    axes = shards.axes(name)
    return lax.axis_index(axes) if axes else np.int32(0)


def _of_own_groups(
    local: RaggedSpec, bind: Callable[..., list[jax.Array]], place: Any, named: _Named
) -> jax.Array:
    """The ragged dot of this device's groups. Their rows, or positions of K, move to the front."""
    along_k = local.grouping == "contracted"
    ends = group_ends(named["group_sizes"], local.lhs.depth if along_k else local.rows)
    sizes = jnp.diff(ends, prepend=0)
    first = place * local.groups
    start = lax.dynamic_index_in_dim(ends - sizes, first, keepdims=False)
    lhs, rhs = local.lhs, local.rhs
    lhs, named = _rolled("lhs", lhs, lhs.contracting if along_k else lhs.free, named, -start)
    if along_k:
        rhs, named = _rolled("rhs", rhs, rhs.contracting, named, -start)
    named["group_sizes"] = lax.dynamic_slice_in_dim(sizes, first, local.groups)
    front = dataclasses.replace(local, lhs=lhs, rhs=rhs)
    (y,) = bind(front, *(named[name] for name in front.operand_names()))
    return y if along_k else jnp.roll(y, start, 0)


def _rolled(
    name: str, side: OperandSpec, axes: Shape, named: _Named, by: jax.Array
) -> tuple[OperandSpec, _Named]:
    """A side moved along an axis; scales of several places are repeated for each."""
    (axis,) = axes
    size, tile = side.shape[axis], side.tiles[axis]

    def roll(x: jax.Array) -> jax.Array:
        if x.shape[axis] == 1:
            return x
        if x.shape[axis] != size:
            x = repeated(x, axis, tile, size)
        if not dtypes.is_float8(x.dtype):
            return jnp.roll(x, by, axis)
        moved = jnp.roll(lax.bitcast_convert_type(x, np.uint8), by, axis)
        return lax.bitcast_convert_type(moved, x.dtype)

    tiles = tuple(1 if a == axis and t < size else t for a, t in enumerate(side.tiles))
    moved = {key: roll(x) if key.startswith(name) else x for key, x in named.items()}
    return dataclasses.replace(side, tiles=tiles), moved
