"""Operands that the function quantises itself, before a captured dot: one call instead of five ops.

    codes = clip(round(x / scale)).astype(int8), or clip(x / scale).astype(float8)
    amax  = max(abs(x)) along the last axis, where the scale comes from it

A factor may stand in place of the divisor. Codes of int8 may be clipped before they are rounded,
after it, twice, or not at all, since the cast saturates. The calls give the same bits as what they
replace, whatever the scale is. Other forms are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax import lax

from jaxfp8._call.library import targets
from jaxfp8._call.ops.quantize_call import amax_rows, encode_rows
from jaxfp8._call.ops.quantize_lowering import why_no_rows_here
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import dtypes

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Encoding:
    """`codes` are those of `x / scale`, or of `x * scale`.

    Attributes:
      codes, x: of one shape.
      scale: one element, or one for each row.
      lowest: the least code.
      multiplies: whether `scale` is a factor.
    """

    codes: Value
    x: Value
    scale: Value
    lowest: int
    multiplies: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedOperand:
    """An operand of a captured dot that the function quantises itself.

    Attributes:
      site, index: the dot, and which of its operands.
      replaced: for the codes, and for the maxima that their scale comes from, the outputs of calls
        that give them; empty where they do not have the form above.
    """

    site: DotSite
    index: int
    replaced: Mapping[Value, Value]


def find(walk: Walk) -> list[EncodedOperand]:
    """The operands of captured dots that a program quantises itself."""
    if targets.platform() != "cpu":
        return []
    known: dict[Value, Mapping[Value, Value]] = {}
    found = []
    for site in walk.own:
        for index, (_, fact) in enumerate(site.given if site.captured is not None else ()):
            codes = fact.origin if isinstance(fact, Scaled) else None
            if codes is None or not is_cast(codes):
                continue
            if codes not in known:
                known[codes] = _replaced(walk, encoding_of(walk, codes))
            found.append(EncodedOperand(site, index, known[codes]))
    return found


def schedule(
    walk: Walk,
    replaced: Mapping[Value, Value],
    order: Callable[[Mapping[Value, Value]], Program],
) -> Program:
    """The program with calls in place of what quantises the operands of its captured dots.

    Args:
      walk: the walk, with its dots resolved.
      replaced: the values that captured dots replace.
      order: makes the program of all that is replaced.
    """
    found = find(walk)
    for operand in found:
        replaced = {**operand.replaced, **replaced}
    program = order(replaced)
    ops = {op for op, _ in program.ops}
    for operand in found:
        is_used = any(value.op in ops for value in operand.replaced.values())
        operand.site.quantized[operand.index] = "one call" if is_used else "as written"
    return program


def is_cast(codes: Value) -> bool:
    """Whether codes were made by a cast from floats."""
    op = graph.producer(codes, "convert_element_type")
    return op is not None and op.inputs[0].dtype in dtypes.WIDE_FLOAT


def _replaced(walk: Walk, encoding: Encoding | None) -> Mapping[Value, Value]:
    if encoding is None or why_no_rows_here(encoding.x.shape):
        return {}
    made = {encoding.codes: _encoded(encoding), **_maxima(walk, encoding)}
    return {value: graph.laid_out_like(new, value) for value, new in made.items()}


def _encoded(encoding: Encoding) -> Value:
    dtype, lowest = encoding.codes.dtype, encoding.lowest
    run = functools.partial(encode_rows, dtype=dtype, lowest=lowest, multiplies=encoding.multiplies)
    inputs = [encoding.x, encoding.scale]
    return graph.derived("encode_rows", run, inputs, encoding.codes.shape, dtype)


# The codes


def encoding_of(walk: Walk, codes: Value) -> Encoding | None:
    """How codes were made, read back from the cast; None where they do not have the form above."""
    cast = graph.producer(codes, "convert_element_type")
    if cast is None or cast.inputs[0].dtype != _FLOAT32 or codes.dtype == np.uint8:
        return None
    lowest, highest = dtypes.finite_range(codes.dtype)
    if dtypes.is_float8(codes.dtype):
        steps, bounds = _unclipped(cast.inputs[0])
        does_fit = bounds == (lowest, highest)  # a cast to FP8 does not saturate
        return _of_steps(walk, codes, steps, int(lowest)) if does_fit else None
    if (whole := _whole_steps(cast.inputs[0])) is None:
        return None
    steps, (low, high) = whole
    does_fit = low <= lowest + 1 and high >= highest  # symmetric codes leave -128 out
    return _of_steps(walk, codes, steps, int(max(low, lowest))) if does_fit else None


def _of_steps(walk: Walk, codes: Value, steps: Value, lowest: int) -> Encoding | None:
    """The encoding of values in units of a scale; None where no scale of rows made them."""
    op = steps.op
    if op is None or op.name not in ("div", "mul"):
        return None
    for x, other in (op.inputs, op.inputs[::-1])[: 1 if op.name == "div" else 2]:
        scale = _of_rows(other, codes.shape)
        if x.shape == codes.shape and scale is not None and scale.dtype == _FLOAT32:
            multiplies = op.name == "mul"
            return Encoding(codes, narrow(walk, x), scale, lowest, multiplies)
    return None


Bounds = tuple[float, float]
_NO_BOUNDS = (-np.inf, np.inf)


def _whole_steps(value: Value) -> tuple[Value, Bounds] | None:
    """The value before it was rounded to a whole number, and the bounds of that number.

    None where it was not rounded.
    """
    inner, (low, high) = _unclipped(value)
    if (op := _rounding(inner)) is None:
        return None
    steps, before = _unclipped(op.inputs[0])
    first_low, first_high = np.round(before)  # as the bounded values are
    return steps, (max(low, first_low), min(high, first_high))


def _rounding(value: Value) -> Op | None:
    """The op that rounds to the nearest whole number, ties to even, if that made the value."""
    op = graph.producer(value, "round")
    to_even = lax.RoundingMethod.TO_NEAREST_EVEN
    return op if op is not None and op.params["rounding_method"] == to_even else None


def _unclipped(value: Value) -> tuple[Value, Bounds]:
    """The value before it was clipped, and the bounds."""
    op = value.op
    if op is not None and op.name == "clamp":
        low, _, high = map(_number, op.inputs)
        return (value, _NO_BOUNDS) if low is None or high is None else (op.inputs[1], (low, high))
    bounds: dict[str, float] = {}
    while op is not None and op.name in ("max", "min") and op.name not in bounds:
        numbers = [_number(v) for v in op.inputs]
        if (numbers[0] is None) == (numbers[1] is None):
            break
        index, number = (0, numbers[1]) if numbers[0] is None else (1, numbers[0])
        assert number is not None
        bounds[op.name] = number
        value, op = op.inputs[index], op.inputs[index].op
    return value, (bounds.get("max", -np.inf), bounds.get("min", np.inf))


def _number(value: Value) -> float | None:
    """The number that every entry is known to be, which a float32 holds."""
    same = ("pvary", "pcast", "convert_element_type")
    while (number := constants.number(value)) is None and value.op is not None:
        if value.op.name not in same or value.dtype not in (_FLOAT32, np.int32):
            return None
        value = value.op.inputs[0]
    return number if number is None or float(np.float32(number)) == number else None


def narrow(walk: Walk, x: Value) -> Value:
    """The bfloat16 or float16 array that was widened to `x`; else `x`.

    An array with a fact stays widened: a call may give it as float32, and would have to run again
    to give it in 16 bits.
    """
    op = graph.producer(x, "convert_element_type")
    if op is None or x.dtype != _FLOAT32 or walk.fact(op.inputs[0]) is not None:
        return x
    return op.inputs[0] if op.inputs[0].dtype in dtypes.WIDE_FLOAT else x


def _of_rows(scale: Value, shape: tuple[int, ...]) -> Value | None:
    """A divisor as one number, or one for each row; None if it is neither."""
    rows = (*shape[:-1], 1)
    if scale.size == 1 or scale.shape == rows:
        return scale
    op = graph.producer(scale, "broadcast_in_dim")
    if op is None:
        return None
    source = op.inputs[0]
    if source.size == 1 or source.shape == rows:
        return source
    leading = tuple(range(len(shape) - 1))
    along = tuple(op.params["broadcast_dimensions"])
    return graph.reshape(source, rows) if (source.shape, along) == (rows[:-1], leading) else None


# The maxima that the scale comes from

# How many operations a maximum may be away from the scale that it becomes.
_FARTHEST = 12


def _maxima(walk: Walk, encoding: Encoding) -> Mapping[Value, Value]:
    """The maxima of |x| that the scale comes from."""
    found: dict[Value, Value] = {}
    front, seen = {encoding.scale}, {encoding.scale}
    for _ in range(_FARTHEST):
        ops = [value.op for value in front if value.op is not None]
        for op in ops:
            axes = _axes_of_maximum(walk, op, encoding.x)
            if axes is not None:
                found[op.outputs[0]] = _largest(encoding.x, axes, op.outputs[0])
        front = {v for op in ops for v in op.inputs if v.size < encoding.x.size} - seen
        seen |= front
    return found


def _axes_of_maximum(walk: Walk, op: Op, x: Value) -> tuple[int, ...] | None:
    """The axes along which an op is the maximum of |x|, if the last is among them."""
    magnitudes = graph.producer(op.inputs[0], "abs") if op.name == "reduce_max" else None
    if magnitudes is None or x not in (magnitudes.inputs[0], narrow(walk, magnitudes.inputs[0])):
        return None
    axes = tuple(op.params["axes"])
    return axes if len(x.shape) - 1 in axes else None


def _largest(x: Value, axes: tuple[int, ...], value: Value) -> Value:
    rest = tuple(axis for axis in axes if axis != len(x.shape) - 1)

    def run(x: jax.Array) -> jax.Array:
        amax = amax_rows(x)
        return (amax.max(rest) if rest else amax).astype(value.dtype)

    return graph.derived("amax_rows", run, [x], value.shape, value.dtype)
