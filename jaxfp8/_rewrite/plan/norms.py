"""An RMSNorm in front of the products of a launch: the launch makes its rows, on a GPU.

    x ─▶ RMSNorm ─▶ joint_dots(y, q, k, v) ─▶        x, gain ──▶ joint_dots(x, q, k, v) ─▶

Only where nothing else reads the norm. The input and the gain have to be in memory: in front of a
call XLA would write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import launches, produced, row_programs
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.row_programs import RowProgram
from jaxfp8._value import dtypes

_GAINS = (dtypes.BFLOAT16, np.dtype(np.float32))
_MOST_COLUMNS = 8192


@dataclasses.dataclass(frozen=True, eq=False)
class _Normed:
    """A launch with a norm, in place of one without, or of a call.

    Attributes:
      calls: its products.
      old, new: the ops.
      rows: of the norm. If anything else reads them, or equal ones, the launch has none.
    """

    calls: Sequence[Op]
    old: Op
    new: Op
    rows: Value

    @property
    def replaced(self) -> dict[Value, Value]:
        """For each output of the old op that of the new one."""
        return dict(zip(self.old.outputs, self.new.outputs, strict=True))


def normalise(body: Body, replaced: Replaced) -> Replaced:
    """The pass: launches make their rows by a norm."""
    if not joint.runs_here():
        return replaced
    number = Numbering()
    made = list(_normed(body, replaced, number))
    while made:
        every = {**replaced, **{old: new for one in made for old, new in one.replaced.items()}}
        left = {
            number(value)
            for op in body.ops(every)
            if op.name in {one.rows.op.name for one in made if one.rows.op is not None}
            for value in op.outputs
        }
        read = [one for one in made if number(one.rows) in left]
        if not read:
            for one in made:
                launches.note(body.walk.own, one.calls, one.new.params["fused"])
            return every
        made = [one for one in made if one not in read]
    return replaced


def _normed(body: Body, replaced: Replaced, number: Numbering) -> Iterator[_Normed]:
    """The launches of a program that can have a norm."""
    norms = row_programs.Norms(number)
    for op, inputs in body.ops(replaced).items():
        calls = op.params.get("calls") or ([op] if op.params.get("joins") else [])
        if not calls or calls[0].params["names"][0] != "lhs" or inputs[0].op is None:
            continue
        if op.params.get("fused", joint.NOTHING).any:  # gate and up have many columns
            continue
        y = inputs[0]
        row = norms.read(y) if y.dtype == dtypes.BFLOAT16 else None
        if row is not None and _fits(body, replaced, row, calls):
            gain, offset = _stored(row.others[0])
            fused = joint.Fused(norm=row.norm, gain_offset=offset)
            given = graph.reshape(row.x, y.shape), graph.reshape(gain, row.others[0].shape)
            yield _Normed(calls, op, launches.op_of(calls, fused, given), y)


def _fits(body: Body, replaced: Replaced, row: RowProgram, calls: Sequence[Op]) -> bool:
    """Whether the launch of some calls can have a norm, with its input and gain in memory."""
    specs = [call.params["spec"] for call in calls]
    if row.norm is None or joint.why_not_normed(specs, row.norm) is not None:
        return False
    gain, _ = _stored(row.others[0])
    is_stored = gain.op is None and gain.literal is None and gain.size == row.others[0].size
    return (
        is_stored and gain.dtype in _GAINS and _is_in_memory(body, replaced, row.x) and _pays(calls)
    )


def _stored(gain: Value) -> tuple[Value, float]:
    """The input of the program behind a gain, and the number that the function adds to it."""
    offset = 0.0
    while (op := gain.op) is not None:
        numbers = [constants.number(value) for value in op.inputs]
        if op.name == "add" and offset == 0.0 and [n is None for n in numbers].count(True) == 1:
            (offset,) = (number for number in numbers if number is not None)
            gain = op.inputs[numbers.index(None)]
        elif graph.is_reshape(op) or (op.name == "convert_element_type" and _widens(op)):
            (gain,) = op.inputs[:1]
        else:
            break
    return gain, offset


def _widens(op: Op) -> bool:
    return op.outputs[0].dtype == np.float32 and op.inputs[0].dtype in _GAINS


def _pays(calls: Sequence[Op]) -> bool:
    """Whether the launch is faster with a norm, and a call by itself is one of the kernel.

    Each block of columns adds up the squares of all rows: on an H200 one row by 6144 columns took
    45.6 us with the norm and 50.8 without; by 28672 columns of a gate 52.8 and 43.7.
    """
    specs = [call.params["spec"] for call in calls]
    if sum(spec.out_shape[-1] for spec in specs) > _MOST_COLUMNS:
        return False
    if len(calls) > 1:
        return True
    shared = joint.what_is_shared(specs[0])
    return shared is not None and shared[0] == "lhs" and joint.pays(specs)


def _is_in_memory(body: Body, replaced: Replaced, x: Value) -> bool:
    """Whether the input of a norm is written anyway: XLA fuses other ones with the norm."""
    while x.op is not None and graph.is_reshape(x.op) and x not in replaced:
        (x,) = x.op.inputs[:1]
    inside_call = body.walk.product(x) is not None  # the call may give another value
    return x in replaced or (produced.is_in_memory(x) and not inside_call)
