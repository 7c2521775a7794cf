"""The walk of a program as rules see it."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from jaxfp8._call.library import targets
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.factors import Factors, factor_of
from jaxfp8._rewrite.ir.facts import Fact, Product
from jaxfp8._rewrite.ir.graph import Callers, Jaxpr, Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales, storage_bytes
from jaxfp8._rewrite.ir.sites import DotSite, Seen
from jaxfp8._value import dtypes


class Context(abc.ABC):
    """The facts, dots and effects of one program (a function, or the body of a region).

    Attributes:
      facts: the fact about each value.
      seen: the dots seen so far, shared with the walks of regions.
      own: the dots of this walk, without those of regions inside it.
      effects: ops that must run even if nobody reads their outputs.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self.facts: dict[Value, Fact] = {}
        self.seen = Seen() if seen is None else seen
        self.own: list[DotSite] = []
        self.effects: list[Op] = []
        self._implicit: dict[Value, Scaled] = {}

    @property
    def picks_bytes(self) -> bool:
        """Whether parts of FP8 arrays are picked as bytes: XLA on the CPU does it in float16."""
        return targets.platform() == "cpu"

    def fact(self, value: Value) -> Fact | None:
        """The fact about a value."""
        return self.facts.get(value)

    def product(self, value: Value) -> Product | None:
        """The fact about a value, if it is a product."""
        fact = self.facts.get(value)
        return fact if isinstance(fact, Product) else None

    def scaled(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value; an 8-bit array is its own."""
        fact = self.facts.get(value)
        if isinstance(fact, Scaled):
            return fact
        if value.dtype not in dtypes.EIGHT_BIT or value.literal is not None:
            return None
        if value not in self._implicit:
            self._implicit[value] = Scaled(storage_bytes(value), value.dtype, origin=value)
        return self._implicit[value]

    def dequantized(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value of a wider dtype."""
        fact = self.facts.get(value)
        wide = value.dtype not in dtypes.EIGHT_BIT
        return fact if wide and isinstance(fact, Scaled) else None

    def data(self, value: Value) -> Scaled | Scales | None:
        """The 8-bit data or the scales behind a value."""
        fact = self.scaled(value) or self.facts.get(value)
        return fact if isinstance(fact, Scaled | Scales) else None

    def lost(self, value: Value) -> Lost | None:
        """The op that ended the 8-bit fact behind a value, if any did."""
        fact = self.facts.get(value)
        return fact if isinstance(fact, Lost) else None

    def factors(self, value: Value) -> Factors:
        """The value as a product of factors; an unknown value is its own factor."""
        fact = self.facts.get(value)
        return fact.factors if isinstance(fact, Scales) else (factor_of(value),)

    def see(self, site: DotSite) -> None:
        """Note a dot, or count it if it has nothing to do with 8-bit data."""
        self.seen.see(site)
        if site.concerned:
            self.own.append(site)

    def note(self, op: Op) -> None:
        """Note that there is a new op; those with effects must run."""
        if op.effectful:
            self.effects.append(op)

    @abc.abstractmethod
    def nested(self) -> Context:
        """The context of the inside of a region."""

    @abc.abstractmethod
    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], callers: Callers = ()
    ) -> list[Value]:
        """Walk an open jaxpr on given values, and return its outputs."""

    @abc.abstractmethod
    def settle(self, outputs: Sequence[Value], inputs: Sequence[Value]) -> Program:
        """Choose the dots to replace by calls, and order the remaining ops."""
