"""A program between its walk and its emission: passes replace its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxfp8._rewrite.ir import emit
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.plan.walk import Walk

# For a value of the function, the value to read instead.
Replaced = Mapping[Value, Value]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A function, or the body of a region, after its walk.

    Attributes:
      walk: its facts and dots.
      outputs, inputs: its values.
      compute: the dtype of products, as by `compute` of `dot_general`.
    """

    walk: Walk
    outputs: Sequence[Value]
    inputs: Sequence[Value]
    compute: str | None = None

    def program(self, replaced: Replaced) -> Program:
        """The program with these replacements."""
        return emit.schedule(self.outputs, self.walk.effects, replaced, self.inputs)

    def ops(self, replaced: Replaced) -> dict[Op, tuple[Value, ...]]:
        """The ops of that program in order, each with its inputs."""
        return dict(self.program(replaced).ops)


# From a body and the replacements so far to all replacements.
Pass = Callable[[Body, Replaced], Replaced]
