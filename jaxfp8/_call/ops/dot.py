"""The scaled dot as a primitive, `scaled_dot_p`: one FFI call on a platform with kernels.

Lowering splits the call over a mesh (`mesh/sharded_dot`), along explicit axes by itself, along
automatic ones as XLA asks for. Along the manual axes of shard_map a product is local.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxfp8._call.library import ffi
from jaxfp8._call.mesh import cut_tiles, explicit, partitioning, sharded_dot
from jaxfp8._call.mesh.shards import Parts
from jaxfp8._call.ops import int8_form, lowering, remat
from jaxfp8._call.ops.batching import batch_scaled_dot
from jaxfp8._call.ops.eager import run_compiled
from jaxfp8._call.ops.loop_picks import lowered
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import compat
from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import AS_STORED, EpilogueSpec, OperandSpec, ScaledDotSpec, Shape


def check_operands(spec: ScaledDotSpec, avals: Sequence[jax.core.ShapedArray]) -> None:
    """Refuses operands with another shape or dtype than their spec says."""
    for (name, shape), aval in zip(spec.operand_shapes.items(), avals, strict=True):
        dtypes = _dtypes_of(spec, name)
        if aval.shape != shape or aval.dtype not in dtypes:
            raise TypeError(
                f"`scaled_dot`: {name} is {aval.dtype}{list(aval.shape)}, but its spec says "
                f"{_dtypes.names(dtypes)} of shape {list(shape)}; make the spec from the operands."
            )


def _dtypes_of(spec: ScaledDotSpec, name: str) -> tuple[np.dtype, ...]:
    """The allowed dtypes of an operand: FP8 values as themselves too, others as stored."""
    if name in ("lhs", "rhs"):
        logical = getattr(spec, name).dtype
        return tuple(dict.fromkeys((_dtypes.storage(logical), np.dtype(logical))))
    if name == "residual":
        return (np.dtype(spec.epilogue.residual_dtype),)
    if spec.has_exponents(name):
        return (np.dtype(np.uint8),)
    plain = np.dtype(np.int32 if name.endswith("_sums") else np.float32)
    dtype, others = AS_STORED.get(name, (plain, ()))
    return (dtype,) if spec.rounds(name) else (dtype, *others)


scaled_dot_p = Primitive("scaled_dot")
scaled_dot_p.multiple_results = True


def scaled_dot(
    spec: ScaledDotSpec,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    kernel: str = "",
    out_sharding: PartitionSpec | None = None,
    **others: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Binds one scaled dot, as `docs/custom_call.md` defines it; returns the output and the amax.

    `others` are the operands that the spec names. FP8 comes as itself or as uint8. Pass FP8 data
    as stored, and slice, gather, pad or concatenate it as bytes: XLA:CPU copies a parameter to
    bitcast it, and does those operations on FP8 in float16. An FP8 output is uint8, and the amax
    None unless the spec asks for it. `kernel` names the kernel to force; "int8" computes in int8
    on every platform (`_call/ops/int8_form`).
    """
    out, *amax = _bind(spec, kernel, {"lhs": lhs, "rhs": rhs, **others}, out_sharding)
    return out, amax[0] if amax else None


def _bind(
    spec: ScaledDotSpec,
    kernel: str,
    named: dict[str, Any],
    out_sharding: PartitionSpec | None = None,
) -> list[jax.Array]:
    spec, named = explicit.with_whole_tiles(spec, named)
    operands = compat.vary_alike([named[name] for name in spec.operand_names()])
    return scaled_dot_p.bind(
        *operands,
        spec=spec,
        kernel=kernel,
        split=partitioning.is_wanted(operands),
        out_sharding=out_sharding,
    )


run_compiled(scaled_dot_p)


# Abstract evaluation


@scaled_dot_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray, spec: ScaledDotSpec, out_sharding: PartitionSpec | None, **_: Any
) -> list[jax.core.ShapedArray]:
    check_operands(spec, avals)
    stored = _dtypes.storage(spec.epilogue.out_dtype)
    sharding = explicit.dot_sharding(spec, avals, out_sharding)
    out = [compat.output_aval(avals, spec.out_shape, stored, sharding)]
    if spec.epilogue.amax is not None:
        kept = explicit.where_full(sharding, spec.epilogue.amax)
        out.append(compat.output_aval(avals, spec.epilogue.amax, np.dtype(np.float32), kept))
    return out


