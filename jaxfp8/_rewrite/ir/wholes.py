"""Inlined calls: each stays one operation if nothing in it changes.

`jax.lax.composite` names a part of a program for other compilers. The walk inlines it, so facts
pass through it. If the rewrite replaces nothing in it, the program keeps the operation with its
name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxfp8._rewrite.ir.graph import Op, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """An inlined call.

    Attributes:
      op: the call as the function has it.
      outputs: for each output of `op` the same value inside the call.
    """

    op: Op
    outputs: tuple[Value, ...]


def replacements(wholes: Sequence[Whole], replaced: Mapping[Value, Value]) -> dict[Value, Value]:
    """For each output inside an unchanged call, the output of the call.

    Args:
      wholes: the calls of a program; one inside another comes first.
      replaced: the replacements by the rewrite.
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
    stack, seen = list(whole.outputs), set(whole.op.inputs)
    while stack:
        value = stack.pop()
        if value in seen or value.literal is not None:
            continue
        seen.add(value)
        op = value.op
        if value in replaced or op is None:
            return True
        if op.name != "constant" and (op.eqn is None or op.run is not None):
            return True
        stack.extend(op.inputs)
    return False
