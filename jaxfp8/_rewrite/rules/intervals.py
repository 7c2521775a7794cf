"""Interval analysis: finds whole numbers within bounds, such as zero points.

It goes back along the producers of a value. It tracks possible NaNs separately, because a NaN zero
point can become a NaN scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxfp8._rewrite.ir import constants
from jaxfp8._rewrite.ir.graph import Op, Value

# How many operations back the analysis goes.
_DEEPEST = 64
# Each entry of their result is one of their input.
_PICKING = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "copy_p",
    "slice",
    "dynamic_slice",
    "rev",
    "stop_gradient",
    "name",
    "reduce_max",
    "reduce_min",
    "pvary",
    "pcast",
)


@dataclasses.dataclass(frozen=True)
class Range:
    """Every entry lies in [low, high], or is NaN."""

    # low, high: the bounds.
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False  # whether every entry is a whole number, or NaN
    nan: bool = True  # whether an entry may be NaN

    def within(self, bound: float) -> bool:
        """Whether every entry is a whole number less than `bound` from zero, or NaN."""
        return self.whole and -bound < self.low and self.high < bound


# From the ranges of an op's inputs to that of its output.
Transfer = Callable[[Op, list[Range]], Range]
Ends = Callable[[Range, Range], tuple[float, float]]


def bounds(value: Value) -> Range:
    """The known bounds of the entries of an array."""
    return _bounds(value, {}, 0)


def _bounds(value: Value, seen: dict[Value, Range], depth: int) -> Range:
    if value not in seen:
        seen[value] = _of_dtype(value, _known(value, seen, depth))
    return seen[value]


def _of_dtype(value: Value, known: Range) -> Range:
    """The range in the dtype: after a possible wrap, an integer is any number of its dtype."""
    if value.dtype.kind not in "iu":
        return _of_float(value, known)
    info = np.iinfo(value.dtype)
    if info.min <= known.low and known.high <= info.max:
        return Range(known.low, known.high, True, False)
    return Range(info.min, info.max, True, False)


def _of_float(value: Value, known: Range) -> Range:
    """The range in a float dtype: 16-bit floats round results, and FP8 may also make them NaN."""
    if value.dtype.name in ("bool", "float32", "float64"):
        return known
    if value.dtype.name not in _NARROW:
        return Range()
    if value.op is not None and value.op.name in _PICKING:
        return known
    largest = max(abs(known.low), abs(known.high))
    if largest > _NARROW[value.dtype.name]:
        return Range(nan=known.nan)
    return Range(
        known.low - largest / 64 - 1, known.high + largest / 64 + 1, known.whole, known.nan
    )


# Below these bounds a 16-bit float rounds a whole number to a whole number, never to infinity.
_NARROW = {"bfloat16": 2.0**100, "float16": 2.0**15}


def _known(value: Value, seen: dict[Value, Range], depth: int) -> Range:
    if value.literal is not None:
        return _of_array(np.asarray(value.literal, np.float64))
    if value.op is None or depth > _DEEPEST:
        return Range()
    transfer = _TRANSFERS.get(value.op.name)
    if transfer is None and value.op.name not in _PICKING:
        return Range()
    inputs = [_bounds(v, seen, depth + 1) for v in value.op.inputs]
    return inputs[0] if transfer is None else transfer(value.op, inputs)


def _of_array(array: np.ndarray) -> Range:
    if not array.size or np.any(np.isnan(array)):
        return Range()
    low, high = float(array.min()), float(array.max())
    whole = bool(np.all(np.isfinite(array)) and np.all(array == np.floor(array)))
    return Range(low, high, whole, False)


def _union(op: Op, inputs: list[Range]) -> Range:
    low, high = min(r.low for r in inputs), max(r.high for r in inputs)
    return Range(low, high, all(r.whole for r in inputs), any(r.nan for r in inputs))


def _convert(op: Op, inputs: list[Range]) -> Range:
    """A cast keeps whole numbers whole. To an integer it cuts fractions off, and makes NaN zero."""
    (source,), out = inputs, op.outputs[0]
    if not (math.isfinite(source.low) and math.isfinite(source.high)):
        return Range(nan=source.nan)
    if out.dtype.kind not in "iu" or (source.whole and not source.nan):
        return source
    low, high = math.floor(min(source.low, 0.0)), math.ceil(max(source.high, 0.0))
    return Range(low, high, True, False)


def _round(op: Op, inputs: list[Range]) -> Range:
    source = inputs[0]
    if not (math.isfinite(source.low) and math.isfinite(source.high)):
        return Range(source.low, source.high, True, source.nan)
    return Range(math.floor(source.low), math.ceil(source.high), True, source.nan)


def _clamp(op: Op, inputs: list[Range]) -> Range:
    low, source, high = inputs
    return _min(op, [_max(op, [source, low]), high])


def _of_both(ends: Ends) -> Transfer:
    """A transfer function from the ends of two ranges to the ends of their result."""

    def transfer(op: Op, inputs: list[Range]) -> Range:
        low, high = ends(*inputs)
        return Range(low, high, all(r.whole for r in inputs), any(r.nan for r in inputs))

    return transfer


_max = _of_both(lambda a, b: (max(a.low, b.low), max(a.high, b.high)))
_min = _of_both(lambda a, b: (min(a.low, b.low), min(a.high, b.high)))


def _arithmetic(ends: Ends) -> Transfer:
    """Results on whole numbers are whole. Those on infinities may be NaN."""

    def transfer(op: Op, inputs: list[Range]) -> Range:
        known = _of_both(ends)(op, inputs)
        return known if math.isfinite(known.low) and math.isfinite(known.high) else Range()

    return transfer


def _products(a: Range, b: Range) -> tuple[float, float]:
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    finite = all(map(math.isfinite, ends))
    return (min(ends), max(ends)) if finite else (-math.inf, math.inf)


def _negative(op: Op, inputs: list[Range]) -> Range:
    source = inputs[0]
    return Range(-source.high, -source.low, source.whole, source.nan)


def _and(op: Op, inputs: list[Range]) -> Range:
    """A bitwise and is at most as large as any non-negative operand."""
    highs = [r.high for r in inputs if r.low >= 0]
    return Range(0.0, min(highs), True, False) if highs else Range()


def _shift(op: Op, inputs: list[Range]) -> Range:
    """A logical right shift by n leaves n fewer bits, for a known n."""
    number = constants.number(op.inputs[1])
    bits = op.outputs[0].dtype.itemsize * 8
    if number is None or not 0 < number < bits:
        return Range()
    return Range(0.0, 2.0 ** (bits - number) - 1, True, False)


def _iota(op: Op, inputs: list[Range]) -> Range:
    return Range(0.0, float(max(op.outputs[0].shape, default=1)), True, False)


_TRANSFERS: dict[str, Transfer] = {
    "convert_element_type": _convert,
    "round": _round,
    "floor": _round,
    "ceil": _round,
    "clamp": _clamp,
    "max": _max,
    "min": _min,
    "add": _arithmetic(lambda a, b: (a.low + b.low, a.high + b.high)),
    "sub": _arithmetic(lambda a, b: (a.low - b.high, a.high - b.low)),
    "mul": _arithmetic(_products),
    "neg": _negative,
    "and": _and,
    "shift_right_logical": _shift,
    "iota": _iota,
    "concatenate": _union,
    "select_n": lambda op, inputs: _union(op, inputs[1:]),
    "pad": _union,
}
