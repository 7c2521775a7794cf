"""Multiplication and division by scales, before a dot and after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, each
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scales
from jaxfp8._rewrite.rules import epilogue
from jaxfp8._rewrite.rules.registry import BEFORE, is_wide_float, lost, rule
from jaxfp8._value import dtypes


@rule("mul")
def multiply(walk: Context, op: Op) -> Fact | None:
    """A scale times a product, a dequantized value or another scale."""
    for main, other in (op.inputs, op.inputs[::-1]):
        if (product := walk.product(main)) is not None:
            return epilogue.scale(product, op, walk.factors(other))
    return _scale(walk, op, invert=False)


@rule("div")
def divide(walk: Context, op: Op) -> Fact | None:
    """A division by a scale: its reciprocal, taken once of the small array, in float32."""
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
    """The fact about a dequantized value or a scale times another scale, or divided by it."""
    out = op.outputs[0]
    if not is_wide_float(out):
        return _in_integers(walk, op)
    pairs = [op.inputs] if invert else [op.inputs, op.inputs[::-1]]
    for main, other in sorted(pairs, key=lambda p: -p[0].size):
        scaled = walk.dequantized(main)
        if scaled is None:
            continue
        factors = walk.factors(other)
        if (why := broadcasts_too_far(op, main, factors)) is not None:
            return why
        factors = tuple(f.at(out.shape) for f in factors)
        return scaled.stretched(out.shape).scaled(inverse(factors) if invert else factors)
    broadcasts = any(v.shape not in (out.shape, ()) for v in op.inputs)
    if broadcasts or any(isinstance(walk.fact(v), Scales) for v in op.inputs):
        left, right = (tuple(f.at(out.shape) for f in walk.factors(v)) for v in op.inputs)
        if (rounded := rounded_as_written(op, [left, right])) is not None:
            return Scales(rounded)
        return Scales(left + (inverse(right) if invert else right))
    return None


def broadcasts_too_far(op: Op, main: Value, factors: Factors) -> Lost | None:
    """The loss if a broadcast of dequantized values has a scale for each element; else None.

    A broadcast by coarser scales is no loss, as under vmap: one 8-bit array meets many scales. The
    8-bit array is copied for each scale, in less memory than wide values would take.
    """
    out = op.outputs[0]
    if main.shape == out.shape or all(f.small.size < out.size for f in factors):
        return None
    sizes = f"{list(main.shape)} to {list(out.shape)}"
    return lost(op, f"broadcasts {sizes}, with a number for each element", BEFORE)


def rounded_as_written(op: Op, inputs: Sequence[Factors]) -> Factors | None:
    """The result of `op` on 16-bit scales, with the rounding of `op`.

    The 8-bit data may have been made with the rounded scale. None if the op is in float32, or if no
    factor has tiles as fine as the result's.
    """
    is_narrow = any(v.dtype in dtypes.SIXTEEN_BIT_FLOATS for v in (*op.inputs, *op.outputs))
    return each(op, inputs) if is_narrow else None


def _in_integers(walk: Context, op: Op) -> Fact | None:
    """No fact, since integer arithmetic on 8-bit data may wrap."""
    if any(walk.dequantized(v) is not None for v in op.inputs):
        return lost(op, f"in {op.outputs[0].dtype} may wrap", "convert to float32 first")
    return None


@rule("neg")
def negative(walk: Context, op: Op) -> Fact | None:
    """A factor of -1."""
    source, out = op.inputs[0], op.outputs[0]
    minus = (Factor(graph.literal(-1.0, np.float32), ()).at(out.shape),)
    if (product := walk.product(source)) is not None:
        return epilogue.scale(product, op, minus)
    if not is_wide_float(out):
        return _in_integers(walk, op)
    if (scaled := walk.dequantized(source)) is not None:
        return scaled.scaled(minus)
    fact = walk.fact(source)
    return Scales(fact.factors + minus) if isinstance(fact, Scales) else None
