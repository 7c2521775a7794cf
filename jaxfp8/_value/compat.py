"""The differences between JAX 0.10, 0.11 and 0.12; no other module depends on the version."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a constant written in place."""
    return isinstance(atom, core.Literal)


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a jaxpr; from 0.12 on a closed jaxpr is its own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants of a jaxpr; an open jaxpr of 0.10 has none."""
    return getattr(jaxpr, "consts", ())


class HoldsJaxpr:
    """An equation's parameter with a closed jaxpr as its attribute `jaxpr`, made on demand."""

    jaxpr: Any


def subjaxprs(eqn: Any) -> list[Any]:
    """The open jaxprs inside an equation.

    A primitive of `jax.experimental.hijax`, as `custom_root` is from 0.12 on, has parameters of its
    own in one parameter of the equation.
    """
    values = eqn.params.values()
    own = [p.jaxpr for p in values if isinstance(p, HoldsJaxpr)]
    nested = [p.params for p in values if isinstance(getattr(p, "params", None), dict)]
    direct = (jaxpr for params in (eqn.params, *nested) for jaxpr in core.jaxprs_in_params(params))
    return [open_jaxpr(jaxpr) for jaxpr in (*direct, *own)]


def has_effects(eqn: Any) -> bool:
    """Whether an equation or a jaxpr has effects; JAX lists a named mesh axis as one, too."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def bind_params(eqn: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Functions and parameters to bind an equation's primitive again."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):
        functions, named = params
        return functions, named
    return (), params


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_unspecified(sharding: Any) -> bool:
    """Whether a parameter of jit leaves the sharding open; its class is not public."""
    return type(sharding).__name__ == "UnspecifiedValue"


def hoisted(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The closed jaxpr of a function; its constants become the first arguments."""
    jaxpr = jax.make_jaxpr(function)(*args)
    consts = consts_of(jaxpr)
    if not consts:
        return jaxpr, ()
    opened, number = open_jaxpr(jaxpr), len(consts)

    def of_consts(*both: Any) -> list[Any]:
        return jax.core.eval_jaxpr(opened, both[:number], *both[number:])

    return jax.make_jaxpr(of_consts)(*consts, *args), consts


def bind_while(
    eqn: Any, condition: Callable[..., Any], body: Callable[..., Any], init: Sequence[Any]
) -> Sequence[Any]:
    """A while loop; its condition may be an array of booleans, as in an equation under vmap.

    `jax.lax.while_loop` takes a scalar condition only.
    """
    cond_jaxpr, cond_consts = hoisted(condition, init)
    body_jaxpr, body_consts = hoisted(body, init)
    params = {
        **eqn.params,
        "cond_jaxpr": cond_jaxpr,
        "cond_nconsts": len(cond_consts),
        "body_jaxpr": body_jaxpr,
        "body_nconsts": len(body_consts),
    }
    return eqn.primitive.bind(*cond_consts, *body_consts, *init, **params)


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, made to vary along the same manual mesh axes: inside shard_map, all of theirs."""
    axes: frozenset[Any] = frozenset().union(*map(varying_axes, arrays))
    return [_varying(x, axes) for x in arrays]


def _varying(x: Any, axes: frozenset[Any]) -> Any:
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def in_front(x: Any, axis: int | None, size: int) -> Any:
    """An operand of a batching rule with its mapped axis first; repeated if it lacks the axis."""
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def zero_tangent(primal: Any) -> ad.Zero:
    """The tangent of a value without a derivative."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def varying_axes(array: Any) -> frozenset[Any]:
    """The manual mesh axes an array varies along, inside shard_map."""
    return frozenset(jax.typeof(array).mat.varying)


def output_aval(
    avals: Sequence[Any], shape: tuple[int, ...], dtype: Any, sharding: Any = None
) -> Any:
    """The abstract output of an operation; `vary_alike` has prepared its inputs."""
    if sharding is not None:
        return avals[0].update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    for aval in avals:
        if aval.mat.varying:
            whole = aval.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
            return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=whole)
    return jax.core.ShapedArray(shape, dtype)


def zeros(aval: Any) -> jax.Array:
    """Zeros of an abstract value: sharded as it is, and varying along the same mesh axes."""
    return of_type(jnp.zeros(aval.shape, aval.dtype), aval)


def of_type(x: Any, aval: Any) -> Any:
    """`x` with the sharding and the varying mesh axes of a type."""
    return _varying(laid_out_like(x, aval), aval.mat.varying)


def is_laid_out(x: Any) -> bool:
    """Whether an array's type shards it along explicit mesh axes."""
    return any(names is not None for names in jax.typeof(x).sharding.spec)


def laid_out_like(x: Any, aval: Any) -> Any:
    """`x` sharded as a type says, on a mesh with explicit axes; elsewhere as it is."""
    want, have = aval.sharding, jax.typeof(x).sharding
    if jax.sharding.AxisType.Explicit not in (want.mesh.axis_types or have.mesh.axis_types):
        return x
    if want.mesh.empty:
        want = have.update(spec=jax.sharding.PartitionSpec(*[None] * x.ndim))
    return x if have == want else jax.reshard(x, want)


