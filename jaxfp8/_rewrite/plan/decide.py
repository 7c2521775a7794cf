"""Passes two and three of a rewrite: from a jaxpr to a program with scaled dots in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops import joint as call_joint
from jaxfp8._call.ops import lowering, routes
from jaxfp8._rewrite.ir import emit, graph, wholes
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.plan import encode_calls, encodings, joint, row_calls
from jaxfp8._rewrite.plan.calls import CallOptions, Refusal
from jaxfp8._rewrite.plan.pause import collector_paused
from jaxfp8._rewrite.plan.resolve import Resolver
from jaxfp8._rewrite.plan.walk import Settler, Walk
from jaxfp8._rewrite.regions import opaque
from jaxfp8._value import compat
from jaxfp8._value.spec import ScaledDotSpec, is_known


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What becomes of a jaxpr.

    Attributes:
      program: evaluates it; its inputs are the constants of the jaxpr, then its arguments.
      seen: the dots in it, regions included.
    """

    program: Program
    seen: Seen

    @property
    def changed(self) -> bool:
        """Whether any dot became another one, or anything is picked as bytes instead."""
        return self.seen.changed_since()

    def learn(self, arrays: Sequence[Any]) -> None:
        """Take the arrays of the inputs, for a report; what becomes of a dot depends on none."""
        for value, array in zip(self.program.inputs, arrays, strict=False):
            if isinstance(array, jax.Array | np.ndarray) and not isinstance(array, jax.core.Tracer):
                value.concrete = array


@collector_paused()
def decide(jaxpr: graph.ClosedJaxpr, compute: str | None = None) -> Decision:
    """Find the scaled dots of a closed jaxpr; nothing is executed.

    Args:
      jaxpr: the function.
      compute: in what its products are computed, as by `compute` of `dot_general`.
    """
    opened = compat.open_jaxpr(jaxpr)
    why = why_left_alone(opened)
    if why is not None:
        return Decision(emit.Program((), (), ()), opaque.left_alone(opened, *why))
    walk = Walk(settler(compute))
    inputs = graph.inputs_of(jaxpr)
    program = walk.settle(walk.program(jaxpr, inputs), inputs)
    return Decision(program, walk.seen)


def why_left_alone(jaxpr: graph.Jaxpr) -> tuple[str, str] | None:
    """Why a jaxpr is left alone as a whole, and what to do, or None."""
    if not all(is_known(getattr(v.aval, "shape", ())) for v in jaxpr.invars):
        return "shapes are symbolic", "give every size a number"
    if opaque.holds_ref(jaxpr):
        return (
            "the function reads or writes a mutable array (`jax.Ref`)",
            "rewrite the part of it that has none",
        )
    return None


def settler(compute: str | None = None) -> Settler:
    """Settles which dots of a walk become calls, and orders what is left to evaluate."""
    return functools.partial(_resolve, compute)


def _resolve(
    compute: str | None, walk: Walk, outputs: Sequence[Value], inputs: Sequence[Value]
) -> Program:
    refusal = functools.partial(_refusal, targets.platform())
    options = CallOptions(refusal=refusal, compute=compute)
    replaced = Resolver(walk, options).resolve(outputs)
    order = functools.partial(_ordered, walk, outputs, inputs)
    if not row_calls.is_for_here():
        return encodings.schedule(walk, replaced, order)
    with_encodings = functools.partial(encode_calls.schedule, walk, order=order)
    return row_calls.schedule(walk, replaced, with_encodings)


def _refusal(platform: str, spec: ScaledDotSpec) -> Refusal | None:
    """Why a problem is left as written: no kernel takes it here, or XLA is faster than the one."""
    if reason := lowering.why_not(spec, platform):
        return Refusal(reason)
    slower = routes.slower_than_xla(spec, platform)
    return None if slower is None else Refusal(*slower)


def _ordered(
    walk: Walk, outputs: Sequence[Value], inputs: Sequence[Value], replaced: Mapping[Value, Value]
) -> Program:
    """The program of what is replaced, with products of one input as one op where that pays."""
    replaced = {**wholes.replacements(walk.wholes, replaced), **replaced}
    program = emit.schedule(outputs, walk.effects, replaced, inputs)
    if not call_joint.runs_here():
        return program
    joined = joint.replacements(walk, program)
    if not joined:
        return program
    return emit.schedule(outputs, walk.effects, {**replaced, **joined}, inputs)
