"""From a product to a call: the spec of its dot, and the arrays that go into it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops import lowering, slower
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._ops import int8_compute
from jaxfp8._rewrite.ir import casts, graph, sides
from jaxfp8._rewrite.ir.factors import Factors, as_one, on_tiles
from jaxfp8._rewrite.ir.facts import Amax, Product
from jaxfp8._rewrite.ir.fused import FusedDot
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.sides import ScaledSide
from jaxfp8._rewrite.plan import ragged_calls
from jaxfp8._rewrite.rules import groups
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape

# The names of the ops that `make` puts in place of dots.
NAMES = ("scaled_dot", ragged_calls.NAME)


@dataclasses.dataclass(eq=False)
class Call:
    """One scaled or ragged dot to emit.

    Attributes:
      spec: the problem, as it is computed.
      stored: the same with its operands as they are stored; another one only in int8.
      product: what the call computes.
      amax: the amax that the call gives beside its output, or None.
      value: the output, of the type of the value of `product`.
      amax_value: the amax, of the type of the value of `amax`; None without one.
    """

    spec: ScaledDotSpec | RaggedSpec
    stored: ScaledDotSpec | RaggedSpec
    product: Product
    amax: Amax | None
    value: Value
    amax_value: Value | None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no call, and what to change."""

    reason: str
    remedy: str = "leave it to XLA here; there are kernels for cpu and cuda"


def make(
    product: Product, amax: Amax | None, compute: str | None, shares_input: bool
) -> Call | Refusal:
    """The call that computes a product (and an amax), or why there is none.

    With `compute="int8"` operands are rounded to int8, as by `compute` of `dot_general`. With
    `shares_input` another dot reads the same floats.
    """
    fused = _fused(product, amax)
    if isinstance(fused, str):
        return Refusal(fused)
    return _of_fused(fused, product, amax, compute, shares_input)


def _fused(product: Product, amax: Amax | None) -> FusedDot | str:
    """The dot with the steps after it, or why one call cannot compute them."""
    if product.dot.site.reason:
        return product.dot.site.reason
    if amax is not None and amax.product not in product.ancestry():
        return "the amax is of a later value"
    fused = product.fused(None if amax is None else amax.product)
    if isinstance(fused, str):
        return f"an operation after the dot {fused}"
    if not fused.ready:
        return "the step after the dot is not complete"
    if amax is not None and amax.product is not product and fused.quantized is None:
        return "the output differs from what the amax is of"
    return fused


def _of_fused(
    fused: FusedDot, product: Product, amax: Amax | None, compute: str | None, shares_input: bool
) -> Call | Refusal:
    of_lhs, of_rhs = fused.scales()
    dot = fused.dot.site
    in_call = not dot.grouping
    lhs, lhs_operands = operand("lhs", fused.dot.lhs, of_lhs, in_call=in_call)
    rhs, rhs_operands = operand("rhs", fused.dot.rhs, of_rhs, in_call=in_call)
    epilogue, others = _epilogue(fused, product, amax)
    operands = {**lhs_operands, **rhs_operands, **others}
    spec: ScaledDotSpec | RaggedSpec
    if dot.grouping:
        spec = ragged_calls.spec_of(dot, lhs, rhs, epilogue)
        made = _ragged(spec, operands, dot.op, compute)
    else:
        spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue, precision=dot.precision)
        made = _plain(spec, operands, dot.op, compute, shares_input)
    if isinstance(made, Refusal):
        return made
    made.outputs = _outputs(made)
    value = graph.laid_out_like(_view(made.outputs[0], fused, product), product.value)
    return Call(made.params["spec"], spec, product, amax, value, _amax(made, amax))


def _ragged(
    spec: RaggedSpec, operands: dict[str, Value], dot: Op, compute: str | None
) -> Op | Refusal:
    """The op of a ragged dot, or why there is none."""
    if compute is not None:
        return Refusal("groups have no product with operands rounded to int8", groups.GIVE)
    if (reason := ragged_calls.why_not(spec)) is not None:
        return Refusal(reason, groups.GIVE)
    return ragged_calls.op_of(spec, operands, dot)


def _plain(
    spec: ScaledDotSpec,
    operands: dict[str, Value],
    dot: Op,
    compute: str | None,
    shares_input: bool,
) -> Op | Refusal:
    """The op of a scaled dot, or why there is none."""
    computed = spec
    if compute is not None:
        if (objection := int8_compute.why_not(spec)) is not None:
            return Refusal(objection.reason, objection.remedy)
        computed = int8_compute.narrowed(spec)
    refusal = _refusal(computed, dot, shares_input)
    return refusal if refusal is not None else _op(spec, computed, operands, dot)


def _refusal(spec: ScaledDotSpec, written: Op, shares_input: bool) -> Refusal | None:
    """Why a problem is left as written: no kernel takes it here, or XLA is faster than the one."""
    platform = targets.platform()
    if reason := lowering.why_not(spec, platform):
        return Refusal(reason)
    in_integers = all(dtypes.is_int8(value.dtype) for value in written.inputs[:2])
    given = {"in_integers": in_integers, "shares_input": shares_input}
    why = slower.than_xla(spec, platform, **given)
    return None if why is None else Refusal(*why)