def spec_of_output(eqn: Any) -> Any:
    """The split of an equation's output along explicit mesh axes; None on other meshes."""
    sharding = eqn.outvars[0].aval.sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if explicit else None


def laid_along(x: Any, other: Any) -> Any:
    """`x` split along explicit mesh axes like another array, to broadcast with it."""
    like, own = jax.typeof(other).sharding, jax.typeof(x).sharding
    if not any(like.spec) and not any(own.spec):
        return x
    sizes = zip(x.shape, other.shape, like.spec, strict=True)
    spec = (entry if size == whole else None for size, whole, entry in sizes)
    # A spec without a mesh needs `jax.set_mesh` around the program.
    place = own if like.mesh.empty else like
    return jax.reshard(x, place.update(spec=jax.sharding.PartitionSpec(*spec)))


def batch_alike(sides: Sequence[Any], batch: Sequence[tuple[int, ...]]) -> list[Any]:
    """Both sides of a product with equal shardings of their batch axes along explicit mesh axes.

    If only one side shards an axis, the other side follows. If both do, the left side decides.
    """
    specs = [list(jax.typeof(side).sharding.spec) for side in sides]
    if not any(any(spec) for spec in specs):
        return list(sides)
    for left, right in zip(*batch, strict=True):
        specs[0][left] = specs[1][right] = specs[0][left] or specs[1][right]
    return [
        jax.reshard(x, jax.sharding.PartitionSpec(*spec))
        for x, spec in zip(sides, specs, strict=True)
    ]


def explicit_spec(sharding: Any, rank: int) -> Any:
    """An `out_sharding` as a spec of `rank` axes if mesh axes are explicit, else None."""
    if sharding is None or not _is_explicit(sharding):
        return None
    spec = tuple(getattr(sharding, "spec", sharding))
    return jax.sharding.PartitionSpec(*spec, *[None] * (rank - len(spec)))


def reordered(sharding: Any, order: Sequence[int]) -> Any:
    """The spec of a dot from the `out_sharding` of its permutation.

    Axis `order[i]` of the dot is axis `i` of the permutation. None if mesh axes are not explicit:
    `sharded` follows the product then.
    """
    spec = explicit_spec(sharding, len(order))
    if spec is None:
        return None
    return jax.sharding.PartitionSpec(*(spec[order.index(axis)] for axis in range(len(order))))


def sharded(x: Any, sharding: Any) -> Any:
    """`x` sharded as an `out_sharding` says; resharded on explicit axes, else constrained."""
    if sharding is None:
        return x
    place = jax.reshard if _is_explicit(sharding) else jax.lax.with_sharding_constraint
    return place(x, sharding)


