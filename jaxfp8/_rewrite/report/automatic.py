"""How arrays of a function lie on automatic mesh axes, as its arguments suggest.

XLA decides that when it compiles. JAX has rules by which types carry shardings along explicit axes;
here they are asked of each equation, with the shardings of the arguments. Where a rule wants to be
told more, the result counts as whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxfp8._value import compat

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
