"""The split of a call along explicit mesh axes: by the types of its arrays.

On explicit axes JAX knows the sharding of every array while it traces. The type of an output is
decided then, as by `jax.lax.dot_general`. Lowering wraps the call in a `shard_map`, with the
factors of `shards`. Arrays with another split are resharded first, as stored: 8-bit values move as
8-bit values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfp8._call.mesh import sums
from jaxfp8._call.mesh.shards import Factors, Names, Parts, Shards
from jaxfp8._value import compat
from jaxfp8._value.dtypes import as_bytes, bits_as
from jaxfp8._value.shards import mesh_axes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape
from jaxfp8._value.tiles import repeated

Axes = tuple[str, ...]  # the mesh axes of one array axis, outermost first


def splits(aval: Any) -> tuple[Axes, ...]:
    """The explicit mesh axes of each axis of an array, by its type."""
    spec = tuple(aval.sharding.spec) + (None,) * (len(aval.shape) - len(aval.sharding.spec))
    return tuple(map(mesh_axes, spec))


def mesh_of(avals: Iterable[Any]) -> Any:
    """The mesh with explicit axes that split one of these arrays, or None."""
    for aval in avals:
        if any(splits(aval)):
            return aval.sharding.mesh
    return None


def lowering(rule: Callable[..., Any], parts: Callable[..., Parts]) -> Callable[..., Any]:
    """The lowering rule of a primitive, as a `shard_map` over explicit mesh axes.

    If the types name no explicit axis, `rule` lowers the call. `parts` gives the factors and the
    call on shards, from the types of the operands and the parameters of the primitive.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        mesh = mesh_of((*ctx.avals_in, *ctx.avals_out))
        if mesh is None:
            return rule(ctx, *operands, **params)
        factors, on_shards = parts(ctx.avals_in, **params)
        shards = choose_shards(mesh, factors, ctx.avals_in, ctx.avals_out)

        def call(*operands: Any) -> Sequence[Any]:
            with jax.sharding.use_abstract_mesh(mesh):
                return _on_mesh(shards, factors, on_shards(shards), operands, ctx.avals_out)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    return lower


def _on_mesh(
    shards: Shards,
    factors: Factors,
    call: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    avals_out: Sequence[Any],
) -> Sequence[Any]:
    """The call on shards. Operands are resharded before it and results after it, if needed.

    All shards have equal sizes. JAX does not check again along which axes a value varies.
    """
    placed = shards.placements(factors)
    specs = [tuple(sharding.spec for sharding in shardings) for shardings in placed]
    split = jax.shard_map(
        lambda *local: tuple(call(*local)),
        mesh=shards.mesh,
        in_specs=specs[0],
        out_specs=specs[1],
        axis_names=_explicit(shards.mesh),
        check_vma=False,
    )
    results = split(*map(_resharded, operands, placed[0]))
    return [
        bits_as(_resharded(y, aval.sharding), aval.dtype)
        for y, aval in zip(results, avals_out, strict=True)
    ]


def _resharded(x: Any, sharding: NamedSharding) -> Any:
    """The array resharded. FP8 moves as bytes, since XLA:CPU widens float8 to move it."""
    return jax.reshard(x if jax.typeof(x).sharding == sharding else as_bytes(x), sharding)


def _explicit(mesh: Any) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def choose_shards(
    mesh: Any, factors: Factors, operands: Sequence[Any], results: Sequence[Any]
) -> Shards:
    """Gives each explicit mesh axis to the factor that moves the fewest bytes.

    A contracted factor keeps a mesh axis if the axis splits it in all its operands: a gradient is
    summed over devices, as in float code.
    """
    arrays = list(map(_Array.of, operands, factors.operands))
    outputs = list(map(_Array.of, results, factors.results))
    shards = Shards(mesh, {})
    for axis in mesh.axis_names:
        wanted = _factors_of(axis, (*arrays, *outputs))
        costs = {name: _bytes_moved(axis, name, factors, arrays, outputs, mesh) for name in wanted}
        for name in sorted(wanted, key=lambda name: (costs[name], name)):
            if factors.pieces[name] % (shards.parts(name) * mesh.shape[axis]) == 0:
                shards = shards.give(name, axis)
                break
        shards = shards.scatter(factors, axis, sorted(_factors_of(axis, outputs)))
    return shards


