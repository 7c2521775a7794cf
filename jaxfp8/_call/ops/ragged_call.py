"""The ragged dot as a primitive, `ragged_dot_p`: one call on the CPU, one launch on Hopper.

Group sizes stay on the device. Elsewhere, under vmap and in derivatives it is the scaled dots of
`_call/ops/ragged_reference`. Lowering splits the call over a mesh (`ragged_shards`).

Order of this file: bind, primitive, abstract evaluation, batching, differentiation, lowering,
registration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8._call.library.strictness import tell_gathered, warn_once
from jaxfp8._call.mesh import explicit, partitioning
from jaxfp8._call.mesh.shards import Parts
from jaxfp8._call.ops import (
    ragged_cpu,
    ragged_epilogue,
    ragged_lowering,
    ragged_reference,
    ragged_shards,
    remat,
    routes,
)
from jaxfp8._call.ops.eager import run_compiled
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._value import compat, dtypes
from jaxfp8._value.dtypes import as_bytes

_NOT_SPLIT = "derivatives and `vmap` of groups are not split along explicit axes"

ragged_dot_p = Primitive("ragged_dot")
ragged_dot_p.multiple_results = True


def ragged_dot(
    spec: RaggedSpec, named: dict[str, Any], out_sharding: PartitionSpec | None = None
) -> jax.Array:
    """Binds one ragged dot without an amax.

    Args:
      spec: the problem.
      named: its operands: FP8 values as themselves, factors in any dtype of a scaled dot's, int32
        sizes.
      out_sharding: of the output along explicit mesh axes; by default it follows the operands.
    """
    return results_of(spec, named, out_sharding)[0]


def results_of(
    spec: RaggedSpec, named: dict[str, Any], out_sharding: PartitionSpec | None = None
) -> list[jax.Array]:
    """The results of a ragged dot: `[out]`, or `[out, amax]`; FP8 outputs as bytes."""
    spec, named = explicit.with_whole_tiles(spec, named)
    operands = compat.vary_alike([named[name] for name in spec.operand_names()])
    split = partitioning.is_wanted(operands)
    params: dict[str, Any] = {"spec": spec, "split": split, "out_sharding": out_sharding}
    on_explicit_axes = explicit.mesh_of(map(jax.typeof, operands)) is not None
    if on_explicit_axes and not spec.is_plain:
        return _composed(*operands, **params)
    return ragged_dot_p.bind(*operands, **params)


def _composed(*operands: jax.Array, spec: RaggedSpec, **params: Any) -> list[jax.Array]:
    """The ragged dot in float32, and the epilogue behind it."""
    named = dict(zip(spec.operand_names(), operands, strict=True))
    of_sums = [named[name] for name in spec.plain.operand_names()]
    (sums,) = ragged_dot_p.bind(*of_sums, spec=spec.plain, **params)
    return ragged_epilogue.finish(sums, named, spec)


run_compiled(ragged_dot_p)


# Abstract evaluation


@ragged_dot_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray,
    spec: RaggedSpec,
    split: bool,
    out_sharding: PartitionSpec | None,
) -> list[jax.core.ShapedArray]:
    del split
    expected = {
        "lhs": (spec.lhs.dtype, spec.lhs.shape),
        "rhs": (spec.rhs.dtype, spec.rhs.shape),
        "group_sizes": ("int32", (spec.groups,)),
    }
    for name, aval in zip(spec.operand_names(), avals, strict=True):
        side = spec.lhs if name.startswith("lhs") else spec.rhs
        factor = spec.plane_shapes.get(name, side.scale_shape)
        dtype, shape = expected.get(name, (aval.dtype.name, factor))
        is_bytes = dtypes.is_float8(dtype) and aval.dtype == np.uint8
        if aval.shape != shape or not (is_bytes or aval.dtype == np.dtype(dtype)):
            raise TypeError(
                f"`ragged_dot`: {name} is {aval.dtype}{list(aval.shape)}, but its spec says "
                f"{dtype}{list(shape)}; make the spec from the operands."
            )
    sharding, stored = _sharding(avals, spec, out_sharding), dtypes.storage(spec.out_dtype)
    out = [compat.output_aval(avals, spec.out_shape, stored, sharding)]
    if spec.epilogue.amax is not None:
        out.append(compat.output_aval(avals, spec.epilogue.amax, np.dtype(np.float32)))
    return out


def _sharding(
    avals: Sequence[Any], spec: RaggedSpec, asked: PartitionSpec | None
) -> NamedSharding | None:
    """The sharding of the output along explicit axes."""
    if explicit.mesh_of(avals) is None:
        return None
    sharding = explicit.followed(avals, ragged_shards.factors(spec))
    return sharding if asked is None else sharding.update(spec=asked)


# Batching and differentiation: those of its definition. 8-bit values have no derivative.


def _define(
    *operands: jax.Array, spec: RaggedSpec, out_sharding: PartitionSpec | None = None
) -> list[jax.Array]:
    """By definition; of whole operands on explicit mesh axes."""
    sharding = _sharding(list(map(jax.typeof, operands)), spec, out_sharding)
    if sharding is None:
        return [ragged_reference.ragged_dot(*operands, spec=spec)]
    tell_gathered(spec.told(), _NOT_SPLIT)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    y = ragged_reference.ragged_dot(*(jax.reshard(x, whole) for x in operands), spec=spec)
    return [jax.reshard(y, sharding)]


def _batch(
    operands: tuple[jax.Array, ...],
    axes: tuple[int | None, ...],
    *,
    spec: RaggedSpec,
    split: bool,
    out_sharding: PartitionSpec | None,
) -> tuple[list[jax.Array], list[int]]:
    if not spec.is_plain:
        composed = functools.partial(_composed, spec=spec, split=split, out_sharding=out_sharding)
        results = jax.vmap(composed, axes)(*operands)
        return results, [0] * len(results)
    _tell_of_groups(spec, "it is under `vmap`")
    each = jax.vmap(functools.partial(_define, spec=spec), axes)
    if mapped := explicit.splits_mapped(operands, axes):  # each device maps over its own part
        each = jax.shard_map(
            each,
            mesh=explicit.mesh_of(map(jax.typeof, operands)),
            in_specs=tuple(_split_at(axis, mapped) for axis in axes),
            out_specs=PartitionSpec(mapped),
            axis_names=set(mapped),
            check_vma=False,
        )
    return each(*operands), [0]


def _split_at(axis: int | None, mesh_axes: tuple[str, ...]) -> PartitionSpec:
    """The spec of an array split along one axis, or of a whole one."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, mesh_axes)


