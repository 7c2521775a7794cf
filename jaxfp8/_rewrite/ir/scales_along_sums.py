"""Moves scales along the sum from 8-bit data into the other operand.

    sum_k x[m, k] (q[k, n] s[k])  =  sum_k (x[m, k] s[k]) q[k, n]

With such a scale a kernel multiplies each value as it decodes, and sums in float32. Multiplied into
x beforehand, the scale costs the kernel nothing. An example is a cache of values with a scale for
each token.

This needs bfloat16 for x and for the scaled values: the function rounds `q s`, and the rewrite
rounds `x s` in its place. A rounding of x just before is left out. Float16 stays as it is, because
`x s` might leave its range. Float32 stays too, because its sums get no faster. bfloat16 has the
range of float32. If `x s` leaves that range and `q s` does not, the result is infinite, NaN or 0,
although the function's is finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, combine, full_tiles, refine
from jaxfp8._rewrite.ir.granularity import SHORT
from jaxfp8._rewrite.ir.graph import Array, Value
from jaxfp8._rewrite.ir.sides import ScaledSide, across
from jaxfp8._value import compat, dtypes


def multiplied_in(
    giver: ScaledSide, taker: ScaledSide, is_plain: Callable[[Value], bool]
) -> tuple[ScaledSide, ScaledSide]:
    """The sides, with the scales along the sum multiplied into `taker`, if all of them can be.

    `giver` is 8-bit data whose scaled values the function rounds to bfloat16, `taker` a float
    operand. `is_plain` tells whether the rewrite cannot replace a value.
    """
    moving = tuple(f for f in giver.factors if _changes(f, giver))
    own = tuple(f for f in taker.factors if _changes(f, taker))
    if taker.dtype != dtypes.BFLOAT16 or not moving + own or not _may_move(moving, giver):
        return giver, taker
    moved = own + tuple(across(f, giver, taker) for f in moving)
    return (
        dataclasses.replace(giver, factors=_without(giver.factors, moving)),
        dataclasses.replace(
            taker,
            value=_times(taker.value, moved, is_plain),
            factors=_without(taker.factors, own),
            multiplied=True,
        ),
    )


def _changes(factor: Factor, side: ScaledSide) -> bool:
    """Whether a factor changes along the sum in blocks shorter than `SHORT`."""
    varying = [axis for axis in factor.varying() if axis in side.contracting]
    return any(factor.tiles[axis] < SHORT for axis in varying)


def _may_move(moving: Factors, giver: ScaledSide) -> bool:
    """Whether moving leaves nothing along the sum, and `moving` is constant along free axes."""
    if giver.zero_point is not None and _changes(giver.zero_point, giver):
        return False
    shared = {*giver.contracting, *giver.batch}
    return all(set(factor.varying()) <= shared for factor in moving)


def _without(factors: Factors, gone: Factors) -> Factors:
    return tuple(f for f in factors if f not in gone)


def _times(value: Value, factors: Factors, is_plain: Callable[[Value], bool]) -> Value:
    """A bfloat16 array times factors, rounded once."""
    shape = value.shape
    total = combine(factors, shape)
    each = tuple(
        1 if axis in total.varying() else full for axis, full in enumerate(full_tiles(shape))
    )
    source = casts.undo_rounding(value)
    wide = casts.cast(source if is_plain(source) else value, "float32")
    inputs = [wide, refine(total, shape, each)]
    return casts.cast(graph.derived("mul", _multiply, inputs, shape, wide.dtype), value.dtype)


def _multiply(x: Array, scales: Array) -> Array:
    return x * compat.laid_along(scales, x)
