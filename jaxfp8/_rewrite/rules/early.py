"""Rows of a dequantised array, picked from the 8-bit array first and dequantised afterwards.

A gather and a dot may read one table: an embedding that is also the output projection. The dot
reads its bytes. The gather moves before the dequantisation, so nobody reads the wide table.
Dequantisation is elementwise, and gives the same bits on fewer elements.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.factors import Factor, factor_of
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.scaled import Scales
from jaxfp8._rewrite.rules import views
from jaxfp8._rewrite.rules.gathers import (
    clipped_rows,
    fills_with_nan,
    gather_factor,
    is_in_bounds,
    rows_inside,
)
from jaxfp8._rewrite.rules.views import MoveFactor
from jaxfp8._value import compat, dtypes

_PICKS: dict[str, MoveFactor] = {
    "gather": gather_factor,
    "dynamic_slice": views.dynamic_slice_factor,
    "slice": views.slice_factor,
}
_BY_ELEMENT = ("convert_element_type", "mul", "div", "sub", "add", "neg", "reduce_precision")


def picked(walk: Context, op: Op) -> Value | None:
    """The output of a gather or slice of a dequantised array, picked before dequantising."""
    if op.name not in _PICKS or walk.dequantised(op.inputs[0]) is None:
        return None
    if op.outputs[0].size >= op.inputs[0].size:
        return None
    if is_in_bounds(op):
        return _pick(walk, op, op.inputs[0])
    return _with_nan_outside(walk, op) if fills_with_nan(op) else None


def _with_nan_outside(walk: Context, op: Op) -> Value | None:
    """Rows within bounds times 1; rows out of bounds have arbitrary bytes, times NaN."""
    rows, inside, out = _pick(walk, op, op.inputs[0]), rows_inside(op), op.outputs[0]
    if rows is None or inside is None or out.dtype not in dtypes.WIDE_FLOAT:
        return None
    small = casts.cast(_stretch(inside, out.shape), out.dtype)
    return graph.multiply(rows, small)


def _pick(walk: Context, op: Op, value: Value) -> Value | None:
    """The op applied to another array of its operand's shape."""
    shape = op.outputs[0].shape
    if value.dtype in dtypes.EIGHT_BIT:
        q = walk.scaled(value)
        if q is None:
            return None
        rows = _moved(op, q.q) if is_in_bounds(op) else clipped_rows(op, q.q)
        return casts.bitcast(rows, value.dtype)
    if walk.dequantised(value) is not None:
        return _again(walk, op, value)
    fact = walk.fact(value)
    if isinstance(fact, Scales) and len(fact.factors) == 1:
        factor = _PICKS[op.name](op, fact.factors[0].at(op.inputs[0].shape))
        return None if factor is None else casts.cast(_stretch(factor, shape), value.dtype)
    return _moved(op, value)


def _moved(op: Op, value: Value) -> Value:
    source = casts.to_pick(value, op.inputs[1:])
    return graph.replay(op, [source, *op.inputs[1:]], op.outputs[0].shape, value.dtype)


def _again(walk: Context, op: Op, value: Value) -> Value | None:
    """The elementwise op behind the value, on picked elements of its inputs."""
    made, shape = value.op, op.outputs[0].shape
    if made is None or made.name not in _BY_ELEMENT or made.eqn is None:
        return None
    inputs = [_input(walk, op, v, value) for v in made.inputs]
    values = [v for v in inputs if v is not None]
    if len(values) < len(inputs):
        return None

    def run(*arrays: Array) -> Array:
        return graph.bind(made.equation, compat.vary_alike(arrays), made.callers)[0]

    return graph.derived(made.name, run, values, shape, value.dtype)


def _input(walk: Context, op: Op, source: Value, value: Value) -> Value | None:
    """The picked elements of one input of an elementwise op; the input may broadcast."""
    if not source.shape:
        return source
    if source.shape == value.shape:
        return _pick(walk, op, source)
    factor = _PICKS[op.name](op, factor_of(source).at(value.shape))
    return None if factor is None else _stretch(factor, op.outputs[0].shape)


def _stretch(factor: Factor, shape: tuple[int, ...]) -> Value:
    """The large array of a factor."""

    def run(small: Array) -> Array:
        for axis, (tile, size) in enumerate(zip(factor.tiles, shape, strict=True)):
            if small.shape[axis] > 1 and tile > 1:
                small = jnp.repeat(small, tile, axis)
                small = small[(slice(None),) * axis + (slice(size),)]
        return jnp.broadcast_to(small, shape)

    small = factor.small
    return graph.derived("broadcast", run, [small], shape, small.dtype)
