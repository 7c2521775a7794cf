"""Sums: zero points of 8-bit integers, and biases and residuals of products."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, constants, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors
from jaxfp8._rewrite.ir.facts import Fact, Product
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled
from jaxfp8._rewrite.rules import epilogue, intervals
from jaxfp8._rewrite.rules.intervals import Range
from jaxfp8._rewrite.rules.registry import lost, rule
from jaxfp8._rewrite.rules.scales import broadcasts_too_far
from jaxfp8._rewrite.rules.views import SAME
from jaxfp8._value import dtypes


def both_ways(op: Op) -> list[tuple[Value, Value, bool]]:
    """The two inputs of an op in both orders, and whether they are swapped."""
    left, right = op.inputs
    return [(left, right, False), (right, left, True)]


@rule("add", "sub", "add_any")
def add(walk: Context, op: Op) -> Fact | None:
    """A bias or residual plus a product, or 8-bit integers minus a zero point."""
    subtract = op.name == "sub"
    for main, other, flipped in both_ways(op):
        if (product := walk.product(main)) is not None:
            sign = (-1 if subtract and flipped else 1, -1 if subtract and not flipped else 1)
            fact = epilogue.add(walk, product, op, other, sign)
            if isinstance(fact, Product):
                return fact
    if not subtract and (passed := _straight_through(walk, op)) is not None:
        return passed
    for main, other, flipped in both_ways(op):
        scaled = walk.dequantized(main)
        if scaled is not None:
            if subtract and flipped:
                return lost(op, "subtracts dequantized values from others", _APART_LEFT)
            return _zero_point(walk, scaled, op, main, other, subtract)
    return None


def _straight_through(walk: Context, op: Op) -> Scaled | None:
    """`w + (q - w)` or `(w - w) + q`: `q`, as a straight-through estimator writes it."""
    for value, other, _ in both_ways(op):
        difference = graph.producer(_unnamed(other), "sub")
        if difference is None:
            continue
        left, right = map(_unnamed, difference.inputs)
        fact = walk.dequantized(left) if right is _unnamed(value) else None
        if left is right:
            fact = walk.dequantized(value)
        if fact is not None:
            return fact
    return None


def _unnamed(value: Value) -> Value:
    """The value before renaming operations."""
    while value.op is not None and value.op.name in SAME:
        value = value.op.inputs[0]
    return value


# x @ (w - m) is x @ w - x @ m: the shift is a product of its own.
_APART = "subtract the product with what is subtracted: `x @ w - x @ m` for `x @ (w - m)`"
_TOGETHER = "add the product with what is added: `x @ w + x @ m` for `x @ (w + m)`"
_APART_LEFT = "subtract the product from that of the others: `x @ c - x @ w` for `x @ (c - w)`"
_SHIFT_FIRST = "subtract the zero point first, in integers: `(q - z) * scale`"


def _zero_point(
    walk: Context, scaled: Scaled, op: Op, main: Value, other: Value, subtract: bool
) -> Fact | None:
    """The fact about `q - z` or `q + z` for a zero point `z`."""
    factors = walk.factors(other)
    if (why := _not_first(scaled, op, main, factors, subtract)) is not None:
        return why
    if (why := broadcasts_too_far(op, main, factors)) is not None:
        return why
    scaled = scaled.stretched(op.outputs[0].shape)
    known = intervals.bounds(other)
    if (why := _not_whole(op, other, factors, known)) is not None:
        return why
    factor = factors[0].at(op.outputs[0].shape)
    guards: tuple[Value, ...] = ()
    if not known.within(_MOST_ZERO):
        guards = (graph.derived("is_small", _is_small, [factor.small], (), np.bool_),)
    return _shifted(scaled, factor, known.nan, guards, subtract)


def _not_first(
    scaled: Scaled, op: Op, main: Value, factors: Factors, subtract: bool
) -> Lost | None:
    """The loss if the data takes no zero point, or was scaled or shifted before."""
    beside = _APART if subtract else _TOGETHER
    if scaled.dtype not in dtypes.EIGHT_BIT_INTS:
        return lost(op, f"shifts {scaled.dtype} values, which have no zero point", beside)
    if scaled.factors or scaled.zero_point is not None:
        is_matrix = any(factor.small.size == main.size for factor in factors)
        remedy = beside if is_matrix else _SHIFT_FIRST
        return lost(op, "shifts values that are already scaled or shifted", remedy)
    return None


def _not_whole(op: Op, other: Value, factors: Factors, known: Range) -> Lost | None:
    """The loss if the array is not known to be one factor of whole 16-bit numbers."""
    if len(factors) != 1 or other.dtype.kind not in "iufV":
        return lost(op, "shifts by a product of scales", "subtract a zero point of its own")
    if op.outputs[0].dtype == np.int16 and not known.within(2**14):
        return lost(op, "in int16 may wrap", "subtract in int32")
    if known.within(_MOST_ZERO):
        return None
    if known.nan or not known.whole or constants.number(other) is not None:
        return lost(
            op,
            "shifts by values that are not known to be whole numbers of 16 bits at most",
            "keep zero points in an integer dtype and convert them where they are used",
        )
    return None


def _shifted(
    scaled: Scaled, factor: Factor, may_be_nan: bool, guards: tuple[Value, ...], subtract: bool
) -> Scaled:
    """8-bit data minus or plus a zero point; a NaN zero point becomes a NaN scale."""
    small = factor.small
    scales: Factors = ()
    if may_be_nan:
        nan = graph.derived("one_or_nan", _one_or_nan, [small], small.shape, np.float32)
        scales = (Factor(nan, factor.tiles),)
        small = graph.derived("nan_to_num", _without_nan, [small], small.shape, small.dtype)
    small = casts.cast(small, np.int32)
    zero = Factor(small if subtract else graph.negate(small), factor.tiles)
    return Scaled(scaled.q, scaled.dtype, zero, scales, scaled.origin, guards)


# Kernels sum zero points of up to 16 bits exactly, in int32 and in float32.
_MOST_ZERO = 2**15


def _without_nan(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)


def _one_or_nan(x: Array) -> Array:
    """A scale: NaN for a NaN zero point, else 1."""
    return jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), jnp.float32(1.0))


def _is_small(x: Array) -> Array:
    """A guard: whether every entry has 16 bits at most."""
    return jnp.all((x > -_MOST_ZERO) & (x < _MOST_ZERO))
