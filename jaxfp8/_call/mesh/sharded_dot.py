"""A scaled dot on the shards of a mesh: its factors, and each device's dot.

    b batch    m free axes of lhs    n free axes of rhs    k contracted

If a contracted axis is split, each device has a part of every sum. The parts are added in the dtype
of `sums`, float32 by default (in int32 for an int32 output). The epilogue runs once, after that. If
the output is split along the same mesh axis, each device adds up its own part of the output only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._call.mesh import sums
from jaxfp8._call.mesh.shards import Factors, Names, Shards, without_padding
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape

Bind = Callable[..., list[jax.Array]]


class Problem(Protocol):
    """A scaled dot, or a ragged one."""

    @property
    def lhs(self) -> OperandSpec: ...

    @property
    def rhs(self) -> OperandSpec: ...

    @property
    def epilogue(self) -> EpilogueSpec: ...


_BEHIND = ("residual", "bias", "out_scale")  # operands of the epilogue; always the last ones


def factors(spec: ScaledDotSpec) -> Factors:
    """The axes of a scaled dot's operands and results that are split together."""
    named = names_of(spec)
    results = [named["out"]]
    if spec.epilogue.amax is not None:
        results.append(where_full(spec.epilogue.amax, named["out"]))
    return Factors(
        operands=tuple(named[name] for name in spec.operand_names()),
        results=tuple(results),
        pieces=pieces(spec),
        ragged=unequal(spec),
        behind=sum(name in _BEHIND for name in spec.operand_names()),
    )


def names_of(spec: ScaledDotSpec) -> dict[str, Names]:
    """The factor of each axis, by array; None for an axis of one element."""
    sides = {"lhs": side_names(spec.lhs, "m"), "rhs": side_names(spec.rhs, "n")}
    batch = tuple(f"b{i}" for i in range(len(spec.batch_shape)))
    out = (*batch, *(name for names in sides.values() for name in names if name[0] in "mn"))
    return {
        name: where_full(shape, sides.get(name.partition("_")[0], out))
        for name, shape in {**spec.operand_shapes, "out": spec.out_shape}.items()
    }


def side_names(side: OperandSpec, free: str) -> tuple[str, ...]:
    """The factor of each axis of a side; `free` is the letter of its free axes."""
    letters = {"b": side.batch, "k": side.contracting, free: side.free}
    by_axis = {axis: f"{kind}{i}" for kind, axes in letters.items() for i, axis in enumerate(axes)}
    return tuple(by_axis[axis] for axis in range(len(side.shape)))


def split_axes(spec: Problem) -> Iterator[tuple[str, OperandSpec, int]]:
    """The axes of both sides, each with its factor and its side."""
    for side, free in ((spec.lhs, "m"), (spec.rhs, "n")):
        for axis, name in enumerate(side_names(side, free)):
            yield name, side, axis


def where_full(shape: Shape, names: Names) -> Names:
    """The names of an array's axes, without those of one element."""
    return tuple(name if size > 1 else None for size, name in zip(shape, names, strict=True))


