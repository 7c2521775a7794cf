"""How a scaled dot is split over a mesh, and what it sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxfp8._call.mesh import explicit, sharded_dot
from jaxfp8._value import compat, dtypes, tables
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

Types = Mapping[Any, jax.ShapeDtypeStruct]  # by variable of a jaxpr


def types_of(jaxpr: Any, arrays: Sequence[Any]) -> Types:
    """The types of a function's arrays as if its mesh axes were explicit, by variable.

    The arguments that lie on a mesh of automatic axes say how; {} without such arguments.
    """
    shardings = [sharding for x in arrays if (sharding := _on_automatic_axes(x)) is not None]
    meshes = {(s.mesh.axis_names, tuple(s.mesh.shape.values())) for s in shardings}
    if len(meshes) != 1:
        return {}
    ((names, sizes),) = meshes
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
    types: dict[Any, jax.ShapeDtypeStruct] = {}
    opened = compat.open_jaxpr(jaxpr)
    with jax.sharding.use_abstract_mesh(mesh):
        for var, x in zip(opened.invars, arrays, strict=True):
            sharding = _on_automatic_axes(x)
            spec = PartitionSpec() if sharding is None else sharding.spec
            types[var] = _typed(var.aval, mesh, spec)
        _walk(opened, mesh, types)
    return types


def _on_automatic_axes(x: Any) -> NamedSharding | None:
    if isinstance(x, jax.core.Tracer):
        return None
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if set(sharding.mesh.axis_types) == {AxisType.Auto} else None


def _typed(aval: Any, mesh: AbstractMesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))


def _walk(jaxpr: Any, mesh: AbstractMesh, types: dict[Any, jax.ShapeDtypeStruct]) -> None:
    """Adds the types of what the equations compute."""

    def given(atom: Any) -> jax.ShapeDtypeStruct:
        known = None if compat.is_literal(atom) else types.get(atom)
        return _typed(atom.aval, mesh, PartitionSpec()) if known is None else known

    for eqn in jaxpr.eqns:
        operands = list(map(given, eqn.invars))
        inner = compat.subjaxprs(eqn)
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            for var, x in zip(inner[0].invars, operands, strict=True):
                types[var] = _like(var.aval, x)
            _walk(inner[0], mesh, types)
            results = list(map(given, inner[0].outvars))
        else:
            results = _results(eqn, operands, mesh)
        for var, y in zip(eqn.outvars, results, strict=True):
            types[var] = _like(var.aval, y)


def _like(aval: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of an array that is another, or that a scan takes from it or puts into it."""
    spec = (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
    if x.shape == aval.shape:
        return _typed(aval, x.sharding.mesh, PartitionSpec(*spec))
    if x.shape[1:] == aval.shape:
        return _typed(aval, x.sharding.mesh, PartitionSpec(*spec[1:]))
    own = PartitionSpec(None, *spec) if x.shape == aval.shape[1:] else PartitionSpec()
    return _typed(aval, x.sharding.mesh, own)


def _results(
    eqn: Any, operands: Sequence[jax.ShapeDtypeStruct], mesh: AbstractMesh
) -> list[jax.ShapeDtypeStruct]:
    """The types of what one equation computes."""
    if eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return [_typed(eqn.outvars[0].aval, mesh, spec)]
    avals = compat.types_of_outputs(eqn, operands)
    if avals is None:
        return [_typed(var.aval, mesh, PartitionSpec()) for var in eqn.outvars]
    return [_typed(aval, mesh, aval.sharding.spec) for aval in avals]


_KINDS = {"b": "batch", "m": "rows", "n": "columns", "k": "depth"}
_PARTS = {"operand 0": "lhs", "operand 1": "rhs", "result 0": "output", "sums": "sums"}


def told(spec: ScaledDotSpec, eqn: Any, known: Types) -> str:
    """The split, and the bytes sent here and by a float program; "" where they are unknown.

    The types of the arrays of `eqn`, or else `known`, say how they are sharded.
    """
    arrays = (*eqn.invars[:2], eqn.outvars[0])
    types, before = [v.aval for v in arrays], ""
    are_known = all(not compat.is_literal(v) and v in known for v in arrays)
    if explicit.mesh_of(types) is None and are_known:
        types, before = [known[v] for v in arrays], "XLA decides; as arguments lie, "
    mesh = explicit.mesh_of(types)
    shapes = (spec.lhs.shape, spec.rhs.shape, spec.out_shape)
    if mesh is None or tuple(aval.shape for aval in types) != shapes:
        return ""
    bare = _bare(spec)
    ours = [_of_dtype(a, side.dtype) for a, side in zip(types, (bare.lhs, bare.rhs), strict=False)]
    factors = sharded_dot.factors(bare)
    shards = explicit.choose_shards(mesh, factors, ours, types[2:])
    sent = explicit.bytes_sent(shards, factors, ours, types[2:])
    floats = [_of_dtype(aval, "bfloat16") for aval in types[:2]]
    in_floats = explicit.choose_shards(mesh, factors, floats, types[2:])
    plain = sum(explicit.bytes_sent(in_floats, factors, floats, types[2:]).values())
    return f"{before}{_split(shards.mesh_axes)}; {_sent(sent, plain)}"


def _bare(spec: ScaledDotSpec) -> ScaledDotSpec:
    """The spec of the sum alone, since scales are small."""

    def plain(side: OperandSpec) -> OperandSpec:
        tiles = tuple(max(size, 1) for size in side.shape)
        return dataclasses.replace(side, tiles=tiles, scale=False, zero_point=False)

    epilogue = EpilogueSpec(out_dtype=spec.epilogue.out_dtype)
    lhs, rhs = plain(spec.lhs), plain(spec.rhs)
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs, epilogue=epilogue)


def _of_dtype(aval: Any, dtype: str) -> Any:
    return jax.core.ShapedArray(aval.shape, np.dtype(dtypes.storage(dtype)), sharding=aval.sharding)


def _split(mesh_axes: Mapping[str, tuple[str, ...]]) -> str:
    parts = [
        f"{_KINDS[name[0]]} over {', '.join(axes)}" for name, axes in mesh_axes.items() if axes
    ]
    return "split by " + " and ".join(parts) if parts else "whole on each device"


def _sent(sent: Mapping[str, int], plain: int) -> str:
    if not sent:
        return "sends nothing"
    parts = [f"{_PARTS[name]} ({tables.size(number)})" for name, number in sent.items()]
    return f"sends {', '.join(parts)}; in floats {tables.size(plain)}"
