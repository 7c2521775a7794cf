"""Two products of one input, multiplied: one launch on a GPU writes the result alone.

    x ─┬─▶ dot(x, gate), silu ─▶ mul ─▶        x ──▶ joint_dots(x, gate, up) ─▶
       └─▶ dot(x, up) ───────────┘      ──▶

Nothing else may read the two outputs. The launch rounds each to its dtype before it multiplies, as
the function does.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np

from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import launches
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._value import dtypes

_FLOAT32 = np.dtype(np.float32)


def multiply(body: Body, replaced: Replaced) -> Replaced:
    """The pass: a launch computes two products and multiplies their outputs."""
    if not joint.runs_here():
        return replaced
    made: dict[Value, Value] = {}
    for calls, products in _Gates(body.program(replaced)).all():
        (out,) = launches.op_of(calls, products[0].dtype.name).outputs
        for old in products:
            made[old] = graph.laid_out_like(graph.reshape(out, old.shape), old)
        launches.note(body.walk.own, calls, multiplied=True)
    return {**replaced, **made}


class _Gates:
    """Finds the gates of a program."""

    def __init__(self, program: Program) -> None:
        self._inputs = dict(program.ops)
        self._number = Numbering()
        # None stands for the caller of the program.
        self._readers: dict[Value, list[Op | None]] = collections.defaultdict(list)
        for op, inputs in program.ops:
            for value in inputs:
                self._readers[value].append(op)
        for value in program.outputs:
            self._readers[value].append(None)

    def all(self) -> Iterator[tuple[list[Op], list[Value]]]:
        """Two calls at a time, and the values of the program with the product of their outputs."""
        for op, inputs in self._inputs.items():
            if op.name == "mul" and len({value.shape for value in inputs}) == 1:
                calls = [call for value in inputs if (call := self._call(value)) is not None]
                if len(calls) == 2 and self._fit(calls):
                    yield calls, self._narrowed(op)

    def _call(self, value: Value) -> Op | None:
        """The call behind a value that nothing else reads; None for another value."""
        while (op := value.op) in self._inputs and len(self._readers[value]) == 1:
            assert op is not None
            if op.params.get("joins"):
                return op
            if not (_keeps_order(op) or _widens(op)):
                return None
            (value,) = self._inputs[op]
        return None

    def _fit(self, calls: list[Op]) -> bool:
        """Whether one launch multiplies the outputs of two calls, and pays."""
        specs = [op.params["spec"] for op in calls]
        one, other = (launches.shared(op, self._inputs[op], self._number) for op in calls)
        is_pair = one is not None and other is not None and one.key == other.key
        return is_pair and joint.why_not_multiplied(specs) is None and joint.pays(specs)

    def _narrowed(self, op: Op) -> list[Value]:
        """The product of an op; or its roundings to 16 bits, if nothing else reads it."""
        (product,) = op.outputs
        casts = [reader for reader in self._readers[product] if reader is not None]
        are_casts = {cast.name for cast in casts} == {"convert_element_type"}
        narrow = {cast.outputs[0].dtype for cast in casts}
        is_rounded = product.dtype == _FLOAT32 and narrow <= set(dtypes.SIXTEEN_BIT_FLOATS)
        if are_casts and is_rounded and len(narrow) == 1 and None not in self._readers[product]:
            return [cast.outputs[0] for cast in casts]
        return [product]


def _keeps_order(op: Op) -> bool:
    return graph.is_reshape(op) and op.inputs[0].size == op.outputs[0].size


def _widens(op: Op) -> bool:
    is_cast = op.name == "convert_element_type" and op.outputs[0].dtype == _FLOAT32
    return is_cast and op.inputs[0].dtype in dtypes.SIXTEEN_BIT_FLOATS
