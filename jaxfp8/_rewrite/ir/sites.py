"""The dots of a function: rows of the report, and products where there is one."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8._rewrite.ir import precision as _precision
from jaxfp8._rewrite.ir.facts import Factor, Factors
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sides import grows_too_fine
from jaxfp8._value.spec import Shape

# Its operands are [B, M, K] and [B, N, K], and it has no parameter that says so.
_OF_SCALED_MATMUL = (((2,), (2,)), ((0,), (0,)))


@dataclasses.dataclass(eq=False)
class Seen:
    """The dots of a function, regions included.

    Attributes:
      sites: those that 8-bit data reached, in order.
      others: how many it never did.
      calls: the scaled dots among them as they stand, which are calls of a kernel already.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)
    others: int = 0
    calls: list[Op] = dataclasses.field(default_factory=list)

    def see(self, site: Site) -> None:
        """Note a dot, or count it if it has nothing to do with 8-bit data."""
        if site.concerned:
            self.sites.append(site)
        else:
            self.others += 1


@dataclasses.dataclass(eq=False)
class Site:
    """One dot of the function: a row of the report, and a product if one was found.

    Attributes:
      op: the dot as it stands.
      given: the two operands as the dot has them, each with its fact or None.
      scales: for each of them, what the dot itself scales it by; part of the fact, where one is.
      lhs, rhs: the sides of the product, once there is one.
      reason, remedy: why there is none; "" while there is one.
      blame: the equation that ended the fact and its callers, where another than the dot did.
      call: the scaled dot that it became, set when the program is resolved.
      quantized: of each operand that the function quantises itself, "one call" or "as written".
    """

    op: Op
    given: tuple[tuple[Value, Any], tuple[Value, Any]]
    scales: tuple[Factors, Factors] = ((), ())
    lhs: Any = None
    rhs: Any = None
    reason: str = ""
    remedy: str = ""
    blame: Any = None
    call: Any = None
    quantized: list[str] = dataclasses.field(default_factory=lambda: ["", ""])

    @property
    def out(self) -> Value:
        """The output of the dot."""
        return self.op.outputs[0]

    @property
    def out_shape(self) -> Shape:
        """Shape of the output of the dot."""
        return self.op.outputs[0].shape

    @property
    def numbers(self) -> Any:
        """Contracting and batch axes of both operands, as `dot_general` has them."""
        return self.op.params.get("dimension_numbers", _OF_SCALED_MATMUL)

    def contracting(self, index: int) -> Shape:
        """Contracted axes of an operand; () of those that are no dots of two arrays."""
        numbers = self.numbers
        return tuple(map(int, numbers[0][index])) if type(numbers) is tuple else ()

    @property
    def precision(self) -> str:
        """`default` or `highest`."""
        return _precision.asked(self.op.params.get("precision"))

    @property
    def concerned(self) -> bool:
        """Whether 8-bit data was ever under one of the operands, and they are not empty."""
        is_empty = any(value.size == 0 for value, _ in self.given)
        return not is_empty and any(fact is not None for _, fact in self.given)

    def side_of(self, factor: Factor) -> str | None:
        """The side whose axes hold all along which an output factor varies; None if neither."""
        varying = set(factor.varying())
        if not varying:
            return "rhs" if self.rhs.scaled is not None else "lhs"
        for name, side in (("rhs", self.rhs), ("lhs", self.lhs)):
            if varying <= set(side.output):
                return name
        return None

    def too_fine(self, lhs: Factors, rhs: Factors) -> bool:
        """Whether further scales of the sides would make either as fine as its data."""
        return grows_too_fine(self.lhs, lhs) or grows_too_fine(self.rhs, rhs)

    def miss(self, reason: str, remedy: str, blame: Any = None) -> None:
        """Record why this dot stays as it is."""
        self.reason, self.remedy, self.blame = reason, remedy, blame
