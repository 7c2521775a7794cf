"""The dots of a function, as the report tells of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxfp8._rewrite.ir import precision as _precision
from jaxfp8._rewrite.ir.factors import Factors
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Known
from jaxfp8._rewrite.ir.sides import Side
from jaxfp8._value.spec import ScaledDotSpec, Shape

# ((contracting axes of lhs, of rhs), (batch axes of lhs, of rhs)), as `dot_general` has them.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
# `jax.nn.scaled_matmul` takes [B, M, K] and [B, N, K], and has no parameter that says so.
_OF_SCALED_MATMUL: DimensionNumbers = (((2,), (2,)), ((0,), (0,)))


# Dtypes and shapes.
Arrays = tuple[tuple[np.dtype, Shape], ...]


@dataclasses.dataclass(eq=False)
class Seen:
    """The dots of a function, regions included.

    Attributes:
      sites: those that 8-bit data reached, in order.
      others: how many it never reached.
      calls: the scaled dots that the function holds already.
      picks: the ops that pick from FP8 arrays or stack them, and do so with bytes instead. For
        each, the dtype and the shape of those arrays.
      widened: likewise the ops in loops that pick from FP8 arrays, or update them, as written.
      encoded: the encodings that are one call with what makes their operand. For the first of each
        call what that is, and how many there are.
    """

    sites: list[DotSite] = dataclasses.field(default_factory=list)
    others: int = 0
    calls: list[Op] = dataclasses.field(default_factory=list)
    picks: dict[Op, Arrays] = dataclasses.field(default_factory=dict)
    widened: dict[Op, Arrays] = dataclasses.field(default_factory=dict)
    encoded: dict[Op, tuple[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """How many dots, picks and encodings it has, as `changed_since` takes it."""
        return len(self.sites), len(self.picks) + len(self.encoded)

    @property
    def is_captured(self) -> bool:
        """Whether any dot is another one now."""
        return any(site.changed for site in self.sites)

    def changed_since(self, size: tuple[int, int] = (0, 0)) -> bool:
        """Whether anything that came after another `size` is another one now."""
        sites, others = size
        return any(site.changed for site in self.sites[sites:]) or self.size[1] > others

    def see(self, site: DotSite) -> None:
        """Note a dot, or count it if it has nothing to do with 8-bit data."""
        if site.concerned:
            self.sites.append(site)
        else:
            self.others += 1


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """The scaled dot that a dot became.

    Attributes:
      spec: the problem, as it is computed.
      stored: the same with its operands as they are stored; another one only in int8.
      sides: the operands as the function has them, in its order of axes.
      compute: "int8" if operands are rounded to int8 for the product, else None.
    """

    spec: ScaledDotSpec
    stored: ScaledDotSpec
    sides: tuple[Side, Side]
    compute: str | None = None


@dataclasses.dataclass(eq=False)
class DotSite:
    """One dot of the function: what was found out about it.

    Attributes:
      op: the dot as the function has it.
      given: the two operands as the dot has them, each with what is known of its data.
      scales: for each operand, what the dot itself scales it by; where there is a fact, it contains
        these scales.
      captured: the scaled dot that it became, set when the program is resolved.
      rounded: whether `quantize_dots` rounds its operands.
      terms: the number of int8 terms of each operand if `quantize_dots` splits them, else 0.
      reason, remedy: why it is not captured, and what to change; "" before that is known.
      blame: the op that ended the fact; None where it was the dot itself.
      joined: how many products one launch computes with it, itself included; 0 without others.
      quantized: for each operand that the function quantises itself, "one call" or "as written".
      producers: for each such operand what its call computes beside the codes, or why there is no
        call; "" where nothing is to be said.
    """

    op: Op
    given: tuple[tuple[Value, Known], tuple[Value, Known]]
    scales: tuple[Factors, Factors] = ((), ())
    captured: Captured | None = None
    rounded: bool = False
    terms: int = 0
    reason: str = ""
    remedy: str = ""
    blame: Op | None = None
    joined: int = 0
    quantized: list[str] = dataclasses.field(default_factory=lambda: ["", ""])
    producers: list[str] = dataclasses.field(default_factory=lambda: ["", ""])

    @property
    def numbers(self) -> DimensionNumbers:
        """Contracting and batch axes of both operands; not for a convolution."""
        ragged = self.op.params.get("ragged_dot_dimension_numbers")
        if ragged is not None:
            return ragged.dot_dimension_numbers
        return self.op.params.get("dimension_numbers", _OF_SCALED_MATMUL)

    def contracting(self, index: int) -> Shape:
        """Contracting axes of an operand."""
        numbers: Any = self.numbers
        if isinstance(numbers, lax.ConvDimensionNumbers):
            (_, channel, *_), (_, *summed) = numbers.lhs_spec, numbers.rhs_spec
            return ((channel,), tuple(sorted(summed)))[index]
        return tuple(map(int, numbers[0][index]))

    @property
    def precision(self) -> str:
        """`default` or `highest`."""
        return _precision.asked(self.op.params.get("precision"))

    @property
    def changed(self) -> bool:
        """Whether the dot became another one."""
        return self.rounded or self.terms > 0 or self.captured is not None

    @property
    def concerned(self) -> bool:
        """Whether 8-bit data ever reached one of the operands, and neither is empty."""
        is_empty = any(value.size == 0 for value, _ in self.given)
        return not is_empty and any(fact is not None for _, fact in self.given)

    def miss(self, reason: str, remedy: str, blame: Op | None = None) -> None:
        """Record why this dot stays as it is."""
        self.reason, self.remedy, self.blame = reason, remedy, blame
