"""Inlined calls: each stays one operation if nothing in it changes.

`jax.lax.composite` names a part of a program for other compilers. The walk inlines it, so facts
pass through it. If the rewrite replaces nothing in it, the program keeps the operation with its
name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Op, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """An inlined call."""

    op: Op  # the call as the function has it
    outputs: tuple[Value, ...]  # for each output of `op` the same value inside the call


def replacements(wholes: Sequence[Whole], replaced: Mapping[Value, Value]) -> dict[Value, Value]:
    """For each output inside an unchanged call, the output of the call.

    One call inside another comes first in `wholes`.
    """
    kept: dict[Value, Value] = {}
    for whole in reversed(wholes):
        if not _is_changed(whole, replaced):
            pairs = zip(whole.outputs, whole.op.outputs, strict=True)
            made = ((v, out) for v, out in pairs if v.op is not None and v not in whole.op.inputs)
            kept = {**dict(made), **kept}
    return kept


def _is_changed(whole: Whole, replaced: Mapping[Value, Value]) -> bool:
    """Whether the rewrite changed anything between the inputs and the outputs of a call.

    A rebuilt region has an equation and a `run` of its own. Other added ops have no equation. A
    constant has none either, but is unchanged.
    """

    def before(value: Value) -> Sequence[Value]:
        return () if value in whole.op.inputs else graph.inputs(value)

    made = (v for v in graph.behind(whole.outputs, before) if v not in whole.op.inputs)
    return any(value in replaced or _is_added(value) for value in made if value.literal is None)


def _is_added(value: Value) -> bool:
    op = value.op
    return op is None or (op.name != "constant" and (op.eqn is None or op.run is not None))
