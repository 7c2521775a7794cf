"""The dot, plain or ragged: the conditions for a call, and the reason if one fails."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir import precision as _precision
from jaxfp8._rewrite.ir.facts import Product
from jaxfp8._rewrite.ir.fused import ScaledDot
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled
from jaxfp8._rewrite.ir.scales_along_sums import multiplied_in
from jaxfp8._rewrite.ir.sides import ScaledSide, peel, saves_nothing, shared
from jaxfp8._rewrite.ir.sites import RAGGED_DOT, DotSite
from jaxfp8._rewrite.rules import groups, masks
from jaxfp8._rewrite.rules.registry import rule
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

NAMES = ("dot_general", RAGGED_DOT)


@rule(*NAMES)
def dot_general(walk: Context, op: Op) -> Product | None:
    """A product, if an operand is dequantized 8-bit data and no objection applies."""
    lhs, rhs = [(value, walk.scaled(value) or walk.lost(value)) for value in op.inputs[:2]]
    return product_of(walk, DotSite(op, (lhs, rhs)))


def product_of(walk: Context, site: DotSite) -> Product | None:
    """The product of a dot; or None, with the reason in its site."""
    walk.see(site)
    if not site.concerned:
        return None
    dot = _lost(site) or groups.why_not(site) or _arranged(walk, site)
    if isinstance(dot, Lost):
        site.miss(dot.reason, dot.remedy, dot.op)
        return None
    return Product(dot, dot.out)


def _lost(site: DotSite) -> Lost | None:
    """The loss of 8-bit data, if neither operand is 8-bit data any more."""
    facts = [fact for _, fact in site.given]
    if any(isinstance(fact, Scaled) for fact in facts):
        return None
    return next(fact for fact in facts if isinstance(fact, Lost))


def _arranged(walk: Context, site: DotSite) -> ScaledDot | Lost:
    """The dot with its two sides: 8-bit data if that helps, else float values."""
    lhs, rhs = [_scaled_side(site, i) or _float_side(site, i) for i in (0, 1)]
    if lhs is None or rhs is None:
        value, _ = site.given[0 if lhs is None else 1]
        return Lost(
            None,
            f"the other operand is {value.dtype}, not 8-bit, float32, bfloat16 or float16",
            "convert it to float32 or bfloat16",
        )
    # A scale along the sum differs from group to group, and the other side has no groups.
    first, second = (lhs, rhs) if site.grouping else shared(lhs, rhs)
    lhs = _float_side(site, 0) if saves_nothing(first) else first
    rhs = _float_side(site, 1) if saves_nothing(second) else second
    if first.scaled is None and second.scaled is None:
        return Lost(
            None,
            "zeros were put over dequantized values whose scale is differentiated",
            "put the zeros over the 8-bit array, before dequantizing",
        )
    if lhs is None or rhs is None or (lhs.scaled is None and rhs.scaled is None):
        name, finest = ("left", first) if saves_nothing(first) else ("right", second)
        return Lost(
            None,
            f"the scale of the {name} operand, {finest.dtype}{list(finest.value.shape)}, varies "
            "with every element of it, or nearly",
            "scale by rows, columns or blocks; a scale for each element saves nothing",
        )
    sides = peel(lhs), peel(rhs)
    dot = ScaledDot(site, *(sides if site.grouping else _outside_sums(walk, site, *sides)))
    return _against(dot) or dot


def _outside_sums(
    walk: Context, site: DotSite, lhs: ScaledSide, rhs: ScaledSide
) -> tuple[ScaledSide, ScaledSide]:
    """The sides, with scales along the sum multiplied into a bfloat16 operand."""
    rounds = [value.dtype == dtypes.BFLOAT16 for value, _ in site.given]

    def is_plain(value: Value) -> bool:
        return walk.fact(value) is None

    if lhs.scaled is None and rhs.scaled is not None and rounds[1]:
        rhs, lhs = multiplied_in(rhs, lhs, is_plain)
    elif rhs.scaled is None and lhs.scaled is not None and rounds[0]:
        lhs, rhs = multiplied_in(lhs, rhs, is_plain)
    return lhs, rhs


def _scaled_side(site: DotSite, index: int) -> ScaledSide | None:
    """An operand as its 8-bit data, if it is any."""
    fact = site.given[index][1]
    if not isinstance(fact, Scaled):
        return None
    contracting, batch = site.axes(index)
    settled = masks.settle(fact.factors, fact.q.shape, contracting)
    return ScaledSide(
        fact.q,
        fact.dtype,
        contracting,
        batch,
        _output_axes(site, index),
        fact.zero_point,
        settled.scales,
        dataclasses.replace(fact, guards=fact.guards + settled.guards),
    )


def _float_side(site: DotSite, index: int) -> ScaledSide | None:
    """An operand as float values; None if it has another dtype."""
    value = site.given[index][0]
    if value.dtype not in dtypes.WIDE_FLOAT:
        return None
    source, (contracting, batch) = _exact_source(value), site.axes(index)
    output, factors = _output_axes(site, index), site.scales[index]
    return ScaledSide(source, source.dtype, contracting, batch, output, factors=factors)


def _output_axes(site: DotSite, index: int) -> Shape:
    """For each axis of an operand the axis of the output, or -1 for an axis that it lacks."""
    (contracting, batch) = site.numbers
    rank = len(site.op.inputs[index].shape)
    lhs_rank = len(site.op.inputs[0].shape)
    start = len(batch[0])
    if index == 1:
        start = lhs_rank - len(contracting[0])
    if site.grouping == "contracted":
        start += 1
    out = [-1] * rank
    for position, axis in enumerate(batch[index]):
        out[axis] = position
    taken = {axis for axes in site.axes(index) for axis in axes}
    free = [a for a in range(rank) if a not in taken]
    for position, axis in enumerate(free):
        out[axis] = start + position
    return tuple(out)


def _exact_source(value: Value) -> Value:
    """The 16-bit source of a converted float32 operand, with the same numbers."""
    op = graph.producer(value, "convert_element_type")
    if op is None or value.dtype != np.float32:
        return value
    source = op.inputs[0]
    return source if source.dtype in dtypes.WIDE_FLOAT else value


def _against(dot: ScaledDot) -> Lost | None:
    """Why a dot cannot be a scaled dot whatever its sides; None if it can."""
    out, params = dot.out, dot.site.op.params
    if (reason := _precision.why_not(params.get("precision"))) is not None:
        return Lost(None, reason, "use an algorithm that sums in float32, DEFAULT or HIGHEST")
    if out.dtype == dtypes.INT32:
        return _against_integers(dot)
    if out.dtype not in dtypes.WIDE_FLOAT + dtypes.FLOAT8:
        return Lost(
            None,
            f"the output dtype is {out.dtype}",
            "set preferred_element_type to float32, bfloat16 or int32",
        )
    return None


def _against_integers(dot: ScaledDot) -> Lost | None:
    """An int32 product needs 8-bit integers on both sides, and no scale before it."""
    for side in (dot.lhs, dot.rhs):
        if side.scaled is None or side.dtype not in dtypes.EIGHT_BIT_INTS or side.factors:
            return Lost(
                None,
                "the output is int32, but an operand is not 8-bit integers",
                "use int8 or uint8 operands",
            )
    return None
