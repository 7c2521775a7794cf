"""The gate behind a captured product of groups becomes a part of its call.

    y = ragged_dot(x, up)                                [M, 2 H]
    activation(y[:, :H]) * y[:, H:]      ──▶    ragged_dot(x, up, gated)

The call computes the gate in float32 and rounds once, as it does for other steps behind a product.
Nothing else may read the product. Gate and up as two weights stay two calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxfp8._call.ops import ragged_call
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.plan import ragged_calls, row_programs
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.launches import narrowed, readers_of
from jaxfp8._rewrite.plan.ragged_calls import NAME
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec

_TWO_WEIGHTS = "gate and up are two weights; hold them as one, [G, K, 2 N]"


def put_gates_inside(body: Body, replaced: Replaced) -> Replaced:
    """The pass: a call has the gate behind it, or its dot says why not."""
    program = body.program(replaced)
    calls = {op.outputs[0]: op for op, _ in program.ops if op.name == NAME and "dot" in op.params}
    if not calls:
        return replaced
    sites = {site.op: site for site in body.walk.own}
    for call in _of_two_weights(program, calls):
        sites[call.params["dot"]].gate = _TWO_WEIGHTS
    for call, activation, old in _gates(program, _Halves(calls, replaced)):
        made, site = _gated(call, activation, old[0].dtype), sites[call.params["dot"]]
        if isinstance(made, str):
            site.gate = made
            continue
        (out,) = made.outputs
        new = {value: graph.laid_out_like(out, value) for value in old}
        if call not in body.ops({**replaced, **new}) and site.captured is not None:
            site.captured = dataclasses.replace(site.captured, spec=made.params["spec"])
            replaced = {**replaced, **new}
    return replaced


def _of_two_weights(program: Program, calls: Mapping[Value, Op]) -> Iterator[Op]:
    """Calls on the same rows of which the outputs are multiplied."""
    for op, inputs in program.ops:
        both = [calls.get(_before_casts(value)) for value in inputs] if op.name == "mul" else []
        one, other = both if len(both) == 2 else (None, None)
        if one is None or other is None or one is other:
            continue
        spec, is_shared = one.params["spec"], _given(one, "lhs") is _given(other, "lhs")
        if is_shared and ragged_call.may_gate(spec.rows, spec.groups):
            yield from (one, other)


def _before_casts(value: Value) -> Value:
    while (op := graph.producer(value, "convert_element_type")) is not None:
        value = op.inputs[0]
    return value


def _given(call: Op, name: str) -> Value:
    return dict(zip(call.params["names"], call.inputs, strict=True))[name]


def _gates(program: Program, halves: _Halves) -> Iterator[tuple[Op, str, list[Value]]]:
    """Calls with a gate behind them: its activation, and the values that it makes."""
    readers = readers_of(program)
    for op, _ in program.ops:
        if op.name != "mul" or op.outputs[0].dtype not in dtypes.WIDE_FLOAT:
            continue
        row = row_programs.elementwise(op.outputs[0], lambda v: halves.of(v) is not None)
        if row is None or not row.has_factor:
            continue
        both = [halves.of(row.x), halves.of(row.others[0])]
        places = [half[1] for half in both if half is not None]
        first = both[0]
        if row.activation == "none":
            places.sort()
        if (
            first is not None
            and both[1] is not None
            and both[1][0] is first[0]
            and places == [0, 1]
        ):
            yield first[0], row.activation, narrowed(op, readers)


@dataclasses.dataclass(frozen=True)
class _Halves:
    """The halves of the columns of some calls."""

    calls: Mapping[Value, Op]
    replaced: Replaced

    def of(self, value: Value) -> tuple[Op, int] | None:
        """The call of which a value is a half, and which half."""
        if value.op is None or not value.op.inputs:
            return None
        source = whole = value.op.inputs[0]
        while source in self.replaced:
            source = self.replaced[source]
        place = _place(value, whole)
        call = self.calls.get(source)
        return None if call is None or place is None else (call, place)


def _place(value: Value, whole: Value) -> int | None:
    """0 for the first half of the columns, 1 for the second one; None for anything else."""
    op = value.op
    assert op is not None
    rows, columns = whole.shape if len(whole.shape) == 2 else (0, 1)
    if (rows, 2 * value.shape[-1]) != (value.shape[0], columns):
        return None
    if op.name == "split":
        return value.index if op.params["axis"] == 1 else None
    if op.name != "slice" or any(step != 1 for step in op.params["strides"] or ()):
        return None
    start = tuple(op.params["start_indices"])
    places = {(0, 0): 0, (0, columns // 2): 1}
    return places.get(start)


def _gated(call: Op, activation: str, dtype: np.dtype) -> Op | str:
    """The call with a gate, or why there is none."""
    spec, dot = call.params["spec"], call.params["dot"]
    if not dataclasses.replace(spec, gated=False).is_plain:
        return "other steps come between the product and its gate"
    if compat.spec_of_output(dot.equation) is not None:
        return "the columns of its output have a sharding of their own"
    epilogue = EpilogueSpec(out_dtype=dtype.name, activation=activation)
    gated = dataclasses.replace(spec, gated=True, epilogue=epilogue)
    if (reason := ragged_calls.why_not(gated)) is not None:
        return reason
    named = dict(zip(call.params["names"], call.inputs, strict=True))
    del named["group_sizes"]
    made = ragged_calls.op_of(gated, named, dot)
    made.outputs = (Value(gated.out_shape, dtype, made),)
    return made
