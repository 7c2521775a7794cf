"""Rows of a dequantised array, picked from the 8-bit array first and dequantised then.

A table that is embedding and output projection at once is read by a gather and by a dot. The dot
reads its bytes; so that the gather does not ask for the wide table, it is moved before the
operations that dequantise. They work element by element, on fewer of them, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.facts import Factor, Scales
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.rules import views
from jaxfp8._rewrite.rules.gathers import (
    clipped_rows,
    fills_with_nan,
    gather_factor,
    is_in_bounds,
    rows_inside,
)
from jaxfp8._value import compat, dtypes

MoveFactor = Callable[[Op, Factor], Factor | None]
_PICKS: dict[str, MoveFactor] = {
    "gather": gather_factor,
    "dynamic_slice": views.dynamic_slice_factor,
    "slice": views.slice_factor,
}
_BY_ELEMENT = ("convert_element_type", "mul", "div", "sub", "add", "neg", "reduce_precision")


def picked(walk: Context, op: Op) -> Value | None:
    """The output of an op that picks from a dequantised array, picked before dequantising."""
    if op.name not in _PICKS or walk.dequantised(op.inputs[0]) is None:
        return None
    if op.outputs[0].size >= op.inputs[0].size:
        return None
    if is_in_bounds(op):
        return _pick(walk, op, op.inputs[0])
    return _with_nan_outside(walk, op) if fills_with_nan(op) else None


def _with_nan_outside(walk: Context, op: Op) -> Value | None:
    """Rows out of bounds, whatever bytes they are filled with, times NaN; others times 1."""
    rows, inside, out = _pick(walk, op, op.inputs[0]), rows_inside(op), op.outputs[0]
    if rows is None or inside is None or out.dtype not in dtypes.WIDE_FLOAT:
        return None
    small = casts.cast(_stretch(inside, out.shape), out.dtype)
    return graph.multiply(rows, small)


def _pick(walk: Context, op: Op, value: Value) -> Value | None:
    """What the op picks from another array of its operand's shape."""
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
    return graph.replay(op, [value, *op.inputs[1:]], op.outputs[0].shape, value.dtype)


def _again(walk: Context, op: Op, value: Value) -> Value | None:
    """The operation that made the value, on what is picked from its inputs."""
    made, shape = value.op, op.outputs[0].shape
    if made is None or made.name not in _BY_ELEMENT or made.eqn is None:
        return None
    inputs = [_input(walk, op, v, value) for v in made.inputs]
    found = [v for v in inputs if v is not None]
    if len(found) < len(inputs):
        return None

    def run(*arrays: Any) -> Any:
        return graph.bind(made.eqn, compat.vary_alike(arrays), made.callers)[0]

    return graph.derived(made.name, run, found, shape, value.dtype)


def _input(walk: Context, op: Op, source: Value, value: Value) -> Value | None:
    """One input of an operation by element: a scalar stays, one with axes of size 1 is a scale."""
    if not source.shape:
        return source
    if source.shape == value.shape:
        return _pick(walk, op, source)
    factor = _PICKS[op.name](op, Factor(source, (1,) * len(source.shape)).at(value.shape))
    return None if factor is None else _stretch(factor, op.outputs[0].shape)


def _stretch(factor: Factor, shape: tuple[int, ...]) -> Value:
    """The large array that a factor stands for."""

    def run(small: Any) -> Any:
        for axis, (tile, size) in enumerate(zip(factor.tiles, shape, strict=True)):
            if small.shape[axis] > 1 and tile > 1:
                small = jnp.repeat(small, tile, axis)
                small = small[(slice(None),) * axis + (slice(size),)]
        return jnp.broadcast_to(small, shape)

    small = factor.small
    return graph.derived("broadcast", run, [small], shape, small.dtype)
