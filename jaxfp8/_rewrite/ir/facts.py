"""Facts about values computed by a scaled dot and its epilogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxfp8._rewrite.ir.fused import FusedDot, ScaledDot
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales
from jaxfp8._value.spec import Shape

# Fuses a step into a dot; a sentence if it does not fit.
Step = Callable[[FusedDot], str | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """This value is the scaled dot `dot` followed by steps."""

    dot: ScaledDot  # the dot and its operands
    value: Value  # the subject of this fact
    parent: Product | None = None  # the product before the last step, or None at the dot itself
    step: Step | None = None  # the last step, as a method of `FusedDot` with its arguments
    views: tuple[Op, ...] = ()  # the transposes and reshapes among the steps
    # Whether a kernel can stop here. After a clip without its conversion it cannot.
    ready: bool = True

    def ancestry(self) -> list[Product]:
        """This product and those before it, the dot itself last."""
        out: list[Product] = []
        product: Product | None = self
        while product is not None:
            out.append(product)
            product = product.parent
        return out

    def fused(self, amax_of: Product | None = None) -> FusedDot | str:
        """The dot with all steps, or a sentence about the step that does not fit.

        After the step `amax_of` the call also gives the amax.
        """
        fused = FusedDot(self.dot, self.dot.out.dtype)
        for part in reversed(self.ancestry()):
            if part.step is not None and (reason := part.step(fused)) is not None:
                return reason
            if part is amax_of:
                fused.gives_amax = True
        return fused


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
