"""Operands of FP8 training are made and encoded by one call, on a GPU.

    y     = a norm, an activation and a factor, or a float32 array rounded to 16 bits
    codes = `quantize` of y with a given scale, as `DelayedScaling` has it, in one layout or both

Query, key and value encode one `y` with scales of their own: one call, and one read of `x`. The row
sums of a norm stay with XLA, for fusion with the producer of `x`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from jaxfp8._call.ops.produce_call import MOST_SCALES, why_no_given_kernel
from jaxfp8._call.ops.quantize_call import quantize_p
from jaxfp8._call.reference.produce_reference import NormForm, ProduceSpec
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import produced, row_programs
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.produced import Produced, is_in_memory
from jaxfp8._rewrite.plan.row_programs import RowProgram

_IDENTITIES = ("stop_gradient", "undifferentiated")
# Encodings of one value, to one dtype and in one layout.
Group = tuple[Value, list[Op]]


def produce_encodings(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls make and encode values."""
    made = {_call(row, y, ops): ops for y, ops, row in _known(_groups(body.ops(replaced)))}
    calls = produced.unread(body, replaced, made)
    for one in calls:
        body.walk.seen.encoded[made[one][0]] = (one.row.name, len(made[one]))
    return produced.with_calls(replaced, calls)


def _groups(ops: Iterable[Op]) -> Iterator[Group]:
    """The encodings among some ops in groups for one call each."""
    groups: dict[tuple[Value, np.dtype, int | None], list[Op]] = {}
    for op in ops:
        spec = op.params["spec"] if op.name == quantize_p.name and op.eqn is not None else None
        if spec is not None and spec.dtype is not None and spec.given_scale and spec.has_amax:
            key = (_before_identities(op.inputs[0]), spec.dtype, spec.transpose_from)
            groups.setdefault(key, []).append(op)
    for (y, dtype, first), group in groups.items():
        if why_no_given_kernel(y.shape, y.dtype, dtype, first) is None:
            yield from ((y, group[i : i + MOST_SCALES]) for i in range(0, len(group), MOST_SCALES))


def _before_identities(value: Value) -> Value:
    while value.op is not None and value.op.name in _IDENTITIES:
        value = value.op.inputs[0]
    return value


def _known(groups: Iterable[Group]) -> Iterator[tuple[Value, list[Op], RowProgram]]:
    """The groups with a known way to make their value."""
    norms = row_programs.Norms(Numbering())
    for y, ops in groups:
        if y.op is None:
            continue
        rows_are_last = ops[0].params["spec"].transpose_from in (None, len(y.shape) - 1)
        row = norms.read(y) if rows_are_last else None
        row = row or row_programs.elementwise(y, is_in_memory)
        row = row or row_programs.rounded(y, is_in_memory)
        if row is not None and row.x is not y:
            yield y, ops, row


def _call(row: RowProgram, y: Value, ops: list[Op]) -> Produced:
    """The call in place of encodings of `y`."""
    like, norm = ops[0].params["spec"], row.norm
    spec = ProduceSpec(
        dtype=like.dtype,
        row_dtype=y.dtype,
        norm=None if norm is None else _form(norm),
        activation=row.activation,
        has_factor=row.has_factor,
        transpose_from=like.transpose_from,
        scales=len(ops),
    )
    codes = [value for op in ops for value in op.outputs[:-1]]
    amaxes = [op.outputs[-1] for op in ops]
    inputs = (row.x, *row.of_rows, *row.others, *(op.inputs[1] for op in ops))
    types = [(value.shape, value.dtype) for value in (*codes, amaxes[0])]
    *new, amax = produced.outputs_of(spec, inputs, types)
    pairs = {**dict(zip(codes, new, strict=True)), **dict.fromkeys(amaxes, amax)}
    laid_out = {old: graph.laid_out_like(value, old) for old, value in pairs.items()}
    return Produced(row, laid_out, y.op)


def _form(norm: NormForm) -> NormForm:
    """A norm without its epsilon."""
    fields = dataclasses.fields(NormForm)
    return NormForm(**{field.name: getattr(norm, field.name) for field in fields})
