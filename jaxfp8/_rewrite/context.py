"""What a rule may ask of a walk, and tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.facts import Fact, Factors, Lost, Product, Scaled
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Seen, Site


class Context(Protocol):
    """The walk of one program (a function, or the body of a region), as rules see it.

    Attributes:
      facts: what is known beside each value.
      seen: the dots seen so far, regions included.
    """

    facts: dict[Value, Fact]
    seen: Seen

    def fact(self, value: Value) -> Fact | None:
        """The fact beside a value."""

    def product(self, value: Value) -> Product | None:
        """The product that the value is."""

    def scaled(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value; an 8-bit array is its own."""

    def dequantised(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value of a wider dtype."""

    def lost(self, value: Value) -> Lost | None:
        """Where the value's 8-bit data was lost."""

    def factors(self, value: Value, shape: Any = None) -> Factors:
        """The value as a product of small arrays; at worst of itself."""

    def see(self, site: Site) -> None:
        """Note a dot."""

    def note(self, op: Op) -> None:
        """Note that there is a new op."""

    def nested(self) -> Context:
        """The context of the inside of a region."""

    def jaxpr(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        args: Sequence[Value],
        callers: tuple[Any, ...] = (),
    ) -> list[Value]:
        """Walk a jaxpr on given values and return its outputs."""

    def settle(self, outputs: Sequence[Value], inputs: list[Value]) -> Program:
        """Settle what is computed, and order it."""