def operand(
    name: str, side: ScaledSide, more: Factors = (), *, in_call: bool = True
) -> tuple[OperandSpec, dict[str, Value]]:
    """The spec of a side, and its data, scale and zero point by operand name.

    Args:
      name: of the side.
      side: the side.
      more: further scales of it.
      in_call: whether the call can decode bytes of float8_e8m0fnu, or round scales to bfloat16, in
        place of the function.
    """
    factors = side.factors + more
    shape = side.value.shape
    tiles = sides.tiles_of(side, factors)
    operands = {name: casts.undo_bitcast(side.value, side.dtype)}
    is_rounded = are_exponents = False
    if factors:
        total = as_one(factors, shape)
        stored = total.map_small(lambda x: casts.undo_casts(x, dtypes.SIXTEEN_BIT_FLOATS))
        given = stored.map_small(casts.exponents_or_rounded) if in_call else stored
        are_exponents = given.small.dtype == np.uint8
        is_rounded = not are_exponents and given.small is not stored.small
        operands[f"{name}_scale"] = on_tiles(given, shape, tiles)
    if side.zero_point is not None:
        zero = side.zero_point.map_small(lambda x: casts.undo_casts(x, dtypes.EIGHT_BIT_INTS))
        operands[f"{name}_zero_point"] = on_tiles(zero, shape, tiles)
    spec = OperandSpec(
        dtype=side.dtype.name,
        shape=shape,
        contracting=side.contracting,
        batch=side.batch,
        tiles=tiles,
        scale=bool(factors),
        zero_point=side.zero_point is not None,
        scale_rounded=is_rounded,
        scale_exponents=are_exponents,
    )
    return spec, operands


def _epilogue(
    fused: FusedDot, product: Product, amax: Amax | None
) -> tuple[EpilogueSpec, dict[str, Value]]:
    """The spec of what follows the sum, and its operands by name."""
    bias = None if fused.bias is None else casts.undo_casts(fused.bias, dtypes.SIXTEEN_BIT_FLOATS)
    optional = {
        "residual": fused.residual,
        "bias": bias,
        "out_scale": fused.out_scale(),
    }
    operands = {name: value for name, value in optional.items() if value is not None}
    shapes: dict[str, Shape] = {name: value.shape for name, value in operands.items()}
    spec = EpilogueSpec(
        **shapes,
        residual_dtype=fused.residual.dtype.name if fused.residual is not None else "",
        activation=fused.activation,
        out_dtype="float32" if _is_cast_after(fused) else product.value.dtype.name,
        amax=amax.shape if amax is not None else None,
    )
    return spec, operands


def _is_cast_after(fused: FusedDot) -> bool:
    """Whether the sums are cast to FP8 after the call: a dot does not saturate, and a call does."""
    return fused.quantized is None and fused.dtype in dtypes.FLOAT8


def _op(spec: ScaledDotSpec, computed: ScaledDotSpec, operands: dict[str, Value], dot: Op) -> Op:
    """The op that binds the scaled dot in place of `dot`, without its outputs.

    The problem that is computed is `spec`, or the one that `int8_compute.narrowed` makes of it. The
    op may join others (`plan/launches`) if it binds one scaled dot with `spec`.
    """
    names = tuple(operands)
    sharding = compat.spec_of_output(dot.equation)

    def run(*arrays: Array) -> list[Array]:
        with graph.context_of(dot.equation, dot.callers):
            named: dict[str, Any] = dict(zip(names, arrays, strict=True))
            if computed is spec:
                out, amax = scaled_dot(spec, **named, out_sharding=sharding)
            else:
                out, amax = int8_compute.int8_dot("jaxfp8.rewrite", spec, named, sharding)
        return [out] if amax is None else [out, amax]

    joins = computed is spec and sharding is None
    params = {"spec": computed, "names": names, "dot": dot, "joins": joins}
    return Op("scaled_dot", tuple(operands.values()), run, params)


def _outputs(op: Op) -> tuple[Value, ...]:
    """The data of an op in place of a dot, and its amax if it gives one."""
    spec: ScaledDotSpec | RaggedSpec = op.params["spec"]
    out = Value(spec.out_shape, dtypes.storage(spec.epilogue.out_dtype), op)
    if spec.epilogue.amax is None:
        return (out,)
    return out, Value(spec.epilogue.amax, np.dtype(np.float32), op, 1)


def _view(out: Value, fused: FusedDot, product: Product) -> Value:
    """The output of the call as the product's value: FP8 instead of bytes or sums, then views."""
    value = out
    if fused.quantized is not None:
        value = casts.bitcast(out, product.value.dtype)
    elif _is_cast_after(fused):
        value = casts.cast(out, fused.dtype)
    for op in fused.views:
        shape = op.outputs[0].shape
        if op.name == "transpose":
            value = graph.transpose(value, op.params["permutation"])
        else:
            value = graph.reshape(value, shape)
    return value


def _amax(op: Op, amax: Amax | None) -> Value | None:
    """The amax, of the type of the value that asked for it."""
    if amax is None:
        return None
    return casts.cast(graph.reshape(op.outputs[1], amax.value.shape), amax.value.dtype)
