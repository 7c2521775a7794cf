"""A product as the table of those left to XLA asks about it."""

from __future__ import annotations

import dataclasses
import math

from jaxfp8._call.gpu import asked
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

MANY = 64  # With more rows, XLA multiplies bfloat16 by AMX soon enough to pay for decoding.


@dataclasses.dataclass(frozen=True)
class Product:
    """A product, its kernel, and what is around it.

    Attributes:
      form: the problem, on a GPU in the form of its kernels.
      path: the kernel.
      in_integers: whether XLA's program multiplies integers, rather than floats made of them.
      shares_input: whether other products have the same floats.
    """

    form: ScaledDotSpec
    path: str
    in_integers: bool = False
    shares_input: bool = False

    @property
    def sides(self) -> tuple[OperandSpec, OperandSpec]:
        return self.form.lhs, self.form.rhs

    @property
    def codes(self) -> list[OperandSpec]:
        """The 8-bit sides."""
        return [side for side in self.sides if dtypes.is_eight_bit(side.dtype)]

    @property
    def wide(self) -> str:
        """The dtype beside 8-bit codes; "" for codes on both sides."""
        return next((s.dtype for s in self.sides if not dtypes.is_eight_bit(s.dtype)), "")

    @property
    def lines(self) -> list[int]:
        """Rows and columns. Rows are the wide side, else the side with fewer lines."""
        wide = [not dtypes.is_eight_bit(side.dtype) for side in self.sides]
        counts = [asked.lines(side) for side in self.sides]
        return counts[::-1] if wide[1] or (not wide[0] and counts[1] < counts[0]) else counts

    @property
    def rows(self) -> int:
        return self.lines[0]

    @property
    def stored(self) -> int:
        """The values of the larger 8-bit side."""
        return max(math.prod(side.shape) for side in self.codes)

    @property
    def depth(self) -> int:
        """The number of contracted values."""
        return self.form.lhs.depth

    @property
    def batches(self) -> int:
        return math.prod(self.form.lhs.sizes(self.form.lhs.batch))

    @property
    def shifted(self) -> bool:
        return any(side.zero_point for side in self.codes)

    @property
    def tile(self) -> int:
        """The least number of contracted values with one scale; 0 if all have one."""
        return min(map(_tile, filter(_varies, self.sides)), default=0)

    @property
    def tile_of_floats(self) -> int:
        """The same without scales that are exponents."""
        sides = (side for side in self.sides if not side.scale_exponents)
        return min(map(_tile, filter(_varies, sides)), default=0)

    @property
    def with_exponents(self) -> int:
        """How many sides have exponents for scales."""
        return sum(side.scale_exponents for side in self.sides)

    @property
    def may_join(self) -> bool:
        """Whether the product may share a launch, at less than the cost of a call of its own."""
        return self.shares_input and self.path == asked.WEIGHT_ONLY and self.rows <= MANY

    @property
    def in_lines(self) -> bool:
        """Whether the contracted axis of the side with more lines is its last, as in [N, K]."""
        weight = max(reversed(self.sides), key=asked.lines)
        return len(weight.shape) - 1 in weight.contracting


def _varies(side: OperandSpec) -> bool:
    return (side.scale or side.zero_point) and side.scale_varies


def _tile(side: OperandSpec) -> int:
    return math.prod(side.tiles[axis] for axis in side.contracting)
