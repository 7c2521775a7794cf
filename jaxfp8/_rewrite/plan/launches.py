"""Calls on one input as one launch on a GPU, and the product of two outputs inside it.

    x ──┬─▶ dot(x, q) ─▶           x ──▶ joint_dots(x, q, k, v) ─┬─▶
        ├─▶ dot(x, k) ─▶    ──▶                                  ├─▶
        └─▶ dot(x, v) ─▶                                         └─▶

    x ─┬─▶ dot(x, gate), silu ─▶ mul ─▶        x ──▶ joint_dots(x, gate, up) ─▶
       └─▶ dot(x, up) ───────────┘      ──▶

None of the calls may wait for another. The input is an array and its scale. All other operands are
computed without products that may join. Then two joint calls cannot wait for each other either:
each waits for products only through its input.

Nothing else may read the two outputs of a gate. The launch rounds each to its dtype before it
multiplies, as the function does.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.plan import row_scales
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._value import dtypes

_FLOAT32 = np.dtype(np.float32)


def join(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls on one input are joined, and their dots say so."""
    if not joint.runs_here():
        return replaced
    joined: dict[Value, Value] = {}
    for ops in _groups(body.ops(replaced)):
        for op, out in zip(ops, _op_of(ops).outputs, strict=True):
            joined[op.outputs[0]] = out
        _note(body.walk.own, ops)
    return {**replaced, **joined}


def _groups(program: Mapping[Op, tuple[Value, ...]]) -> Iterator[list[Op]]:
    """The calls of one launch, two to `joint.MOST` at a time."""
    groups: dict[Hashable, list[Op]] = {}
    behind: set[Value] = set()  # values behind a product
    number = Numbering()
    for op, inputs in program.items():
        shared = _shared(op, inputs, number)
        if shared is not None and behind.isdisjoint(shared.others):
            groups.setdefault(shared.key, []).append(op)
        if shared is not None or not behind.isdisjoint(inputs):
            behind.update(op.outputs)
    for ops in groups.values():
        parts = (ops[i : i + joint.MOST] for i in range(0, len(ops), joint.MOST))
        yield from filter(_pays, parts)


def _pays(ops: Sequence[Op]) -> bool:
    return len(ops) > 1 and joint.pays([op.params["spec"] for op in ops])


def multiply(body: Body, replaced: Replaced) -> Replaced:
    """The pass: a launch computes two products and multiplies their outputs."""
    if not joint.runs_here():
        return replaced
    made: dict[Value, Value] = {}
    for calls, products in _Gates(body.program(replaced)).all():
        (out,) = _op_of(calls, products[0].dtype.name).outputs
        for old in products:
            made[old] = graph.laid_out_like(graph.reshape(out, old.shape), old)
        _note(body.walk.own, calls, multiplied=True)
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
        one, other = (_shared(op, self._inputs[op], self._number) for op in calls)
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


@dataclasses.dataclass(frozen=True)
class _Shared:
    """The common part of calls in one launch.

    Attributes:
      key: equal for calls that may share a launch.
      others: the operands of the call itself.
    """

    key: Hashable
    others: tuple[Value, ...]


def _shared(op: Op, inputs: Sequence[Value], number: Numbering) -> _Shared | None:
    """What a call shares with possible partners; None if it joins none.

    Args:
      op: of the program.
      inputs: its inputs, after replacements.
      number: numbers scales: each product has a view of its own of the scale of its rows.
    """
    found = joint.what_is_shared(op.params["spec"]) if op.params.get("joins") else None
    if found is None:
        return None
    name, alike = found
    given = dict(zip(op.params["names"], inputs, strict=True))
    x, scale = given.pop(name), given.pop(f"{name}_scale", None)
    of_scale = None if scale is None else number(row_scales.before_reshapes(scale))
    return _Shared((x, of_scale, alike), tuple(given.values()))


def _op_of(ops: Sequence[Op], multiplied: str = "") -> Op:
    """The op of one launch for some calls, as `joint.joint_dots` has it."""
    specs = [op.params["spec"] for op in ops]
    names = [op.params["names"] for op in ops]
    first: Op = ops[0].params["dot"]

    def run(*arrays: Array) -> Sequence[Array]:
        left = iter(arrays)
        operands = [dict(zip(own, left)) for own in names]  # noqa: B905
        with graph.context_of(first.equation, first.callers):
            return joint.joint_dots(specs, operands, multiplied)

    inputs = tuple(value for op in ops for value in op.inputs)
    joined = Op("joint_dots", inputs, run, {})
    outs = [op.outputs[0] for op in ops[: 1 if multiplied else len(ops)]]
    types = [(out.shape, np.dtype(multiplied or out.dtype)) for out in outs]
    joined.outputs = tuple(Value(*one, joined, i) for i, one in enumerate(types))
    return joined


def _note(sites: Iterable[DotSite], ops: Sequence[Op], *, multiplied: bool = False) -> None:
    """Say in the dots of some calls what their launch is."""
    dots = [op.params["dot"] for op in ops]
    for site in sites:
        if site.op in dots:
            site.joined, site.multiplied = len(ops), multiplied
