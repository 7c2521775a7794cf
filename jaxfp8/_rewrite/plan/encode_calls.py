"""What makes the operands of FP8 training becomes part of their encoding, on a GPU: one call.

    y     = a norm, an activation and a factor, or a float32 array rounded to 16 bits
    codes = `quantize` of y with a given scale, as `DelayedScaling` has it, in one layout or both

Query, key and value encode one `y` with scales of their own: that is one call, which reads `x`
once. What something else reads stays as written: it would be made twice. The row sums of a norm
stay with XLA, which fuses them with what makes `x`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._call.ops.produce_call import MOST_SCALES, quantize_produced, why_no_given_kernel
from jaxfp8._call.ops.quantize_call import quantize_p
from jaxfp8._call.reference.produce_reference import NormForm, ProduceSpec
from jaxfp8._call.reference.quantize_reference import QuantizeSpec
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import row_programs
from jaxfp8._rewrite.plan.row_programs import Row
from jaxfp8._rewrite.plan.walk import Walk

Replaced = Mapping[Value, Value]

_IDENTITIES = ("stop_gradient", "undifferentiated")
# What XLA does not fuse with what reads it.
_IN_MEMORY = ("dot_general", "ragged_dot_general", "conv_general_dilated", scaled_dot_p.name)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodeCall:
    """Encodings of one value in one call.

    Attributes:
      ops: the encodings.
      y: what they encode. If anything else reads it the call is dropped.
      row: how it is made.
    """

    ops: tuple[Op, ...]
    y: Value
    row: Row


def schedule(walk: Walk, replaced: Replaced, order: Callable[[Replaced], Program]) -> Program:
    """The program with calls in place of encodings and of what makes their operands.

    Args:
      walk: the walk, with its dots resolved.
      replaced: the values that are replaced already.
      order: makes the program of all that is replaced.
    """
    program = order(replaced)
    calls = {one: _outputs(one) for one in _find(op for op, _ in program.ops)}
    while calls:
        with_calls = order({**replaced, **{k: v for new in calls.values() for k, v in new.items()}})
        ops = {op for op, _ in with_calls.ops}
        read = [one for one in calls if one.y.op in ops]
        if not read:
            for one in calls:
                walk.seen.encoded[one.ops[0]] = (one.row.name, len(one.ops))
            return with_calls
        calls = {one: new for one, new in calls.items() if one not in read}
    return program


def _find(ops: Iterator[Op]) -> Iterator[EncodeCall]:
    """The calls that take the place of encodings among some ops."""
    groups: dict[tuple[Value, np.dtype, int | None], list[Op]] = {}
    for op in ops:
        spec = op.params["spec"] if op.name == quantize_p.name and op.eqn is not None else None
        if spec is not None and spec.dtype is not None and spec.given_scale and spec.has_amax:
            key = (_before_identities(op.inputs[0]), spec.dtype, spec.transpose_from)
            groups.setdefault(key, []).append(op)
    norms = row_programs.Norms(Numbering())
    for (y, dtype, first), group in groups.items():
        if why_no_given_kernel(y.shape, y.dtype, dtype, first) is not None:
            continue
        if (row := _row(norms, y, first)) is not None:
            for i in range(0, len(group), MOST_SCALES):
                yield EncodeCall(tuple(group[i : i + MOST_SCALES]), y, row)


def _before_identities(value: Value) -> Value:
    while value.op is not None and value.op.name in _IDENTITIES:
        value = value.op.inputs[0]
    return value


def _row(norms: row_programs.Norms, y: Value, transpose_from: int | None) -> Row | None:
    """How a value is made, if a call can make it."""
    if y.op is None:
        return None
    rows_are_last = transpose_from in (None, len(y.shape) - 1)
    row = norms.read(y) if rows_are_last else None
    row = row or row_programs.elementwise(y, _stands) or row_programs.rounded(y, _stands)
    return row if row is not None and row.x is not y else None


def _stands(value: Value) -> bool:
    """Whether a value is in memory anyway."""
    return value.op is None or value.op.name in _IN_MEMORY


def _outputs(call: EncodeCall) -> dict[Value, Value]:
    """For each output of the encodings the one of the call."""
    like: QuantizeSpec = call.ops[0].params["spec"]
    row, norm = call.row, call.row.norm
    assert like.dtype is not None
    spec = ProduceSpec(
        dtype=like.dtype,
        row_dtype=call.y.dtype,
        norm=None if norm is None else _form(norm),
        activation=row.activation,
        has_factor=row.has_factor,
        transpose_from=like.transpose_from,
        scales=len(call.ops),
    )
    scales = tuple(op.inputs[1] for op in call.ops)
    inputs = (row.x, *row.of_rows, *row.others, *scales)
    op = Op("quantize_produced", inputs, functools.partial(quantize_produced, spec=spec), {})
    old = [value for one in call.ops for value in one.outputs[:-1]]
    op.outputs = tuple(
        Value(like.shape, like.dtype, op, i)
        for i, like in enumerate((*old, call.ops[0].outputs[-1]))
    )
    found = dict(zip(old, op.outputs[:-1], strict=True))
    found.update({one.outputs[-1]: op.outputs[-1] for one in call.ops})
    return {old: graph.laid_out_like(new, old) for old, new in found.items()}


def _form(norm: NormForm) -> NormForm:
    """A norm without its epsilon."""
    fields = dataclasses.fields(NormForm)
    return NormForm(**{field.name: getattr(norm, field.name) for field in fields})
