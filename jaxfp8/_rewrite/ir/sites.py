"""The dots of a function, as the report lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax import lax

from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._rewrite.ir import precision as _precision
from jaxfp8._rewrite.ir.factors import Factors
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Known
from jaxfp8._rewrite.ir.sides import ScaledSide
from jaxfp8._value.spec import ScaledDotSpec, Shape

# ((contracting axes of lhs, of rhs), (batch axes of lhs, of rhs)), as `dot_general` has them.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
# `jax.nn.scaled_matmul` takes [B, M, K] and [B, N, K], but no parameter says so.
_OF_SCALED_MATMUL: DimensionNumbers = (((2,), (2,)), ((0,), (0,)))
RAGGED_DOT = "ragged_dot_general"
# What became of both products of attention. The lowering alone knows of an export, and of the
# `in_shardings` of a jit.
IN_ONE_CALL = (
    "one call with the softmax between them, `jaxfp8_attention`; two products in an export and on "
    "automatic axes of a mesh"
)


@dataclasses.dataclass(eq=False)
class Seen:
    """The dots of a function, regions included."""

    # The dots reached by 8-bit data, in order.
    sites: list[DotSite] = dataclasses.field(default_factory=list)
    others: int = 0  # the number of all other dots
    # The scaled dots already in the function.
    calls: list[Op] = dataclasses.field(default_factory=list)
    # Gathers, slices and stacks of FP8 arrays done on bytes instead.
    picks: set[Op] = dataclasses.field(default_factory=set)
    # Encodings fused into one call with their operand's producer. The first of each call has the
    # name of the producer and the number of encodings.
    encoded: dict[Op, tuple[str, int]] = dataclasses.field(default_factory=dict)
    # The second products of attention over a float cache, now one call with the softmax and the
    # first product. Each has the dtype and the shape of the keys.
    attended: dict[Op, tuple[np.dtype, Shape]] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of dots and of other changes, as `changed_since` takes them."""
        return len(self.sites), len(self.picks) + len(self.encoded) + len(self.attended)

    @property
    def is_captured(self) -> bool:
        """Whether any dot was changed."""
        return any(site.changed for site in self.sites)

    def changed_since(self, size: tuple[int, int] = (0, 0)) -> bool:
        """Whether anything added since another `size` was changed."""
        sites, others = size
        return any(site.changed for site in self.sites[sites:]) or self.size[1] > others

    def see(self, site: DotSite) -> None:
        """Note a dot, or only count it if no 8-bit data reaches it."""
        if site.concerned:
            self.sites.append(site)
        else:
            self.others += 1


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """The scaled dot, or the ragged one, in place of a dot."""

    spec: ScaledDotSpec | RaggedSpec  # the problem, as it is computed
    # The same with its operands as they are stored; another one only in int8.
    stored: ScaledDotSpec | RaggedSpec
    # The operands as the function has them, in its order of axes.
    sides: tuple[ScaledSide, ScaledSide]
    compute: str | None = None  # "int8" if the product rounds operands to int8, else None


@dataclasses.dataclass(eq=False)
class DotSite:
    """One dot of the function, and the findings about it."""

    op: Op  # the dot as the function has it
    # The two operands as the dot has them, each with the fact about its data.
    given: tuple[tuple[Value, Known], tuple[Value, Known]]
    # For each operand, its scales given by the dot itself. A fact about the operand contains them.
    scales: tuple[Factors, Factors] = ((), ())
    # The scaled dot in its place, set when the program is resolved.
    captured: Captured | None = None
    rounded: bool = False  # whether `quantize_dots` rounds its operands
    # The number of int8 terms of each operand if `quantize_dots` splits them, else 0.
    terms: int = 0
    # reason, remedy: why it is not captured, and the change to make; "" before that is known.
    reason: str = ""
    remedy: str = ""
    blame: Op | None = None  # the op that ended the fact; None if it was the dot itself
    joined: int = 0  # the number of products in its launch, itself included; 0 without others
    multiplied: bool = False  # whether its launch multiplies two outputs
    attention: str = ""  # of a product beside a softmax, what became of both; "" for any other
    # "one call" or "as written" for each operand quantized by the function.
    quantized: list[str] = dataclasses.field(default_factory=lambda: ["", ""])
    # For each such operand the other results of its call, or why there is no call; "" if there is
    # nothing to say.
    producers: list[str] = dataclasses.field(default_factory=lambda: ["", ""])

    @property
    def numbers(self) -> DimensionNumbers:
        """Contracting and batch axes of both operands; not for a convolution."""
        ragged = self.op.params.get("ragged_dot_dimension_numbers")
        if ragged is not None:
            return ragged.dot_dimension_numbers
        return self.op.params.get("dimension_numbers", _OF_SCALED_MATMUL)

    @property
    def grouping(self) -> Literal["", "rows", "contracted"]:
        """The axis divided into groups, as in `RaggedSpec`; "" for a plain dot.

        With groups of batch entries it is the plain dot: every entry has its own matrix, and JAX
        ignores the sizes.
        """
        ragged = self.op.params.get("ragged_dot_dimension_numbers")
        if ragged is None:
            return ""
        (contracting, _), (batch, _) = ragged.dot_dimension_numbers
        divided = set(ragged.lhs_ragged_dimensions)
        if divided <= set(batch) and self.op.params["group_offset"] is None:
            return ""
        return "contracted" if divided <= set(contracting) else "rows"

    def contracting(self, index: int) -> Shape:
        """Contracting axes of an operand."""
        numbers: Any = self.numbers
        if isinstance(numbers, lax.ConvDimensionNumbers):
            (_, channel, *_), (_, *summed) = numbers.lhs_spec, numbers.rhs_spec
            return ((channel,), tuple(sorted(summed)))[index]
        return tuple(map(int, numbers[0][index]))

    def axes(self, index: int) -> tuple[Shape, Shape]:
        """Contracting and batch axes of an operand; not for a convolution.

        An axis of groups counts as a batch axis.
        """
        contracting, batch = (tuple(map(int, axes[index])) for axes in self.numbers)
        ragged = self.op.params.get("ragged_dot_dimension_numbers")
        groups = () if ragged is None or index == 0 else ragged.rhs_group_dimensions
        return contracting, (*batch, *map(int, groups))

    @property
    def precision(self) -> str:
        """`default` or `highest`."""
        return _precision.asked(self.op.params.get("precision"))

    @property
    def changed(self) -> bool:
        """Whether the rewrite changed the dot."""
        return self.rounded or self.terms > 0 or self.captured is not None

    @property
    def concerned(self) -> bool:
        """Whether 8-bit data reached one of the operands, and neither is empty."""
        is_empty = any(value.size == 0 for value, _ in self.given)
        return not is_empty and any(fact is not None for _, fact in self.given)

    def miss(self, reason: str, remedy: str, blame: Op | None = None) -> None:
        """Record the reason to keep this dot."""
        self.reason, self.remedy, self.blame = reason, remedy, blame
