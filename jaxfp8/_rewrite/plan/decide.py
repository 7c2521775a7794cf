"""Passes two and three of a rewrite: from a jaxpr to a program with scaled dots in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxfp8._call.library.targets import platform
from jaxfp8._rewrite.ir import emit, graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.plan.attention import join_attention
from jaxfp8._rewrite.plan.body import Body, Pass, Replaced
from jaxfp8._rewrite.plan.encode_calls import produce_encodings
from jaxfp8._rewrite.plan.encode_rows import encode_rows
from jaxfp8._rewrite.plan.launches import join, multiply
from jaxfp8._rewrite.plan.resolve import call_dots
from jaxfp8._rewrite.plan.row_calls import produce_rows
from jaxfp8._rewrite.plan.trace import collector_paused
from jaxfp8._rewrite.plan.walk import Settler, Walk
from jaxfp8._rewrite.regions import opaque
from jaxfp8._value import compat
from jaxfp8._value.spec import is_known

# All passes after the walk in order, each with its platform; "" is any. A pass takes a body and the
# replacements so far, and returns all replacements.
PASSES: tuple[tuple[str, Pass], ...] = (
    ("", call_dots),  # plain and ragged dots with their steps become calls
    ("cuda", join_attention),  # two products with a softmax between them become one call
    ("cpu", encode_rows),  # rows of a call are quantized by another call
    ("cuda", produce_rows),  # rows of a call are made and quantized by another call
    ("cuda", produce_encodings),  # operands of FP8 training are made and encoded by one call
    ("", multiply),  # two calls on one input and the product of their outputs become one launch
    ("", join),  # calls on one input become one launch, if a GPU here has such a kernel
)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """The result for a jaxpr.

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


@collector_paused()
def decide(jaxpr: graph.ClosedJaxpr, compute: str | None = None) -> Decision:
    """Find the scaled dots of a closed jaxpr; nothing is executed.

    Args:
      jaxpr: the function.
      compute: the dtype of its products, as by `compute` of `dot_general`.
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
    """Why a jaxpr is left alone as a whole, and a remedy, or None."""
    if not all(is_known(getattr(v.aval, "shape", ())) for v in jaxpr.invars):
        return "shapes are symbolic", "give every size a number"
    if opaque.holds_ref(jaxpr):
        return (
            "the function reads or writes a mutable array (`jax.Ref`)",
            "rewrite the part of it that has none",
        )
    return None


def settler(compute: str | None = None) -> Settler:
    """Runs the passes after a walk, and orders the remaining ops."""
    return functools.partial(_settle, compute)


def _settle(
    compute: str | None, walk: Walk, outputs: Sequence[Value], inputs: Sequence[Value]
) -> Program:
    body = Body(walk, outputs, inputs, compute)
    replaced: Replaced = {}
    for name, run in PASSES:
        if name in ("", platform()):
            replaced = run(body, replaced)
    return body.program(replaced)
