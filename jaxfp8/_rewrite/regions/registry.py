"""The table of regions, and the common steps of their rules: walk the inside, rebuild the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.regions.borders import Inside
from jaxfp8._rewrite.regions.exits import Exit
from jaxfp8._rewrite.rules.registry import into
from jaxfp8._value import compat

Region = Callable[[Context, Op], Sequence[Value] | None]
# Evaluates a rebuilt region on its inputs.
Run = Callable[..., Sequence[Array]]
REGIONS: dict[str, Region] = {}


def region(*names: str) -> Callable[[Region], Region]:
    """Register the rule of regions by the names of their primitives."""
    return into(REGIONS, names)


def walk_inside(walk: Context, op: Op, jaxpr: object, inputs: Sequence[Value]) -> list[Value]:
    """Walk an inner jaxpr of an op on given values."""
    consts = [graph.constant(c) for c in compat.consts_of(jaxpr)]
    return walk.jaxpr(compat.open_jaxpr(jaxpr), consts, inputs, op.inside)


def rebuilt(
    walk: Context, op: Op, inside: Inside, run: Run, leaving: Sequence[Exit] = ()
) -> Sequence[Value] | None:
    """The outputs of a rebuilt region, or None if nothing inside it changed or is known."""
    if not inside.changed and not is_known(leaving):
        return None
    new = new_op(walk, op, [value for value, _ in inside.sources], run)
    return state_facts(walk, new, leaving)


def new_op(walk: Context, op: Op, reads: Sequence[Value], run: Run) -> Op:
    """The op of a rebuilt region: it reads other values, and runs in the context of `op`."""
    new = graph.equation_op(op.equation, reads, op.callers)

    def within(*arrays: Array) -> Sequence[Array]:
        with graph.context_inside(new):
            return run(*arrays)

    new.run = within
    walk.note(new)
    return new


def extra_outputs(leaving: Sequence[Exit]) -> list[Value]:
    """The further outputs of a region: parts of the facts about its outputs."""
    return [value for exit_ in leaving for value in exit_.extra]


def is_known(leaving: Sequence[Exit]) -> bool:
    """Whether any output is known to be dequantized 8-bit data."""
    return any(exit_.fact is not None for exit_ in leaving)


def state_facts(
    walk: Context, op: Op, leaving: Sequence[Exit], first: int = 0
) -> tuple[Value, ...]:
    """The outputs of a rebuilt region; it gets extra ones, and those from `first` on facts."""
    outputs = op.outputs
    for value, exit_ in zip(outputs[first:], leaving, strict=False):
        given: dict[Value, Value] = {}
        for part in exit_.extra:
            given[part] = Value(exit_.shape(part), part.dtype, op, len(op.outputs))
            op.outputs += (given[part],)
        fact = exit_.outside(given.__getitem__)
        if fact is not None:
            walk.facts[value] = fact
    return outputs
