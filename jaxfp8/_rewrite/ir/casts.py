"""Casts in the program: how to add one, undo one, and keep its rounding.

A call reads 8-bit and 16-bit arrays as stored, so the rewrite undoes a cast that widens one. It
keeps a cast of the result of bfloat16 arithmetic. XLA may skip the rounding of that arithmetic, but
only for all readers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxfp8._rewrite.ir.graph import Array, Op, Value, behind, derived, inputs, literal, producer
from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.picking import bytes_to_pick


def cast(value: Value, dtype: DTypeLike) -> Value:
    """The value converted to `dtype`."""
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    if value.literal is not None:
        with np.errstate(all="ignore"):
            return literal(value.literal.astype(dtype))
    # The function does not widen it, so XLA must not leave out its rounding here either.
    keeps = value.dtype == _dtypes.BFLOAT16 and dtype.itemsize > 2 and not _is_stored(value)

    def run(x: Array) -> Array:
        return _widened(x, dtype) if keeps else lax.convert_element_type(x, dtype)

    return derived(
        "convert_element_type",
        run,
        [value],
        value.shape,
        dtype,
        {"new_dtype": dtype},
    )


def _widened(x: Array, dtype: np.dtype) -> Array:
    """bfloat16 numbers in a wider dtype, rounded to bfloat16 even if XLA fuses the arithmetic."""
    return lax.reduce_precision(lax.convert_element_type(x, dtype), 8, 7)


def rounded(value: Value) -> Value:
    """The value after the rounding of its bfloat16 arithmetic, for every reader."""
    if value.dtype != _dtypes.BFLOAT16 or _is_stored(value):
        return value

    def run(x: Array) -> Array:
        return lax.convert_element_type(_widened(x, np.dtype(np.float32)), x.dtype)

    return derived("rounded", run, [value], value.shape, value.dtype)


def was_spread(value: Value) -> bool:
    """Whether the value repeats or picks results of bfloat16 arithmetic.

    XLA rounds the operand of a repeat or a pick. Facts look through these ops, so the rewrite adds
    the rounding.
    """
    return any(_repeats_or_picks(v) for v in behind([value], _before_moves))


def _before_moves(value: Value) -> Sequence[Value]:
    if value.outer is not None:
        return (value.outer,)
    return inputs(value) if value.op is not None and value.op.name in (*_MOVES, *_PICKS) else ()


def _repeats_or_picks(value: Value) -> bool:
    sources, op = _before_moves(value), value.op
    if value.outer is not None or op is None or not sources:
        return False
    is_repeat = op.name == "broadcast_in_dim" and value.size > sources[0].size
    return (is_repeat or op.name in _OPAQUE) and not all(map(_is_stored, sources))


def bitcast(value: Value, dtype: DTypeLike) -> Value:
    """The same bits as another dtype of the same width."""
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    op = producer(value, "bitcast_convert_type")
    if op is not None and op.inputs[0].dtype == dtype:
        return op.inputs[0]
    return derived(
        "bitcast_convert_type",
        lambda x: _dtypes.bits_as(x, dtype),
        [value],
        value.shape,
        dtype,
        {"new_dtype": dtype},
    )


# XLA on the CPU runs these on FP8 bytes, with no detour through float16.
_BYTE_EXACT = (
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "optimization_barrier",
    "pvary",
    "pcast",
)


def undo_bitcast(value: Value, dtype: np.dtype) -> Value:
    """The FP8 array with the bytes of the value, if only reshapes and transposes lie between.

    A custom call takes FP8 as it is. XLA on the CPU copies a whole parameter to bitcast it.
    """
    return _before(value, (dtype,), (value.dtype,), "bitcast_convert_type", _BYTE_EXACT)


def float8_behind(value: Value) -> Value | None:
    """The FP8 array with the bytes of the value, as `undo_bitcast` finds it; None without one."""
    if value.dtype != np.uint8:
        return None
    sources = (undo_bitcast(value, dtype) for dtype in _dtypes.FLOAT8)
    return next((source for source in sources if source.dtype in _dtypes.FLOAT8), None)


def to_pick(value: Value, places: Sequence[Value]) -> Value:
    """The value as the operand of a gather or a slice at `places`; see `_value/picking`."""
    source = float8_behind(value)
    traced = [place for place in places if place.literal is None]
    if source is None or not traced:
        return value

    def run(x: Array, *places: Array) -> Array:
        return bytes_to_pick(x, places)

    return derived("bytes_to_pick", run, [source, *traced], value.shape, value.dtype)


# Wider dtypes for each set of narrower ones. They represent every number exactly.
_HOLD: dict[tuple[np.dtype, ...], tuple[np.dtype, ...]] = {
    _dtypes.EIGHT_BIT_INTS: (
        *_dtypes.WIDE_FLOAT,
        *(np.dtype(f"int{bits}") for bits in (16, 32, 64)),
    ),
    _dtypes.SIXTEEN_BIT_FLOATS: (np.dtype(np.float32), np.dtype(np.float64)),
}
# Data movement only.
_MOVES = (*_BYTE_EXACT, "broadcast_in_dim", "slice", "rev", "stop_gradient")
_PICKS = ("gather", "dynamic_slice", "concatenate", "split", "stack")
# XLA does not look through these for arithmetic with a widened result.
_OPAQUE = (*_PICKS, "slice", "rev", "optimization_barrier")
# These round nothing.
_EXACT = (
    *_MOVES,
    *_PICKS,
    *("neg", "abs", "sign", "max", "min", "clamp", "select_n", "reduce_max", "reduce_min"),
    "bitcast_convert_type",
)


def undo_casts(value: Value, dtypes: tuple[np.dtype, ...]) -> Value:
    """The narrow array before widening casts, moved as the value is; else the value.

    `dtypes` is `EIGHT_BIT_INTS` or `SIXTEEN_BIT_FLOATS`. The result of 16-bit arithmetic is not
    narrowed: XLA may skip its rounding, but only for all readers at once.
    """
    source = _before(value, dtypes, _HOLD[dtypes])
    return source if dtypes != _dtypes.SIXTEEN_BIT_FLOATS or _is_stored(source) else value


def _is_stored(value: Value) -> bool:
    """Whether the value is an input or a cast, moved at most: no result of 16-bit arithmetic."""
    return not any(_is_computed(v) for v in behind([value], _before_exact))


def _before_exact(value: Value) -> Sequence[Value]:
    if value.dtype not in _dtypes.SIXTEEN_BIT_FLOATS:
        return ()
    if value.outer is not None:
        return (value.outer,)
    return inputs(value) if value.op is not None and value.op.name in _EXACT else ()


def _is_computed(value: Value) -> bool:
    is_narrow = value.dtype in _dtypes.SIXTEEN_BIT_FLOATS and value.outer is None
    known = (*_EXACT, "convert_element_type", "constant")
    return is_narrow and value.op is not None and value.op.name not in known


def undo_rounding(value: Value) -> Value:
    """The float32 array before one cast to bfloat16, with the moves since; or the value."""
    return _before(value, (np.dtype(np.float32),), (_dtypes.BFLOAT16,))


def exponents_or_rounded(scale: Value) -> Value:
    """A scale before its cast: the bytes of float8_e8m0fnu, else what `undo_rounding` gives."""
    powers = _before(scale, (_dtypes.E8M0,), (np.dtype(np.float32), _dtypes.BFLOAT16))
    if powers.dtype == _dtypes.E8M0:
        return bitcast(powers, np.uint8)
    return undo_rounding(scale)


def _before(
    value: Value,
    wanted: tuple[np.dtype, ...],
    through: tuple[np.dtype, ...],
    cast: str = "convert_element_type",
    moves: tuple[str, ...] = _MOVES,
) -> Value:
    """The array of a wanted dtype before moves, and casts to dtypes of `through`; or the value."""
    moved: list[Op] = []
    source = value
    while source.dtype not in wanted:
        op = source.op
        if op is None or source.dtype not in through or len(op.inputs) != 1:
            return value
        if op.name in moves:
            moved.append(op)
        elif op.name != cast:
            return value
        source = op.inputs[0]
    for op in reversed(moved):
        shape, run = op.outputs[0].shape, functools.partial(_first_output, op)
        source = derived(op.name, run, [source], shape, source.dtype)
    return source


def _first_output(op: Op, x: Array) -> Array:
    return op.evaluate(x)[0]
