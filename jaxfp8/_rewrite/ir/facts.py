"""Facts about values computed by a scaled dot and its epilogue."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxfp8._rewrite.ir.factors import Factor, Factors
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales
from jaxfp8._rewrite.ir.sides import Side, grows_too_fine
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.ir.steps import Step
from jaxfp8._value.spec import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledDot:
    """A candidate for a scaled dot: its site and its two sides."""

    site: DotSite
    lhs: Side
    rhs: Side

    @property
    def out(self) -> Value:
        """The output of the dot."""
        return self.site.op.outputs[0]

    @property
    def out_shape(self) -> Shape:
        """The shape of the output of the dot."""
        return self.out.shape

    def side_of(self, factor: Factor) -> Literal["lhs", "rhs"] | None:
        """The side with all varying axes of an output factor; None if neither has them."""
        varying = set(factor.varying())
        if varying <= set(self.rhs.output):
            return "rhs"
        return "lhs" if varying <= set(self.lhs.output) else None

    def side_of_numbers(self, lhs: Factors, rhs: Factors) -> Literal["lhs", "rhs"]:
        """The 8-bit side to give scalar scales to, next to scales `lhs` and `rhs`.

        The default is the right side. It is the left side if only the right one has a vector of
        scales: a vector times a number would be one more operation.
        """
        if self.lhs.scaled is None or self.rhs.scaled is None:
            return "lhs" if self.rhs.scaled is None else "rhs"
        left, right = (
            any(factor.varying() for factor in factors)
            for factors in (self.lhs.factors + lhs, self.rhs.factors + rhs)
        )
        return "lhs" if right and not left else "rhs"

    def too_fine(self, lhs: Factors, rhs: Factors) -> bool:
        """Whether further scales of the sides give either side a scale for each element."""
        return grows_too_fine(self.lhs, lhs) or grows_too_fine(self.rhs, rhs)


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """This value is the scaled dot `dot` followed by steps.

    Attributes:
      dot: the dot and its operands.
      value: the subject of this fact.
      parent: the product before the last step, or None at the dot itself.
      step: the last step.
      ready: whether a kernel can stop here. After a clip without its conversion it cannot.
    """

    dot: ScaledDot
    value: Value
    parent: Product | None = None
    step: Step | None = None
    ready: bool = True

    def ancestry(self) -> list[Product]:
        """This product and those before it, the dot itself last."""
        out: list[Product] = []
        product: Product | None = self
        while product is not None:
            out.append(product)
            product = product.parent
        return out

    def steps(self) -> list[Step]:
        """The steps from the dot to this value."""
        return [p.step for p in reversed(self.ancestry()) if p.step is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Magnitude:
    """This value is |product|, and may become its amax."""

    product: Product


@dataclasses.dataclass(frozen=True, eq=False)
class Amax:
    """This value is the largest |product|: `shape` is the dot's with 1 along the reduced axes."""

    product: Product
    value: Value
    shape: Shape


Fact = Scales | Scaled | Product | Magnitude | Amax | Lost