def _jvp(
    primals: tuple[jax.Array, ...],
    tangents: tuple[Any, ...],
    *,
    spec: RaggedSpec,
    split: bool,
    out_sharding: PartitionSpec | None,
) -> tuple[list[jax.Array], list[Any]]:
    moving = [i for i, tangent in enumerate(tangents) if _moves(tangent)]
    params: dict[str, Any] = {"spec": spec, "out_sharding": out_sharding}
    if not moving:
        results = ragged_dot_p.bind(*primals, split=split, **params)
        return results, list(map(compat.zero_tangent, results))

    def of_moving(*floats: jax.Array) -> list[jax.Array]:
        operands = dict(enumerate(primals)) | dict(zip(moving, floats, strict=True))
        if spec.is_plain:
            return _define(*operands.values(), **params)
        return _composed(*operands.values(), split=split, **params)

    pairs = [(primals[i], tangents[i]) for i in moving]
    points, directions = zip(*pairs, strict=True)
    results, found = jax.jvp(of_moving, points, directions)
    if spec.is_plain:
        _tell_of_groups(spec, "it is differentiated")
        results = ragged_dot_p.bind(*primals, split=split, **params)
    floats = [jnp.issubdtype(y.dtype, np.floating) for y in results]
    zeros = map(compat.zero_tangent, results)
    return results, [d if f else z for d, f, z in zip(found, floats, zeros, strict=True)]


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero) and tangent.dtype in dtypes.WIDE_FLOAT


# Lowering


def why_not(spec: RaggedSpec, platform: str) -> str | None:
    """Why no call computes a ragged dot on this machine's `platform`, or None if one does."""
    return (
        ragged_cpu.why_not(spec) if platform == "cpu" else ragged_lowering.why_not(spec, platform)
    )


def kernel_for(spec: RaggedSpec, platform: str) -> str | None:
    """The kernel that multiplies the groups; None if that is not known."""
    if why_not(spec, platform) is not None:
        return None
    if platform == "cpu":
        return routes.kernel_for(ragged_reference.dot_of_group(spec), "cpu")
    return "sm90_gemm" if ragged_lowering.takes_eight_bits(spec) else None


def _why_not_in(ctx: Any, spec: RaggedSpec, platform: str) -> str | None:
    """Why no kernel computes it in a program, exported ones included."""
    if platform != "cpu" and ctx.module_context.lowering_parameters.for_export:
        return "the program is exported, and no telling on which GPU it will run"
    return why_not(spec, platform)


