"""The two products of attention: 16-bit rows by a cache.

A cache in 8 bits is read by a call of the plan. A cache in bfloat16 is read by a dot of the
function: no 8-bit data reaches it, so it is not in the report as a dot.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxfp8._call.ops import attention
from jaxfp8._rewrite.ir import graph, precision
from jaxfp8._rewrite.ir.graph import Equation, Jaxpr, Op, Value
from jaxfp8._rewrite.plan.softmax_rows import Labels, Reader, Term, Unread, varying
from jaxfp8._rewrite.rules.reach import remembered
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape, is_known

WIDTH = -1  # the label of the axis of a head


@dataclasses.dataclass(frozen=True, eq=False)
class CachedProduct:
    """A product that may read a cache.

    Attributes:
      op: the op in the program.
      spec: its problem.
      names: of its operands, in the order of the op's inputs.
      dot: the dot as the function has it.
    """

    op: Op
    spec: ScaledDotSpec
    names: tuple[str, ...]
    dot: Op

    @classmethod
    def of(cls, op: Op | None) -> CachedProduct | None:
        """An op as such a product, or None."""
        if op is None:
            return None
        if op.params.get("joins"):
            made = cls(op, op.params["spec"], op.params["names"], op.params["dot"])
            return made if made.caches else None
        return cls(op, _spec_of_floats(op), ("lhs", "rhs"), op) if _is_of_floats(op) else None

    @property
    def is_of_floats(self) -> bool:
        """Whether the function multiplies bfloat16 by bfloat16."""
        return self.op is self.dot

    @property
    def caches(self) -> tuple[str, ...]:
        """The sides that may be the cache. The other one is bfloat16 as it is."""
        return tuple(name for name in ("rhs", "lhs") if self._may_be_cache(name))

    def _may_be_cache(self, name: str) -> bool:
        side, rows = self.side(name), self.side(other(name))
        is_plain = rows.dtype == "bfloat16" and not rows.scale
        is_held = dtypes.is_eight_bit(side.dtype) and not side.zero_point
        return is_plain and (is_held or self.is_of_floats)

    def side(self, name: str) -> OperandSpec:
        """The side "lhs" or "rhs"."""
        return self.spec.lhs if name == "lhs" else self.spec.rhs

    def operand(self, name: str) -> Value | None:
        """The operand of a name, if it has one."""
        return dict(zip(self.names, self.op.inputs, strict=True)).get(name)

    def given(self, name: str) -> Value:
        """The operand of a name."""
        value = self.operand(name)
        assert value is not None, name
        return value


def other(name: str) -> str:
    """The other side."""
    return "lhs" if name == "rhs" else "rhs"


def _is_of_floats(op: Op) -> bool:
    """Whether an op is a product of two bfloat16 arrays as the function has it."""
    return (
        op.name == "dot_general"
        and all(value.dtype == dtypes.BFLOAT16 for value in op.inputs)
        and precision.why_not(op.params["precision"]) is None
        and compat.spec_of_output(op.equation) is None
    )


@remembered
def may_be_in(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr may hold attention of a decoding step over bfloat16, at any depth."""
    inside = list(graph.equations(jaxpr))
    has_softmax = any(eqn.primitive.name == "exp" for eqn in inside)
    return has_softmax and sum(map(_has_few_rows, inside)) > 1


def _has_few_rows(eqn: Equation) -> bool:
    """Whether an equation multiplies few rows of bfloat16 by bfloat16."""
    avals: Any = [atom.aval for atom in eqn.invars]
    if eqn.primitive.name != "dot_general" or any(x.dtype != dtypes.BFLOAT16 for x in avals):
        return False
    numbers = zip(*eqn.params["dimension_numbers"], strict=True)
    rows = (
        math.prod(n for axis, n in enumerate(x.shape) if axis not in (*contracting, *batch))
        for x, (contracting, batch) in zip(avals, numbers, strict=True)
    )
    return any(is_known((count,)) and count <= attention.MOST_ROWS for count in rows)


def _spec_of_floats(op: Op) -> ScaledDotSpec:
    numbers = zip(*op.params["dimension_numbers"], strict=True)
    lhs, rhs = (
        OperandSpec.unscaled(
            "bfloat16", value.shape, tuple(map(int, contracting)), tuple(map(int, batch))
        )
        for value, (contracting, batch) in zip(op.inputs, numbers, strict=True)
    )
    epilogue = EpilogueSpec(out_dtype=op.outputs[0].dtype.name)
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue)


@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """The cache of a product.

    Attributes:
      product: the product.
      name: the side.
      data: codes, or floats as they lie in memory.
      labels: of the axes of `data`; `WIDTH` for the axis of a head.
    """

    product: CachedProduct
    name: str
    data: Value
    labels: Labels

    @classmethod
    def of(cls, product: CachedProduct, name: str, labels: Labels, reader: Reader) -> Cache:
        """The cache of a product with labels for the axes of a side; raises `Unread`."""
        data = product.given(name)
        if product.is_of_floats:
            data, labels = reader.stored(data, labels)
        return cls(product, name, data, labels)

    @property
    def side(self) -> OperandSpec:
        """The side."""
        return self.product.side(self.name)

    @property
    def order(self) -> Shape:
        """The labels as they lie in memory."""
        return tuple(label for axis in self.labels for label in axis)

    def scale(self) -> Term | None:
        """Its scale, one for each entry of labelled axes or one for all."""
        value = self.product.operand(f"{self.name}_scale")
        if value is None:
            return None
        side = self.side
        if side.scale_exponents or any(
            1 < tile < size for tile, size in zip(side.tiles, side.shape, strict=True)
        ):
            raise Unread("the scales of the cache are exponents, or hold for blocks")
        return Term(value, varying(self.labels, value.shape), rounded=side.scale_rounded)
