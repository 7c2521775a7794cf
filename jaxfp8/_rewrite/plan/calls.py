"""From a product to a call: the spec of its scaled dot, and the arrays that go into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfp8._call.primitive import scaled_dot
from jaxfp8._rewrite.ir import casts, graph, sides
from jaxfp8._rewrite.ir.facts import Amax, Factors, Product, as_one, fill, refine
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sides import Side
from jaxfp8._rewrite.rules import epilogue as _epilogues
from jaxfp8._rewrite.rules.epilogue import Form
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, tile_counts


@dataclasses.dataclass(eq=False)
class Call:
    """One scaled dot to emit.

    Attributes:
      spec: the problem.
      product: the step up to which the call computes.
      amax: the maximum that it gives beside the output, or None.
      value: the output, as the value of `product`.
      amax_value: the maximum, as the value of `amax`; None without one.
    """

    spec: ScaledDotSpec
    product: Product
    amax: Amax | None
    value: Value
    amax_value: Value | None


def make(
    product: Product, amax: Amax | None, why_not: Callable[[ScaledDotSpec], str | None]
) -> Call | str:
    """The call that computes a product (and an amax), or why there is none."""
    if product.site.reason:
        return product.site.reason
    if amax is not None and amax.product not in product.ancestry():
        return "the amax is of a later value"
    form = _epilogues.fold(product, amax.product if amax is not None else None)
    if isinstance(form, str):
        return f"an operation after the dot {form}"
    if not form.ready:
        return "the step after the dot is not complete"
    if amax is not None and amax.product is not product and form.quantized is None:
        return "the output differs from what the amax is of"
    return _from_form(form, product, amax, why_not)


def _from_form(
    form: Form, product: Product, amax: Amax | None, why_not: Callable[..., str | None]
) -> Call | str:
    lhs, lhs_operands = _operand("lhs", form.site.lhs, form.lhs)
    rhs, rhs_operands = _operand("rhs", form.site.rhs, form.rhs)
    epilogue, others = _epilogue(form, product, amax)
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue, precision=form.site.precision)
    reason = why_not(spec)
    if reason:
        return reason
    op = _op(spec, {**lhs_operands, **rhs_operands, **others}, form.site.op)
    value = graph.laid_out_like(_view(op.outputs[0], form, product), product.value)
    return Call(spec, product, amax, value, _amax(op, amax))


def _operand(name: str, side: Side, more: Factors) -> tuple[OperandSpec, dict[str, Value]]:
    """The spec of a side, and its data, scale and zero point by operand name."""
    factors = side.factors + more
    shape = side.value.shape
    tiles = sides.tiles_of(side, factors)
    counts = tile_counts(shape, tiles)
    operands = {name: casts.undo_bitcast(side.value, side.dtype)}
    is_rounded = False
    if factors:
        total = as_one(factors, shape)
        stored = total.map_small(lambda x: casts.undo_casts(x, dtypes.FLOAT16))
        given = stored.map_small(casts.undo_rounding)
        is_rounded = given.small is not stored.small
        operands[f"{name}_scale"] = fill(refine(given, shape, tiles), counts)
    if side.zero_point is not None:
        zero = side.zero_point.map_small(lambda x: casts.undo_casts(x, dtypes.INT8))
        operands[f"{name}_zero_point"] = fill(refine(zero, shape, tiles), counts)
    spec = OperandSpec(
        dtype=side.dtype.name,
        shape=shape,
        contracting=side.contracting,
        batch=side.batch,
        tiles=tiles,
        scale=bool(factors),
        zero_point=side.zero_point is not None,
        scale_rounded=is_rounded,
    )
    return spec, operands


def _epilogue(
    form: Form, product: Product, amax: Amax | None
) -> tuple[EpilogueSpec, dict[str, Value]]:
    """The spec of what follows the sum, and its operands by name."""
    bias = None if form.bias is None else casts.undo_casts(form.bias, dtypes.FLOAT16)
    optional = {
        "residual": form.residual,
        "bias": bias,
        "out_scale": _epilogues.out_scale(form),
    }
    operands = {name: value for name, value in optional.items() if value is not None}
    shapes: dict[str, Any] = {name: value.shape for name, value in operands.items()}
    spec = EpilogueSpec(
        **shapes,
        residual_dtype=form.residual.dtype.name if form.residual is not None else "",
        activation=form.activation,
        out_dtype="float32" if _is_cast_behind(form) else product.value.dtype.name,
        amax=amax.shape if amax is not None else None,
    )
    return spec, operands


def _is_cast_behind(form: Form) -> bool:
    """Whether the sums are cast to FP8 as a dot does, which does not saturate as a call does."""
    return form.quantized is None and form.dtype in dtypes.FLOAT8


def _op(spec: ScaledDotSpec, operands: dict[str, Value], dot: Op) -> Op:
    """The op that binds the scaled dot in place of `dot`; outputs are the data and the amax."""
    names = tuple(operands)

    def run(*arrays: Any) -> list[Any]:
        with graph.context_of(dot.eqn, dot.callers):
            named = dict(zip(names, arrays, strict=True))
            out, amax = scaled_dot(spec, **named, out_sharding=compat.spec_of_output(dot.eqn))
        return [out] if amax is None else [out, amax]

    op = Op("scaled_dot", tuple(operands.values()), run, {"spec": spec})
    out = Value(spec.out_shape, dtypes.storage(spec.epilogue.out_dtype), op)
    op.outputs = (out,)
    if spec.epilogue.amax is not None:
        op.outputs += (Value(spec.epilogue.amax, np.dtype(np.float32), op, 1),)
    return op


def _view(out: Value, form: Form, product: Product) -> Value:
    """The output of the call as the product's value: FP8 from bytes or sums, then the views."""
    value = out
    if form.quantized is not None:
        value = casts.bitcast(out, product.value.dtype)
    elif _is_cast_behind(form):
        value = casts.cast(out, form.dtype)
    for op in form.views:
        shape = op.outputs[0].shape
        if op.name == "transpose":
            value = graph.transpose(value, op.params["permutation"])
        else:
            value = graph.reshape(value, shape)
    return value


def _amax(op: Op, amax: Amax | None) -> Value | None:
    """The amax as the value that asked for it."""
    if amax is None:
        return None
    return casts.cast(graph.reshape(op.outputs[1], amax.value.shape), amax.value.dtype)
