"""Rows quantized by the function itself, before a captured dot.

    codes = clip(round(x / scale)).astype(int8), or clip(x / scale).astype(float8)
    amax  = max(abs(x)) along the last axis, if the scale comes from it

A factor may stand in place of the divisor. Codes of int8 may be clipped before they are rounded,
after it, twice, or not at all, since the cast saturates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jax import lax

from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import dtypes

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedRows:
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


def operands(walk: Walk) -> Iterator[tuple[DotSite, int, Value]]:
    """The operands of captured dots with codes made by the program: dot, index and codes."""
    for site in walk.own:
        for index, (_, fact) in enumerate(site.given if site.captured is not None else ()):
            codes = fact.origin if isinstance(fact, Scaled) else None
            cast = None if codes is None else graph.producer(codes, "convert_element_type")
            if codes is not None and cast is not None and _is_wide(cast.inputs[0]):
                yield site, index, codes


def _is_wide(value: Value) -> bool:
    return value.dtype in dtypes.WIDE_FLOAT


def read(codes: Value) -> QuantizedRows | None:
    """How codes were made, read back from the cast; None for another form."""
    cast = graph.producer(codes, "convert_element_type")
    if cast is None or cast.inputs[0].dtype != _FLOAT32 or codes.dtype == np.uint8:
        return None
    lowest, highest = dtypes.finite_range(codes.dtype)
    if dtypes.is_float8(codes.dtype):
        steps, bounds = _unclipped(cast.inputs[0])
        does_fit = bounds == (lowest, highest)  # a cast to FP8 does not saturate
        return _of_steps(codes, steps, int(lowest)) if does_fit else None
    if (whole := _whole_steps(cast.inputs[0])) is None:
        return None
    steps, (low, high) = whole
    does_fit = low <= lowest + 1 and high >= highest  # symmetric codes leave -128 out
    return _of_steps(codes, steps, int(max(low, lowest))) if does_fit else None


def _of_steps(codes: Value, steps: Value, lowest: int) -> QuantizedRows | None:
    """The rows behind values in units of a scale; None without a scale of rows."""
    op = steps.op
    if op is None or op.name not in ("div", "mul"):
        return None
    for x, other in (op.inputs, op.inputs[::-1])[: 1 if op.name == "div" else 2]:
        scale = _of_rows(other, codes.shape)
        if x.shape == codes.shape and scale is not None and scale.dtype == _FLOAT32:
            return QuantizedRows(codes, x, scale, lowest, op.name == "mul")
    return None


Bounds = tuple[float, float]
_NO_BOUNDS = (-np.inf, np.inf)


def _whole_steps(value: Value) -> tuple[Value, Bounds] | None:
    """The value before it was rounded to a whole number, and the bounds of that number.

    None without a rounding.
    """
    inner, (low, high) = _unclipped(value)
    op = graph.producer(inner, "round")
    if op is None or op.params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
        return None
    steps, before = _unclipped(op.inputs[0])
    first_low, first_high = np.round(before)  # as the bounded values are
    return steps, (max(low, first_low), min(high, first_high))


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
    """The known number in every entry, if a float32 holds it."""
    same = ("pvary", "pcast", "convert_element_type")
    while (number := constants.number(value)) is None and value.op is not None:
        if value.op.name not in same or value.dtype not in (_FLOAT32, np.int32):
            return None
        value = value.op.inputs[0]
    return number if number is None or float(np.float32(number)) == number else None


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


def narrow(x: Value) -> Value:
    """The 16-bit array before it was widened to `x`; else `x`."""
    op = graph.producer(x, "convert_element_type")
    return op.inputs[0] if op is not None and x.dtype == _FLOAT32 and _is_wide(op.inputs[0]) else x


def maximised(op: Op) -> Value | None:
    """The operand of an op for the largest magnitudes, along the last axis at least."""
    magnitudes = graph.producer(op.inputs[0], "abs") if op.name == "reduce_max" else None
    if magnitudes is None:
        return None
    x = magnitudes.inputs[0]
    return narrow(x) if len(x.shape) - 1 in op.params["axes"] else None