def _is_explicit(sharding: Any) -> bool:
    mesh = getattr(sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    return jax.sharding.AxisType.Explicit in mesh.axis_types


@functools.cache
def let_extended_dtypes_add() -> None:
    """Gives JAX the missing rule to add two arrays of an extended dtype outside jit.

    Outside jit, the primitive's impl adds the two gradients of an array used twice.
    """
    known, compiled = ad.add_jaxvals_p.impl, jax.jit(ad.add_jaxvals_p.bind)

    def add(x: Any, y: Any) -> Any:
        extended = jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended)
        return (compiled if extended else known)(x, y)

    ad.add_jaxvals_p.def_impl(add)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a call in a program: the devices and mesh axes among which XLA may split it."""

    # As many stand-ins as the program has devices. JAX names the devices to a lowering rule only if
    # the program is confined to one mesh. Partitioning needs only their number.
    devices: tuple[Any, ...]
    # In a `shard_map` over a part of a mesh, the axes left to XLA; elsewhere none, and XLA splits
    # the call over all devices.
    axes: tuple[str, ...] = ()
    mesh: Any = None  # that mesh

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes left to XLA."""
        return tuple(self.mesh.shape[name] for name in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride in the program along each of these axes."""
        names, sizes = self.mesh.axis_names, tuple(self.mesh.shape.values())
        return tuple(math.prod(sizes[names.index(name) + 1 :]) for name in self.axes)

    @property
    def asked(self) -> tuple[Any, ...]:
        """The devices of a split call, as many as XLA numbers."""
        return self.devices[: math.prod(self.sizes)] if self.axes else self.devices

    def given_to(self, ctx: Any) -> Any:
        """A lowering rule's context that names the devices."""
        module, devices = ctx.module_context, self.asked
        if self.axes:
            mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
            told = dataclasses.replace(module.axis_context, mesh=mesh, manual_axes=frozenset())
        else:
            told = dataclasses.replace(module.axis_context, device_assignment=devices)
        return ctx.replace(module_context=module.replace(axis_context=told))


def place_of(ctx: Any) -> Place | str | None:
    """The place of a lowering rule if XLA decides the split there, or why XLA cannot.

    None if nothing is left to XLA: on one device, or with all axes of a mesh manual.
    """
    module = ctx.module_context
    context = module.axis_context
    in_map = hasattr(context, "manual_axes")
    manual = context.manual_axes if in_map else ()
    sizes = dict(context.mesh.shape) if in_map else {}
    axes = tuple(name for name, size in sizes.items() if name not in manual and size > 1)
    number = math.prod(sizes.values()) if in_map else getattr(context, "num_devices", 1)
    if number == 1 or (in_map and not axes):
        return None
    backend = module.get_backend(optional=True)
    devices = jax.devices() if backend is None else backend.devices()
    if reason := _why_not_split(module, number, len(devices)):
        return reason
    if not in_map:
        return Place(tuple(devices[:number]))
    kinds = jax.sharding.AxisType
    types = tuple(kinds.Manual if name in manual else kinds.Auto for name in sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return Place(tuple(devices[:number]), axes, mesh)


def _why_not_split(module: Any, number: int, here: int) -> str | None:
    """Why XLA cannot be told how to split a call along automatic mesh axes, or None."""
    remedy = "use explicit axes, which `jax.make_mesh` makes"
    if module.lowering_parameters.for_export:
        return f"an exported program cannot hold the Python function that splits a call; {remedy}"
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        return f"`jax_use_shardy_partitioner` is off; {remedy}"
    if here < number:
        return f"it is for {number} devices and there are {here} to lower it with; {remedy}"
    return None


_AVAL, _SHARDING = operator.attrgetter("aval"), operator.attrgetter("sharding")


def avals_on_one_device(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """The types of arrays, faster than by `jax.typeof`; None unless each is on one device.

    The type of an array on a mesh names the mesh. Tracers and numpy arrays lack these attributes.
    """
    if not all([issubclass(cls, jax.Array) for cls in {*map(type, arrays)}]):
        return None
    if not {*map(type, map(_SHARDING, arrays))} <= {jax.sharding.SingleDeviceSharding}:
        return None
    return tuple(map(_AVAL, arrays))


def frames(eqn: Any) -> list[tuple[str, int, str]]:
    """File, line and function of an equation's Python frames, innermost first."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return []
    return [(f.file_name, f.line_num, f.function_name) for f in traceback.frames]


def linearize(function: Callable[..., tuple[list[Any], Any]], *points: Any) -> tuple[Any, Any, Any]:
    """`jax.linearize` with aux outputs, as (outputs, linear function, aux), inside a trace.

    Before 0.12 the linear function kept zero tangents as tracers in its static part, and so could
    not leave the trace. Outputs with such tangents are found first here.
    """
    if jax.__version_info__ >= (0, 12):
        return jax.linearize(function, *points, has_aux=True)
    moving = _moving(function, points)

    def of_moving(*values: Any) -> tuple[list[Any], Any]:
        outputs, aux = function(*values)
        still = [o for o, moves in zip(outputs, moving, strict=True) if not moves]
        return [o for o, moves in zip(outputs, moving, strict=True) if moves], (still, aux)

    outputs, linear, (still, aux) = jax.linearize(of_moving, *points, has_aux=True)
    merged, rest = iter(outputs), iter(still)
    whole = [next(merged) if moves else next(rest) for moves in moving]
    zeros = tuple(None if m else (o.shape, o.dtype) for o, m in zip(whole, moving, strict=True))
    return whole, jax.tree_util.Partial(functools.partial(_with_zeros, zeros), linear), aux


def is_mapped(x: Any) -> bool:
    """Whether an array depends on the innermost `vmap`'s operands; JAX has no other way to ask."""
    return getattr(x, "batch_dim", None) is not None


def is_inseparable(error: ValueError) -> bool:
    """Whether JAX raised because it cannot compute the value before the tangent.

    JAX has no other way to ask.
    """
    return str(error).startswith("Linearization failed")


def mixed_cotangents(error: AssertionError) -> tuple[Any, Any] | None:
    """The types of two cotangents, if JAX raised because they differ."""
    match error.args:
        case ((jax.core.ShapedArray() as first, jax.core.ShapedArray() as second),):
            return (first, second) if first.dtype != second.dtype else None
    return None


def _moving(function: Callable[..., tuple[list[Any], Any]], points: Sequence[Any]) -> list[bool]:
    """By output, whether its tangent depends on those of the inputs."""

    def tangents(points: Sequence[Any], directions: Sequence[Any]) -> list[Any]:
        return jax.jvp(function, tuple(points), tuple(directions), has_aux=True)[1]

    jaxpr = open_jaxpr(jax.make_jaxpr(tangents)(points, points))
    depends = set(jaxpr.invars[len(points) :])
    for eqn in jaxpr.eqns:
        if any(not is_literal(v) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    return [not is_literal(v) and v in depends for v in jaxpr.outvars]


def _with_zeros(zeros: tuple[Any, ...], linear: Callable[..., Any], *tangents: Any) -> list[Any]:
    moving = iter(linear(*tangents))
    return [next(moving) if zero is None else jnp.zeros(*zero) for zero in zeros]