def pieces(spec: Problem) -> dict[str, int]:
    """The number of parts each factor can be cut into: no tile of a scale may be cut."""
    sizes: dict[str, int] = {}
    tiles: dict[str, list[int]] = {}
    for name, side, axis in split_axes(spec):
        size, tile = side.shape[axis], side.tiles[axis]
        sizes[name] = max(size, sizes.get(name, 0))
        tiles.setdefault(name, []).append(tile if tile < size and _has_tiles(side) else 1)
    granules = {name: math.lcm(*tiles[name]) for name in sizes}
    return {n: size // granules[n] if size % granules[n] == 0 else 1 for n, size in sizes.items()}


def _has_tiles(side: OperandSpec) -> bool:
    return side.scale or side.zero_point


def unequal(spec: Problem) -> frozenset[str]:
    """The factors with unequal parts allowed: no tile or amax is of several elements."""
    names: set[str] = set()
    cut: set[str] = set()
    for name, side, axis in split_axes(spec):
        size, tile = side.shape[axis], side.tiles[axis]
        names.add(name)
        if _has_tiles(side) and (1 < tile < size or (name[0] == "k" and tile < size)):
            cut.add(name)
    if spec.epilogue.amax is not None:
        cut |= {name for name in names if name[0] != "k"}
    if spec.lhs.zero_point and spec.rhs.zero_point:  # zero is no code of zero on either side
        cut |= {name for name in names if name[0] == "k"}
    return frozenset(names - cut)


def on_shards(spec: ScaledDotSpec, bind: Bind, shards: Shards) -> Callable[..., list[jax.Array]]:
    """The scaled dot of each device, and the collectives between devices."""
    local = _local(spec, shards)
    contracted = shards.axes(*(f"k{i}" for i in range(len(spec.lhs.contracting))))

    def call(*operands: jax.Array) -> list[jax.Array]:
        if contracted:
            padded = _without_padding(spec, shards, operands)
            results = _sum_of_parts(spec, local, bind, shards, padded)
        else:
            results = bind(local, *operands)
        return [results[0], *(_amax(spec, shards.behind, amax) for amax in results[1:])]

    return call


def _local(spec: ScaledDotSpec, shards: Shards) -> ScaledDotSpec:
    named = names_of(spec)

    def side(old: OperandSpec, names: Names) -> OperandSpec:
        return dataclasses.replace(old, shape=shards.shape(old.shape, names))

    def plane(shape: Shape) -> Shape:
        return shards.behind.shape(shape, where_full(shape, named["out"]))

    return dataclasses.replace(
        spec,
        lhs=side(spec.lhs, named["lhs"]),
        rhs=side(spec.rhs, named["rhs"]),
        epilogue=spec.epilogue.map_shapes(plane),
    )


def _without_padding(
    spec: ScaledDotSpec, shards: Shards, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """The operands, with zeros in the padding of contracted axes."""
    names = names_of(spec)
    result = []
    for name, x in zip(spec.operand_names(), operands, strict=True):
        if name in ("lhs", "rhs"):
            side = getattr(spec, name)
            for axis in side.contracting:
                x = without_padding(x, axis, side.shape[axis], shards.axes(names[name][axis]))
        result.append(x)
    return result


def _sum_of_parts(
    spec: ScaledDotSpec,
    local: ScaledDotSpec,
    bind: Bind,
    shards: Shards,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    named = dict(zip(local.operand_names(), operands, strict=True))
    sides = (local.lhs, local.rhs)
    exact = all(dtypes.is_int8(side.dtype) and not side.scale for side in sides)
    dtype = "int32" if exact and local.epilogue.out_dtype == "int32" else sums.chosen().name
    lhs, rhs = (dataclasses.replace(side, sums=False) for side in sides)  # those of all of K
    part = dataclasses.replace(local, lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype=dtype))
    (total,) = bind(part, *(named[name] for name in part.operand_names()))
    summed = shards.axes(*(f"k{i}" for i in range(len(spec.lhs.contracting))))
    total = over_devices(names_of(spec)["out"], summed, shards, total)
    total = total if dtype == "int32" else total.astype(jnp.float32)
    for name in ("residual", "bias"):
        if name in named:
            total = total + named[name].astype(jnp.float32)
    return list(dot_reference.finish(local.epilogue, total, named.get("out_scale")))


def over_devices(
    names: Names, summed: tuple[str, ...], shards: Shards, part: jax.Array
) -> jax.Array:
    """The sum of the devices' parts; each device keeps its own part of the output.

    Args:
      names: the factors of the output's axes.
      summed: the mesh axes of the sum.
      shards: the split of the call.
      part: the part of this device.
    """
    scattered = {axis for axes in shards.scattered.values() for axis in axes}
    for axis, name in enumerate(names):
        for mesh_axis in shards.scattered.get(name or "", ()):
            part = lax.psum_scatter(part, mesh_axis, scatter_dimension=axis, tiled=True)
    whole = tuple(axis for axis in summed if axis not in scattered)
    return lax.psum(part, whole) if whole else part


def _amax(spec: ScaledDotSpec, shards: Shards, amax: jax.Array) -> jax.Array:
    """The maximum over the shards along an amax's reduced axes.

    It is gathered first: a collective maximum need not keep NaN.
    """
    assert spec.epilogue.amax is not None
    pairs = zip(spec.epilogue.amax, names_of(spec)["out"], strict=True)
    mesh_axes = shards.axes(*(name for size, name in pairs if size == 1))
    return jnp.max(lax.all_gather(amax, mesh_axes), axis=0) if mesh_axes else amax