# Batching


def batch_rule(
    operands: tuple[jax.Array, ...],
    axes: tuple[Any, ...],
    *,
    spec: ScaledDotSpec,
    kernel: str,
    out_sharding: PartitionSpec | None,
    **_: Any,  # `_bind` decides `split` for the new problem
) -> tuple[list[jax.Array], list[int]]:
    names = spec.operand_names()
    spec, named = batch_scaled_dot(
        spec, dict(zip(names, operands, strict=True)), dict(zip(names, axes, strict=True))
    )
    if out_sharding is not None:
        mapped = explicit.splits_mapped(operands, axes)
        out_sharding = PartitionSpec(mapped or None, *out_sharding)
    out = _bind(spec, kernel, named, out_sharding)
    return out, [0] * len(out)


# Differentiation: the sum is linear in each float operand and each scale. The epilogue, with
# residual and bias, is differentiated as plain jnp. 8-bit values have no derivative: a tangent of
# FP8 would be rounded to 8 bits and would not saturate.

_LINEAR_IN = ("lhs", "rhs", "lhs_scale", "rhs_scale")


def jvp_rule(
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    spec: ScaledDotSpec,
    kernel: str,
    out_sharding: PartitionSpec | None,
    **_: Any,
) -> tuple[list[Any], list[Any]]:
    bind = functools.partial(_bind, kernel=kernel, out_sharding=out_sharding)
    names = spec.operand_names()
    named = dict(zip(names, primals, strict=True))
    moving = {
        name: t
        for name, t in zip(names, tangents, strict=True)
        if not isinstance(t, ad.Zero) and not _dtypes.is_eight_bit(t.dtype)
    }
    if _is_linear(spec.epilogue):
        out = bind(spec, named=named)
        dtype = spec.epilogue.out_dtype
        tangent = _sum_tangent(spec, bind, named, moving, dtype)
        return out, [compat.zero_tangent(out[0]) if tangent is None else tangent]
    total = bind(_sum_only(spec, "float32", keep_addends=True), named=named)[0]
    tangent = _sum_tangent(spec, bind, named, moving, "float32")
    primals, tangents = (total,), (jnp.zeros_like(total) if tangent is None else tangent,)
    if (scale := named.get("out_scale")) is not None:
        d_scale = moving.get("out_scale")
        primals += (scale,)
        tangents += (jnp.zeros_like(scale) if d_scale is None else d_scale,)
    out, d_out = jax.jvp(functools.partial(dot_reference.finish, spec.epilogue), primals, tangents)
    floats = [jnp.issubdtype(y.dtype, np.floating) for y in out]
    zeros = map(compat.zero_tangent, out)
    return list(out), [
        d if real else zero for d, zero, real in zip(d_out, zeros, floats, strict=True)
    ]


def _is_linear(epilogue: EpilogueSpec) -> bool:
    wide = not _dtypes.is_eight_bit(epilogue.out_dtype) and epilogue.out_dtype != "int32"
    return wide and epilogue.activation == "none" and epilogue.amax is None


def _sum_tangent(
    spec: ScaledDotSpec,
    bind: Callable[..., list[jax.Array]],
    named: dict[str, Any],
    moving: dict[str, Any],
    dtype: str,
) -> jax.Array | None:
    """The tangent of the sum with residual and bias; None if it is zero."""
    term_spec = _sum_only(spec, dtype)
    terms = [
        bind(term_spec, named={**named, name: moving[name]})[0]
        for name in _LINEAR_IN
        if name in moving
    ]
    terms += [_addend(term_spec, moving[name]) for name in ("residual", "bias") if name in moving]
    return functools.reduce(jnp.add, terms) if terms else None


def _sum_only(spec: ScaledDotSpec, out_dtype: str, keep_addends: bool = False) -> ScaledDotSpec:
    """The spec without activation, amax and output scale; without residual and bias too."""
    plain = EpilogueSpec(out_dtype=out_dtype)
    if keep_addends:
        old = spec.epilogue
        plain = dataclasses.replace(
            plain, residual=old.residual, residual_dtype=old.residual_dtype, bias=old.bias
        )
    return dataclasses.replace(spec, epilogue=plain)