@dataclasses.dataclass(frozen=True)
class _Array:
    """An operand or result: the factor of each axis, its mesh axes, its bytes."""

    names: Names
    splits: tuple[Axes, ...]
    bytes: float
    size: int

    @classmethod
    def of(cls, aval: Any, names: Names) -> _Array:
        size = math.prod(aval.shape)
        return cls(names, splits(aval), size * aval.dtype.itemsize, size)

    def factor_of(self, mesh_axis: str) -> str | None:
        """The factor split by a mesh axis, or None."""
        pairs = zip(self.names, self.splits, strict=True)
        return next((name for name, axes in pairs if mesh_axis in axes), None)


def _factors_of(axis: str, arrays: Iterable[_Array]) -> set[str]:
    """The factors split by a mesh axis in some arrays."""
    return {name for array in arrays if (name := array.factor_of(axis)) is not None}


def _bytes_moved(
    axis: str,
    factor: str,
    factors: Factors,
    operands: Sequence[_Array],
    results: Sequence[_Array],
    mesh: Any,
) -> float:
    """Bytes sent between devices if a mesh axis splits a factor, on a mesh of only this axis."""
    summed = factors.summed(factor)
    if summed and all(a.factor_of(axis) == factor for a in operands if factor in a.names):
        return 0
    moved = sum(_moved(a, a.factor_of(axis), factor, mesh.shape[axis]) for a in operands)
    if summed:  # an all-reduce sends each sum twice
        each = 2 * sums.chosen().itemsize
        return moved + sum(each * result.size for result in results)
    return moved + sum(_moved(y, factor, y.factor_of(axis), mesh.shape[axis]) for y in results)


def _moved(array: _Array, have: str | None, want: str | None, devices: int) -> float:
    """Bytes moved to split an array along another of its factors."""
    have, want = (name if name in array.names else None for name in (have, want))
    if have is None or have == want:
        return 0  # each device slices its own copy
    return array.bytes if want is None else array.bytes / devices  # a gather, or an all-to-all


