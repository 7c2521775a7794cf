"""Products of one input as one launch on a GPU: the choice of calls, and the joint call.

    x ──┬─▶ dot(x, q) ─▶           x ──▶ joint_dots(x, q, k, v) ─┬─▶
        ├─▶ dot(x, k) ─▶    ──▶                                  ├─▶
        └─▶ dot(x, v) ─▶                                         └─▶

None of them may wait for another. The input is an array and its scale. All other operands are
computed without products that may join. Then two joint calls cannot wait for each other either:
each waits for products only through its input.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import launches
from jaxfp8._rewrite.plan.body import Body, Replaced


def join(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls on one input are joined, and their dots say so."""
    if not joint.runs_here():
        return replaced
    joined: dict[Value, Value] = {}
    for ops in _groups(body.ops(replaced)):
        for op, out in zip(ops, launches.op_of(ops).outputs, strict=True):
            joined[op.outputs[0]] = out
        launches.note(body.walk.own, ops)
    return {**replaced, **joined}


def _groups(program: Mapping[Op, tuple[Value, ...]]) -> Iterator[list[Op]]:
    """The calls of one launch, two to `joint.MOST` at a time."""
    groups: dict[Hashable, list[Op]] = {}
    behind: set[Value] = set()  # values behind a product
    number = Numbering()
    for op, inputs in program.items():
        shared = launches.shared(op, inputs, number)
        if shared is not None and behind.isdisjoint(shared.others):
            groups.setdefault(shared.key, []).append(op)
        if shared is not None or not behind.isdisjoint(inputs):
            behind.update(op.outputs)
    for ops in groups.values():
        parts = (ops[i : i + joint.MOST] for i in range(0, len(ops), joint.MOST))
        yield from filter(_pays, parts)


def _pays(ops: Sequence[Op]) -> bool:
    return len(ops) > 1 and joint.pays([op.params["spec"] for op in ops])