def transpose_rule(
    cotangents: list[Any], *operands: Any, spec: ScaledDotSpec, kernel: str, **_: Any
) -> list[Any]:
    """Transposes a sum, linear in the undefined operands: one side, residual or bias.

    The types of the operands say how their cotangents are sharded.
    """
    names = spec.operand_names()
    named = dict(zip(names, operands, strict=True))
    avals = {n: named[n].aval for n in names if ad.is_undefined_primal(named[n])}
    (ct,) = cotangents
    return [
        _transpose_in(spec, kernel, named, ct, n, avals[n]) if n in avals else None for n in names
    ]


def _transpose_in(
    spec: ScaledDotSpec, kernel: str, named: dict[str, Any], ct: Any, name: str, aval: Any
) -> Any:
    """The cotangent of one operand."""
    if isinstance(ct, ad.Zero):
        return ad.Zero(aval)
    if name in ("lhs", "rhs"):
        result = _transpose_values(spec, kernel, named, ct, name, aval)
    elif name in ("residual", "bias"):
        (result,) = jax.linear_transpose(functools.partial(_addend, spec), aval)(ct)
    else:
        result = _transpose_scale(_sum_only(spec, ct.dtype.name), named, ct, name)
    return compat.laid_out_like(result, aval)


def _addend(spec: ScaledDotSpec, x: jax.Array) -> jax.Array:
    """A residual or bias as added; widened first, so cotangents sum in float32."""
    wide = jnp.broadcast_to(x.astype(jnp.float32), spec.out_shape)
    aval = compat.output_aval([], spec.out_shape, np.dtype(spec.epilogue.out_dtype))
    return compat.laid_out_like(wide.astype(aval.dtype), aval)


def _transpose_scale(
    spec: ScaledDotSpec, named: dict[str, Any], ct: jax.Array, linear: str
) -> jax.Array:
    """Cotangent of a scale; it widens the operand, for the sum over a tile."""
    others = [x for name, x in named.items() if name != linear]
    whole = tuple(range(ct.ndim))
    sharding = explicit.permuted(jax.typeof(ct), whole, *map(jax.typeof, others))

    def as_function_of_scale(scale: jax.Array) -> jax.Array:
        operands = [scale if name == linear else named[name] for name in spec.operand_names()]
        return dot_reference.scaled_dot(spec, *operands, out_sharding=sharding)[0]

    (out,) = jax.linear_transpose(as_function_of_scale, named[linear].aval)(ct)
    return out


def _transpose_values(
    spec: ScaledDotSpec, kernel: str, named: dict[str, Any], ct: jax.Array, linear: str, aval: Any
) -> jax.Array:
    """Cotangent of a float side: a scaled dot of the output's cotangent and the other side."""
    is_lhs = linear == "lhs"
    side, other = (spec.lhs, spec.rhs) if is_lhs else (spec.rhs, spec.lhs)
    other_name = "rhs" if is_lhs else "lhs"
    ct_side = _cotangent_side(spec, ct, is_lhs)
    other_side = dataclasses.replace(other, contracting=other.free, sums=False)
    sides = (ct_side, other_side) if is_lhs else (other_side, ct_side)
    dot_spec = ScaledDotSpec(
        lhs=sides[0],
        rhs=sides[1],
        epilogue=EpilogueSpec(out_dtype=_accumulator(side)),
        precision=spec.precision,
    )
    values = {linear: ct, other_name: named[other_name]}
    for suffix in ("_scale", "_zero_point"):
        if other_name + suffix in named:
            values[other_name + suffix] = named[other_name + suffix]
    order, shared = _layout_of(spec, side, other, is_lhs)
    out = _bind(dot_spec, kernel, values, explicit.permuted(aval, order, jax.typeof(ct)))[0]
    out = lax.transpose(
        jnp.sum(out, axis=shared, keepdims=True),
        tuple(order.index(axis) for axis in range(out.ndim)),
    )
    if side.scale:
        name = f"{linear}_scale"
        scale = dot_reference.widened(spec, {name: named[name]})[name]
        out = out * compat.laid_along(dot_reference.expand_tiles(scale, side), out)
    return out.astype(side.dtype)


def _accumulator(side: OperandSpec) -> str:
    """Dtype of a cotangent before it is scaled or summed over a shared batch axis."""
    return "float32" if side.scale or 1 in side.sizes(side.batch) else side.dtype