def with_whole_tiles(spec: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A dense or ragged problem and its operands, with smaller tiles where a shard cuts one."""
    sides: dict[str, Any] = {}
    for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
        tiles = _uncut(jax.typeof(named[name]), side)
        if tiles != side.tiles:
            sides[name] = dataclasses.replace(side, tiles=tiles)
            finer = {
                part: _refined(named[part], side, tiles)
                for part in (f"{name}_scale", f"{name}_zero_point")
                if named.get(part) is not None
            }
            named = {**named, **finer}
    return (dataclasses.replace(spec, **sides) if sides else spec), named


def _uncut(aval: Any, side: OperandSpec) -> Shape:
    """The tiles of an operand, small enough for its shards."""
    if not (side.scale or side.zero_point) or mesh_of([aval]) is None:
        return side.tiles
    sizes = aval.sharding.mesh.shape
    parts = (math.prod(sizes[axis] for axis in axes) for axes in splits(aval))
    local = (size // part for size, part in zip(side.shape, parts, strict=True))
    return tuple(
        tile if tile >= size or own % tile == 0 else math.gcd(own, tile)
        for tile, size, own in zip(side.tiles, side.shape, local, strict=True)
    )


def _refined(x: Any, side: OperandSpec, tiles: Shape) -> Any:
    """A scale or zero point for smaller tiles."""
    for axis, (old, new) in enumerate(zip(side.tiles, tiles, strict=True)):
        if old != new:
            x = repeated(x, axis, old // new, side.shape[axis] // new)
    return x


def dot_sharding(
    spec: ScaledDotSpec, avals: Sequence[Any], out_sharding: PartitionSpec | None
) -> NamedSharding | None:
    """JAX's sharding for a product of these types; None off explicit axes.

    JAX raises its own error if the types do not determine it.
    """
    mesh = mesh_of(avals)
    if mesh is None:
        return None
    named = dict(zip(spec.operand_names(), avals, strict=True))
    sides = _of_shared_batch(spec, named)
    addends = [named[name] for name in ("residual", "bias") if name in named]
    floats = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, _spec(split)))
        for shape, split in (*sides, *((x.shape, splits(x)) for x in addends))
    ]

    def dot(lhs: Any, rhs: Any, *addends: Any) -> Any:
        y = jax.lax.dot_general(lhs, rhs, spec.dimension_numbers, out_sharding=out_sharding)
        return functools.reduce(jnp.add, addends, y)

    with jax.sharding.use_abstract_mesh(mesh):
        # `jax.eval_shape` leaves shardings out on a mesh with automatic axes too.
        return jax.make_jaxpr(dot)(*floats).out_avals[0].sharding


def _spec(split: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in split))


def _of_shared_batch(
    spec: ScaledDotSpec, named: Mapping[str, Any]
) -> list[tuple[Shape, list[Axes]]]:
    """Shape and split of each side; a batch axis of size 1 gets those of the other side."""
    sides = [
        (side, list(splits(named[name]))) for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs))
    ]
    shapes = [list(side.shape) for side, _ in sides]
    for i, size in enumerate(spec.batch_shape):
        axes = [side.batch[i] for side, _ in sides]
        for one, other in ((0, 1), (1, 0)):
            if shapes[one][axes[one]] != size:
                shapes[one][axes[one]] = size
                sides[one][1][axes[one]] = sides[other][1][axes[other]]
    return [(tuple(shape), split) for shape, (_, split) in zip(shapes, sides, strict=True)]


def cut_axes(aval: Any, factors: Factors) -> list[int]:
    """The split axes of the first operand with indivisible factors."""
    return [
        axis
        for axis, (name, axes) in enumerate(zip(factors.operands[0], splits(aval), strict=True))
        if axes and not _fits(name, axes, factors, aval.sharding.mesh)
    ]


def _fits(name: str | None, axes: Axes, factors: Factors, mesh: Any) -> bool:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return name is not None and factors.pieces[name] % parts == 0


def inherited(aval: Any, factors: Factors) -> list[NamedSharding]:
    """The shardings of results, with factors split as in the first operand.

    A factor stays whole if it cannot be cut this way.
    """
    mesh = aval.sharding.mesh
    own = {}
    for name, axes in zip(factors.operands[0], splits(aval), strict=True):
        if name is not None:
            own[name] = axes if _fits(name, axes, factors, mesh) else ()
    specs = [_spec([own.get(name or "", ()) for name in names]) for names in factors.results]
    return [NamedSharding(mesh, spec) for spec in specs]


def followed(avals: Sequence[Any], factors: Factors) -> NamedSharding:
    """The sharding of a result that is split as the operands are, on a mesh of explicit axes.

    The first operand with a split factor decides. A mesh axis splits one factor.
    """
    own: dict[str | None, Axes] = {}
    for aval, names in zip(avals, factors.operands, strict=True):
        for name, axes in zip(names, splits(aval), strict=True):
            own.setdefault(name if axes else None, axes)
    entries: list[Axes] = []
    for name in factors.results[0]:
        taken = {axis for axes in entries for axis in axes}
        entries.append(tuple(axis for axis in own.get(name or "", ()) if axis not in taken))
    return NamedSharding(mesh_of(avals), _spec(entries))


def output_avals(
    avals: Sequence[Any],
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    parts: Callable[..., Parts],
) -> list[Any]:
    """The types of results: along explicit mesh axes they are split like the first operand."""
    shardings: Sequence[NamedSharding | None] = [None] * len(shapes)
    if mesh_of(avals) is not None:
        shardings = inherited(avals[0], parts(avals)[0])
    results = zip(shapes, dtypes, shardings, strict=True)
    return [compat.output_aval(avals, *result) for result in results]


def where_full(sharding: NamedSharding | None, shape: Shape) -> NamedSharding | None:
    """The sharding of an array with the axes of another, each of the same size or of size 1."""
    if sharding is None:
        return None
    pairs = zip(shape, sharding.spec, strict=True)
    spec = PartitionSpec(*(None if size == 1 else entry for size, entry in pairs))
    return sharding.update(spec=spec)


def splits_mapped(operands: Sequence[Any], axes: Sequence[int | None]) -> Axes:
    """The explicit mesh axes of a mapped axis of vmap."""
    mapped = (
        splits(jax.typeof(x))[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    return next((own for own in mapped if own), ())


def permuted(aval: Any, order: Shape, *others: Any) -> PartitionSpec | None:
    """The sharding of an array with another's axes in `order`.

    None without a sharding in the types: there is no mesh.
    """
    if mesh_of((aval, *others)) is None:
        return None
    return _spec([splits(aval)[axis] for axis in order])
