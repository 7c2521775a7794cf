"""Rows quantized by the function itself, on a CPU: one call gives codes, and one the maxima.

The calls give the same bits as the five ops in the function, for any scale.
"""

from __future__ import annotations

import functools

import jax

from jaxfp8._call.ops import quantize_call
from jaxfp8._call.ops.quantize_lowering import why_no_rows_here
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.plan import quantized_rows
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.quantized_rows import QuantizedRows
from jaxfp8._rewrite.plan.walk import Walk

# The most operations between a maximum and its scale.
_FARTHEST = 12


def encode_rows(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls quantize rows."""
    operands = list(quantized_rows.operands(body.walk))
    calls = {codes: _calls(body.walk, codes) for codes in dict.fromkeys(c for *_, c in operands)}
    replaced = {**{k: v for new in calls.values() for k, v in new.items()}, **replaced}
    ops = body.ops(replaced) if operands else {}
    for site, index, codes in operands:
        is_used = any(value.op in ops for value in calls[codes].values())
        site.quantized[index] = "one call" if is_used else "as written"
    return replaced


def _calls(walk: Walk, codes: Value) -> Replaced:
    """The outputs of calls for codes, and for the maxima behind their scale."""
    rows = quantized_rows.read(codes)
    if rows is None or why_no_rows_here(rows.x.shape):
        return {}
    x = quantized_rows.narrow(rows.x)
    # A call may give an array with a fact as float32, and would run again to give it in 16 bits.
    x = x if walk.fact(x) is None else rows.x
    made = {codes: _encoded(rows, x)}
    made |= {op.outputs[0]: _amax(x, op) for op in _maxima(rows)}
    return {value: graph.laid_out_like(new, value) for value, new in made.items()}


def _encoded(rows: QuantizedRows, x: Value) -> Value:
    run = functools.partial(
        quantize_call.encode_rows,
        dtype=rows.codes.dtype,
        lowest=rows.lowest,
        multiplies=rows.multiplies,
    )
    return graph.derived("encode_rows", run, [x, rows.scale], rows.codes.shape, rows.codes.dtype)


def _maxima(rows: QuantizedRows) -> list[Op]:
    """The maxima of |x| behind the scale."""
    maxima: list[Op] = []
    front, seen = {rows.scale}, {rows.scale}
    for _ in range(_FARTHEST):
        ops = [value.op for value in front if value.op is not None]
        narrow = quantized_rows.narrow(rows.x)
        maxima += [op for op in ops if quantized_rows.maximised(op) is narrow]
        front = {v for op in ops for v in op.inputs if v.size < rows.x.size} - seen
        seen |= front
    return maxima


def _amax(x: Value, op: Op) -> Value:
    value = op.outputs[0]
    rest = tuple(axis for axis in op.params["axes"] if axis != len(x.shape) - 1)

    def run(x: jax.Array) -> jax.Array:
        amax = quantize_call.amax_rows(x)
        return (amax.max(rest) if rest else amax).astype(value.dtype)

    return graph.derived("amax_rows", run, [x], value.shape, value.dtype)