_lower_dots = mlir.lower_fun(_define, multiple_results=True)
_lower_on_cpu = mlir.lower_fun(ragged_cpu.call, multiple_results=True)
_lower_on_gpu = mlir.lower_fun(ragged_lowering.call, multiple_results=True)


def _lower(platform: str, ctx: Any, *operands: Any, spec: RaggedSpec) -> Any:
    reason = _why_not_in(ctx, spec, platform)
    if reason is None:
        lower_call = _lower_on_cpu if platform == "cpu" else _lower_on_gpu
        return lower_call(ctx, *operands, spec=spec)
    _tell_of_groups(spec, reason)
    return _lower_dots(ctx, *operands, spec=spec)


def _with_epilogue(platform: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, with an epilogue behind the call unless the call has it."""

    def lower(ctx: Any, *operands: Any, spec: RaggedSpec, **params: Any) -> Any:
        if spec.is_plain:
            return rule(ctx, *operands, spec=spec, **params)
        alone = not (params["split"] and compat.place_of(ctx))
        has_it = _why_not_in(ctx, spec, platform) is None and why_behind(spec) is None
        if alone and has_it and not spec.weighted:
            return rule(ctx, *operands, spec=spec, **params)
        call = _scaled_by_weights if alone and has_it else _composed
        made = functools.partial(call, spec=spec, **params)
        return mlir.lower_fun(made, multiple_results=True)(ctx, *operands)

    return lower


def _scaled_by_weights(*operands: jax.Array, spec: RaggedSpec, **params: Any) -> list[jax.Array]:
    """The ragged dot with weights of rows in the scale of lhs."""
    named = dict(zip(spec.operand_names(), operands, strict=True))
    named, spec = ragged_epilogue.with_weights_as_scales(named, spec)
    return ragged_dot_p.bind(*(named[name] for name in spec.operand_names()), spec=spec, **params)


def why_behind(spec: RaggedSpec) -> str | None:
    """Why XLA computes the epilogue behind the call, or None if the call can have it."""
    if spec.weighted and not ragged_epilogue.are_weights_scales(spec):
        return "the call has weights of rows right behind the sums alone"
    return "the call has no gate: its halves are other columns" if spec.gated else None


def _parts(
    avals: Sequence[Any], *, spec: RaggedSpec, split: bool, out_sharding: Any = None
) -> Parts:
    """The call on the shards of a mesh."""
    del avals, out_sharding

    def bind(spec: RaggedSpec, *operands: jax.Array) -> list[jax.Array]:
        return ragged_dot_p.bind(*operands, spec=spec, split=split, out_sharding=None)

    return ragged_shards.factors(spec), functools.partial(ragged_shards.on_shards, spec, bind)


def _tell_of_groups(spec: RaggedSpec, reason: str) -> None:
    """Warns of a ragged dot computed by its definition; in `strict` it raises."""
    whole = "all of K" if spec.grouping == "contracted" else "all rows"
    text = (
        f"`jaxfp8.ragged_dot`: {spec.told()} is computed group by group because {reason}; "
        f"each group multiplies {whole}"
    )
    warn_once(text, "leave `jaxfp8.strict()` to allow that", ("ragged_dot", reason))


def _moved_as_bytes(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, with FP8 as bytes if XLA may move it: on a CPU it widens FP8 between devices."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        has_float8 = any(aval.dtype in dtypes.FLOAT8 for aval in ctx.avals_in)
        if not (params["split"] and has_float8 and isinstance(compat.place_of(ctx), compat.Place)):
            return rule(ctx, *operands, **params)

        def call(*arrays: jax.Array) -> list[jax.Array]:
            return ragged_dot_p.bind(*map(as_bytes, arrays), **params)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    return lower


# Registration

ad.primitive_jvps[ragged_dot_p] = _jvp
batching.primitive_batchers[ragged_dot_p] = _batch
remat.count_as_dots(
    ragged_dot_p, lambda *_, spec, **__: [remat.scaled_dot(ragged_reference.dot_of_group(spec))]
)
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    _rule = partitioning.lowering(functools.partial(_lower, _platform), _parts)
    _rule = _moved_as_bytes(explicit.lowering(_rule, _parts))
    _rule = _with_epilogue(_platform, _rule)
    mlir.register_lowering(ragged_dot_p, _rule, platform=_platform)
