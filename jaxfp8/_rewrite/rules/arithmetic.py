"""Arithmetic on facts: conversions, scales and zero points.

A rule takes the walk and an op, and returns the fact about the op's output: None where it knows
none, `Lost` where 8-bit data was under the op and a better-known operation would have kept it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.facts import Fact, Factor, Factors, Lost, Product, Scaled, Scales, each
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.rules import epilogue, whole
from jaxfp8._value import dtypes

Rule = Callable[["Context", Op], Fact | None]
RULES: dict[str, Rule] = {}

SAME = ("copy", "copy_p", "name", "stop_gradient")
STAYS_WIDE = "the product needs the dequantised values themselves, so this dot stays wide"
BEFORE = "apply it to the 8-bit array and to the scales, before dequantising"
# Where they bind, the product needs the bounded values; where they cannot, nothing is lost.
_BOUNDS = ("max", "min", "clamp")
_UNBOUND = f"drop it if it never binds; else {STAYS_WIDE.replace('dequantised', 'bounded')}"
_MOVES = ("gather", "slice", "dynamic_slice", "split", "rev", "reshape", "transpose", "squeeze")


def remedy_for(name: str) -> str:
    """What to do about a primitive that no rule takes on dequantised values."""
    if name in _BOUNDS:
        return _UNBOUND
    if name in _MOVES:
        return BEFORE
    return (
        f"the product needs what `{name}` makes of them, so this dot stays wide; for an 8-bit "
        "product, quantise that (`jaxfp8.quantize`)"
    )


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def lost(op: Op, reason: str, remedy: str = STAYS_WIDE) -> Lost:
    """The fact ended at `op`, for `reason`."""
    return Lost(op.eqn, f"`{op.name}` {reason}", remedy, op.callers)


def is_wide_float(value: Value) -> bool:
    """Whether the value is float32, bfloat16 or float16."""
    return value.dtype in dtypes.WIDE_FLOAT


@rule("convert_element_type")
def convert(walk: Context, op: Op) -> Fact | None:
    """8-bit to float or int32, and between floats: the rounding of dequantised data is dropped."""
    source, out = op.inputs[0], op.outputs[0]
    product = walk.product(source)
    if product is not None and source.dtype not in dtypes.EIGHT_BIT:
        return epilogue.convert(product, op)
    if source.dtype in dtypes.UNSERVED_FLOAT8 and is_wide_float(out):
        return lost(op, f"from {source.dtype} is from a dtype that no kernel has", _SERVED)
    if (scaled := walk.scaled(source)) is not None:
        return _convert_scaled(scaled, op, source, out)
    scales = walk.fact(source)
    if not (isinstance(scales, Scales) and is_wide_float(out)):
        return None
    if is_wide_float(source):
        return Scales(_rounded(op, [scales.factors]) or scales.factors)
    decoded = each(op, [scales.factors]) if source.dtype == dtypes.E8M0 else None
    return None if decoded is None else Scales(decoded)


def _convert_scaled(scaled: Scaled, op: Op, source: Value, out: Value) -> Fact | None:
    if is_wide_float(out):
        return scaled
    if source.dtype == out.dtype:
        return scaled
    if source.dtype in dtypes.INT8 and out.dtype in (np.int16, np.int32):
        return scaled
    if source.dtype == np.int16 and out.dtype == np.int32:
        return scaled
    if out.dtype in dtypes.EIGHT_BIT and source.dtype not in dtypes.EIGHT_BIT:
        return None  # quantised anew: a fact of its own begins
    what = f"from {source.dtype} to {out.dtype}"
    if out.dtype.name in _WIDER and (out.dtype.kind in "fc" or source.dtype.kind in "iu"):
        return lost(op, f"{what} is to a dtype that no kernel has", f"use {_WIDER[out.dtype.name]}")
    remedy = (
        "keep them in float32, or quantise them to 8 bit" if is_wide_float(source) else STAYS_WIDE
    )
    return lost(op, f"{what} changes the values", remedy)


_SERVED = (
    "store the values in float8_e4m3fn or float8_e5m2, with scales that keep them in their range "
    "(`jaxfp8.quantize`)"
)
# Dtypes that lose nothing, and what to use in their place.
_WIDER = {"int64": "int32", "float64": "float32", "complex64": "float32", "complex128": "float32"}


@rule("reduce_precision")
def coarsen(walk: Context, op: Op) -> Fact | None:
    """Rounding of dequantised values to a float type, as by a conversion there and back."""
    scaled = walk.dequantised(op.inputs[0])
    exponent, mantissa = op.params["exponent_bits"], op.params["mantissa_bits"]
    is_float = (exponent >= 8 and mantissa >= 7) or (exponent >= 5 and mantissa >= 10)
    return scaled if is_float else None


@rule("bitcast_convert_type")
def bitcast(walk: Context, op: Op) -> Fact | None:
    """FP8 kept as uint8 bit patterns: the same bytes under another dtype."""
    source, out = op.inputs[0], op.outputs[0]
    scaled = walk.scaled(source)
    if scaled is None or out.dtype not in dtypes.EIGHT_BIT:
        return None
    if source.dtype not in dtypes.EIGHT_BIT:
        return None
    return Scaled(casts.bitcast(scaled.q, dtypes.storage(out.dtype)), out.dtype, origin=out)


@rule("mul")
def multiply(walk: Context, op: Op) -> Fact | None:
    """A scale multiplied in: onto a product, a dequantised value, or another scale."""
    for main, other in (op.inputs, op.inputs[::-1]):
        if (product := walk.product(main)) is not None:
            return epilogue.scale(product, op, walk.factors(other))
    return _scale(walk, op, invert=False)


@rule("div")
def divide(walk: Context, op: Op) -> Fact | None:
    """A scale divided by: its reciprocal, taken once on the small array in float32."""
    main, other = op.inputs
    if (product := walk.product(main)) is not None:
        return epilogue.scale(product, op, inverse(walk.factors(other)))
    return _scale(walk, op, invert=True)


def inverse(factors: Factors) -> Factors:
    """One over each factor, in float32."""
    return tuple(
        f.map_small(lambda s: graph.reciprocal(casts.cast(s, np.float32))) for f in factors
    )


def _scale(walk: Context, op: Op, *, invert: bool) -> Fact | None:
    out = op.outputs[0]
    if not is_wide_float(out):
        return _integer_scale(walk, op)
    pairs = [op.inputs] if invert else [op.inputs, op.inputs[::-1]]
    for main, other in sorted(pairs, key=lambda p: -p[0].size):
        scaled = walk.dequantised(main)
        if scaled is None:
            continue
        factors = walk.factors(other)
        if not _fits(main, factors, out):
            return _stretches_too_far(op, main)
        factors = tuple(f.at(out.shape) for f in factors)
        return scaled.stretched(out.shape).scaled(inverse(factors) if invert else factors)
    if any(isinstance(walk.fact(v), Scales) for v in op.inputs) or _stretches(op):
        left, right = (tuple(f.at(out.shape) for f in walk.factors(v)) for v in op.inputs)
        if (rounded := _rounded(op, [left, right])) is not None:
            return Scales(rounded)
        return Scales(left + (inverse(right) if invert else right))
    return None


def _fits(main: Value, factors: Factors, out: Value) -> bool:
    """Whether dequantised values are as large as what becomes of them, or its scales are smaller.

    Those that vmap takes as one for many scales are: so many copies of 8-bit data are less than
    of wide values. What is one number for each of the others' is a scale of those.
    """
    return main.shape == out.shape or all(f.small.size < out.size for f in factors)


def _stretches_too_far(op: Op, main: Value) -> Lost:
    sizes = f"{list(main.shape)} to {list(op.outputs[0].shape)}"
    return lost(op, f"stretches {sizes}, with a number for each element", BEFORE)


def _rounded(op: Op, inputs: Sequence[Factors]) -> Factors | None:
    """What `op` makes of scales in 16 bits, rounded as it says: 8-bit data may suit just those.

    None in float32, and where none of the factors has tiles as fine as those of all.
    """
    is_narrow = any(v.dtype in dtypes.FLOAT16 for v in (*op.inputs, *op.outputs))
    return each(op, inputs) if is_narrow else None


def _integer_scale(walk: Context, op: Op) -> Fact | None:
    if any(walk.dequantised(v) is not None for v in op.inputs):
        return lost(op, f"in {op.outputs[0].dtype} may wrap", "convert to float32 first")
    return None


def _stretches(op: Op) -> bool:
    """Whether the op broadcasts an axis of size 1 of a non-scalar input."""
    return any(v.shape != op.outputs[0].shape and v.shape for v in op.inputs)


@rule("neg")
def negative(walk: Context, op: Op) -> Fact | None:
    """A factor of -1."""
    source, out = op.inputs[0], op.outputs[0]
    minus = (Factor(graph.literal(-1.0, np.float32), ()).at(out.shape),)
    if (product := walk.product(source)) is not None:
        return epilogue.scale(product, op, minus)
    if not is_wide_float(out):
        return _integer_scale(walk, op)
    if (scaled := walk.dequantised(source)) is not None:
        return scaled.scaled(minus)
    fact = walk.fact(source)
    return Scales(fact.factors + minus) if isinstance(fact, Scales) else None


def both_ways(op: Op) -> list[tuple[Value, Value, bool]]:
    """The two inputs of an op, and the two the other way round."""
    left, right = op.inputs
    return [(left, right, False), (right, left, True)]


@rule("add", "sub", "add_any")
def add(walk: Context, op: Op) -> Fact | None:
    """A bias or residual onto a product, or a zero point from 8-bit integers."""
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
        scaled = walk.dequantised(main)
        if scaled is not None:
            if subtract and flipped:
                return lost(op, "takes dequantised values from others", _APART_LEFT)
            return _zero_point(walk, scaled, op, main, other, subtract)
    return None


def _straight_through(walk: Context, op: Op) -> Scaled | None:
    """`w + (q - w)` or `(w - w) + q`, as an estimator of gradients writes `q`."""
    for value, other, _ in both_ways(op):
        difference = graph.producer(_unnamed(other), "sub")
        if difference is None:
            continue
        left, right = map(_unnamed, difference.inputs)
        fact = walk.dequantised(left) if right is _unnamed(value) else None
        if left is right:
            fact = walk.dequantised(value)
        if fact is not None:
            return fact
    return None


def _unnamed(value: Value) -> Value:
    """The value before operations that do nothing to it."""
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
    """`q - z` with integer `z`: a zero point, unless something came before it."""
    out, factors = op.outputs[0], walk.factors(other)
    beside = _APART if subtract else _TOGETHER
    if scaled.dtype not in dtypes.INT8:
        return lost(op, f"shifts {scaled.dtype} values, which have no zero point", beside)
    if scaled.factors or scaled.zero_point is not None:
        is_matrix = any(factor.small.size == main.size for factor in factors)
        remedy = beside if is_matrix else _SHIFT_FIRST
        return lost(op, "shifts values that are already scaled or shifted", remedy)
    if not _fits(main, factors, out):
        return _stretches_too_far(op, main)
    scaled = scaled.stretched(out.shape)
    if len(factors) != 1 or other.dtype.kind not in "iufV":
        return lost(op, "shifts by a product of scales", "subtract a zero point of its own")
    factor, known = factors[0].at(out.shape), whole.bounds(other)
    if out.dtype == np.int16 and not known.within(2**14):
        return lost(op, "in int16 may wrap", "subtract in int32")
    small, is_sure = factor.small, known.within(_MOST_ZERO)
    if not is_sure and (known.nan or not known.whole or graph.number(other) is not None):
        return lost(
            op,
            "shifts by values that are not known to be whole numbers of 16 bits at most",
            "keep zero points in an integer dtype and convert them where they are used",
        )
    guards = () if is_sure else (_is_small(small),)
    scales = (factor.map_small(_one_or_nan),) if known.nan else ()
    if known.nan:
        small = graph.derived("nan_to_num", _without_nan, [small], small.shape, small.dtype)
    small = casts.cast(small, np.int32)
    zero = Factor(small if subtract else graph.negate(small), factor.tiles)
    return Scaled(scaled.q, scaled.dtype, zero, scales, scaled.origin, guards)


# Zero points of 16 bits: what a kernel may sum in int32 and in float32 without a loss.
_MOST_ZERO = 2**15


def _without_nan(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)


def _one_or_nan(small: Value) -> Value:
    """A scale that makes NaN what a zero point of NaN would."""

    def run(x: Any) -> Any:
        return jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), jnp.float32(1.0))

    return graph.derived("one_or_nan", run, [small], small.shape, np.float32)


def _is_small(small: Value) -> Value:
    """Whether every entry has 16 bits at most, as the program runs."""

    def run(x: Any) -> Any:
        return jnp.all((x > -_MOST_ZERO) & (x < _MOST_ZERO))

    return graph.derived("is_small", run, [small], (), np.bool_)


@rule("max", "min", "clamp", "round")
def bound(walk: Context, op: Op) -> Fact | None:
    """Part of a quantised output: clip to the range of the dtype, round to whole numbers."""
    source = op.inputs[1] if op.name == "clamp" else op.inputs[0]
    if op.name in ("max", "min") and walk.product(source) is None:
        source = op.inputs[1]
    product = walk.product(source)
    return epilogue.bound(product, op, source) if product is not None else None


@rule("sharding_constraint")
def constrained(walk: Context, op: Op) -> Fact | None:
    """A layout asked of dequantised values, which no longer exist; of a product it stays."""
    fact = walk.dequantised(op.inputs[0]) or walk.fact(op.inputs[0])
    return fact if isinstance(fact, Scaled | Scales) else None


@rule("abs")
def magnitude(walk: Context, op: Op) -> Fact | None:
    """The start of an amax."""
    product = walk.product(op.inputs[0])
    return epilogue.magnitude(product) if product is not None else None


@rule("reduce_max")
def largest(walk: Context, op: Op) -> Fact | None:
    """The end of an amax."""
    return epilogue.amax(walk.fact(op.inputs[0]), op)


@rule(*SAME)
def same(walk: Context, op: Op) -> Fact | None:
    """The value as it is."""
    source = op.inputs[0]
    if (product := walk.product(source)) is not None:
        return epilogue.same(product, op)
    fact = walk.scaled(source) or walk.fact(source)
    return fact if isinstance(fact, Scaled | Scales) else None