def _cotangent_side(spec: ScaledDotSpec, ct: jax.Array, for_lhs: bool) -> OperandSpec:
    batch = len(spec.batch_shape)
    lhs_free = tuple(range(batch, batch + len(spec.lhs.free)))
    rhs_free = tuple(range(batch + len(spec.lhs.free), ct.ndim))
    return OperandSpec(
        dtype=ct.dtype.name,
        shape=ct.shape,
        contracting=rhs_free if for_lhs else lhs_free,
        batch=tuple(range(batch)),
        tiles=(1,) * ct.ndim,
        scale=False,
        zero_point=False,
    )


def _layout_of(
    spec: ScaledDotSpec, side: OperandSpec, other: OperandSpec, is_lhs: bool
) -> tuple[Shape, Shape]:
    """The axes of `side` in the order of its cotangent, and the batch axes to sum it over."""
    paired = dict(zip(other.contracting, side.contracting, strict=True))
    contracting = tuple(paired[axis] for axis in sorted(other.contracting))
    order = side.batch + (side.free + contracting if is_lhs else contracting + side.free)
    shared = tuple(
        i
        for i, (axis, size) in enumerate(zip(side.batch, spec.batch_shape, strict=True))
        if side.shape[axis] != size
    )
    return order, shared


# Splitting over a mesh


def _parts(_: Any, *, spec: ScaledDotSpec, kernel: str, split: bool, **__: Any) -> Parts:
    bind = functools.partial(_bind_on_shards, kernel, split)
    return sharded_dot.factors(spec), functools.partial(sharded_dot.on_shards, spec, bind)


def _parts_of_cut_tiles(
    _: Any, *, spec: ScaledDotSpec, kernel: str, split: bool, **__: Any
) -> Parts | None:
    if (factors := cut_tiles.factors(spec)) is None:
        return None
    bind = functools.partial(_bind_on_shards, kernel, split)
    return factors, functools.partial(cut_tiles.on_shards, spec, bind)


def _bind_on_shards(
    kernel: str, split: bool, spec: ScaledDotSpec, *operands: jax.Array
) -> list[jax.Array]:
    return scaled_dot_p.bind(*operands, spec=spec, kernel=kernel, split=split, out_sharding=None)


# In int8: one call and the operations behind it, or two roundings and a product


def _in_int8(
    *operands: jax.Array, spec: ScaledDotSpec, first: tuple[str, ...], out_sharding: Any
) -> list[jax.Array]:
    """The product in int8, whose operands called `first` are rounded before the call."""
    named = dict(zip(spec.operand_names(), operands, strict=True))
    made = int8_form.requantized(spec, named, first)
    kernel = "" if first == int8_form.BOTH else int8_form.IN_INT8
    return _bind(int8_form.narrowed(spec, first), kernel, made, out_sharding)


def _lowering_in_int8(rule: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """The rule for a product in int8: shards, which may cut a line, and exports round first."""

    def lower(ctx: Any, *operands: Any, spec: ScaledDotSpec, kernel: str, **params: Any) -> Any:
        first: tuple[str, ...] = ()
        if kernel == int8_form.IN_INT8:
            automatic = params["split"] and compat.place_of(ctx) is not None
            split = automatic or explicit.mesh_of((*ctx.avals_in, *ctx.avals_out)) is not None
            exported = ctx.module_context.lowering_parameters.for_export
            known = platform == "cuda" and not split and not exported
            first = int8_form.rounded_first(spec, ffi.compute_capability() if known else None)
        if not first:
            return rule(ctx, *operands, spec=spec, kernel=kernel, **params)
        compose = functools.partial(
            _in_int8, spec=spec, first=first, out_sharding=params["out_sharding"]
        )
        return mlir.lower_fun(compose, multiple_results=True)(ctx, *operands)

    return lower


# Registration

ad.primitive_jvps[scaled_dot_p] = jvp_rule
ad.primitive_transposes[scaled_dot_p] = transpose_rule
batching.primitive_batchers[scaled_dot_p] = batch_rule
remat.count_as_dots(scaled_dot_p, lambda *_, spec, **__: [remat.scaled_dot(spec)])
_lowered_p = lowered(scaled_dot_p, _abstract_eval)
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    _rule = partitioning.lowering(
        functools.partial(lowering.lower, _platform), _parts, _parts_of_cut_tiles
    )
    _rule = _lowering_in_int8(explicit.lowering(_rule, _parts), _platform)
    mlir.register_lowering(_lowered_p, _rule, platform=_platform)
