"""The interface between a rule and the walk of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.factors import Factors
from jaxfp8._rewrite.ir.facts import Fact, Product
from jaxfp8._rewrite.ir.graph import Callers, Jaxpr, Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled
from jaxfp8._rewrite.ir.sites import DotSite, Seen
from jaxfp8._rewrite.ir.wholes import Whole


class Context(Protocol):
    """The walk of one program (a function, or the body of a region), as rules see it.

    Attributes:
      facts: the fact about each value.
      seen: the dots seen so far, including those in regions.
      wholes: inlined calls; an unchanged one stays one operation.
    """

    facts: dict[Value, Fact]
    seen: Seen
    wholes: list[Whole]

    @property
    def picks_bytes(self) -> bool:
        """Whether parts of FP8 arrays are picked as bytes: XLA on the CPU does it in float16."""

    def fact(self, value: Value) -> Fact | None:
        """The fact about a value."""

    def product(self, value: Value) -> Product | None:
        """The fact about a value, if it is a product."""

    def scaled(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value; an 8-bit array is its own."""

    def dequantised(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value of a wider dtype."""

    def lost(self, value: Value) -> Lost | None:
        """The op that ended the 8-bit fact behind a value, if any did."""

    def factors(self, value: Value) -> Factors:
        """The value as a product of factors; an unknown value is its own factor."""

    def see(self, site: DotSite) -> None:
        """Note a dot."""

    def note(self, op: Op) -> None:
        """Note a new op."""

    def nested(self) -> Context:
        """The context of the inside of a region."""

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], callers: Callers = ()
    ) -> list[Value]:
        """Walk an open jaxpr on given values, and return its outputs."""

    def settle(self, outputs: Sequence[Value], inputs: Sequence[Value]) -> Program:
        """Choose the dots to replace by calls, and order the remaining ops."""
