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
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import row_scales
from jaxfp8._rewrite.plan.body import Body, Replaced


def join(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls on one input are joined, and their dots say so."""
    if not joint.runs_here():
        return replaced
    sites = {site.op: site for site in body.walk.own}
    joined: dict[Value, Value] = {}
    for ops in _groups(body.ops(replaced)):
        for op, out in zip(ops, _op(ops).outputs, strict=True):
            joined[op.outputs[0]] = out
            if (site := sites.get(op.params["dot"])) is not None:
                site.joined = len(ops)
    return {**replaced, **joined}


def _groups(program: Mapping[Op, tuple[Value, ...]]) -> Iterator[list[Op]]:
    """The calls of one launch, two to `joint.MOST` at a time."""
    groups: dict[Hashable, list[Op]] = {}
    behind: set[Value] = set()  # values behind a product
    number = Numbering()  # each product has a view of the scale of its own
    for op, inputs in program.items():
        shared = _shared(op)
        if shared is not None:
            name, alike = shared
            given = dict(zip(op.params["names"], inputs, strict=True))
            x, scale = given.pop(name), given.pop(f"{name}_scale", None)
            if behind.isdisjoint(given.values()):
                of_scale = None if scale is None else number(row_scales.before_reshapes(scale))
                groups.setdefault((x, of_scale, alike), []).append(op)
        if shared is not None or not behind.isdisjoint(inputs):
            behind.update(op.outputs)
    for ops in groups.values():
        parts = (ops[i : i + joint.MOST] for i in range(0, len(ops), joint.MOST))
        yield from filter(_pays, parts)


def _pays(ops: Sequence[Op]) -> bool:
    return len(ops) > 1 and joint.pays([op.params["spec"] for op in ops])


def _shared(op: Op) -> tuple[str, Hashable] | None:
    """The common part of a call and its possible partners; None if it joins none."""
    return joint.what_is_shared(op.params["spec"]) if op.params.get("joins") else None


def _op(ops: Sequence[Op]) -> Op:
    """The op of the joint call."""
    specs = [op.params["spec"] for op in ops]
    names = [op.params["names"] for op in ops]
    first: Op = ops[0].params["dot"]

    def run(*arrays: Array) -> Sequence[Array]:
        left = iter(arrays)
        operands = [dict(zip(own, left)) for own in names]  # noqa: B905
        with graph.context_of(first.equation, first.callers):
            return joint.joint_dots(specs, operands)

    inputs = tuple(value for op in ops for value in op.inputs)
    joined = Op("joint_dots", inputs, run, {})
    outs = [(i, op.outputs[0]) for i, op in enumerate(ops)]
    joined.outputs = tuple(Value(out.shape, out.dtype, joined, i) for i, out in outs)
    return joined
