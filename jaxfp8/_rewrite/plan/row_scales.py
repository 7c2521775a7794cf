"""How a program makes the scale of a row from its largest magnitude.

    scale = max(max(abs(x)), 1e-12) / 448
    scale = where(max(abs(x)) == 0, 1, max(abs(x)) * (1 / 127))

Both become a `RowScale`; XLA divides by a constant as it multiplies by its reciprocal. Anything
else is read as the reason why it is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxfp8._call.reference.produce_reference import RowScale
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import dtypes
from jaxfp8._value.scales import per

_FLOAT32 = np.dtype(np.float32)
# For each test of a magnitude against 0: the operand of `select_n` for zeros, and whether NaN is
# taken for zero.
_TESTS = {"eq": (2, False), "le": (2, False), "ne": (1, False), "gt": (1, True)}


class _NoRule(Exception):
    """A scale is none of these; its text says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Steps:
    """The way from the maxima to a scale, as far as it was read back.

    Attributes:
      amax: the op for the maxima.
      divided: whether they were divided by the largest code.
      amax_floor, scale_floor: the least number before and after that.
      of_zeros: the result of a guard for 0; None without a guard.
      guards_nan: whether NaN has that result, too.
    """

    amax: Op
    divided: bool = False
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    of_zeros: float | None = None
    guards_nan: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether there is neither a guard nor a floor."""
        return self.of_zeros is None and not (self.amax_floor or self.scale_floor)


def read(scale: Value, dtype: np.dtype, is_amax: Callable[[Op], bool]) -> tuple[RowScale, Op] | str:
    """The rule behind a scale, and the op for the maxima; or why there is none.

    Args:
      scale: float32.
      dtype: the dtype of the codes.
      is_amax: whether an op gives the maxima of the quantized rows.
    """
    highest = dtypes.finite_range(dtype)[1]
    try:
        steps = _steps(scale, highest, is_amax)
        _need(steps.divided)
    except _NoRule as why:
        form = (
            f"its scale is not the largest magnitude / {highest:g}, floored or with a guard for 0"
        )
        return str(why) or form
    least = max(float(np.float32(steps.amax_floor) * per(highest)), steps.scale_floor)
    of_zeros = least if steps.of_zeros is None else steps.of_zeros
    rule = RowScale(
        amax_floor=steps.amax_floor,
        scale_floor=steps.scale_floor,
        of_zeros=of_zeros,
        of_nan=of_zeros if steps.guards_nan else math.nan,
    )
    return rule, steps.amax


def _need(condition: bool) -> None:
    if not condition:
        raise _NoRule


def _steps(value: Value, highest: float, is_amax: Callable[[Op], bool]) -> _Steps:
    value = before_reshapes(value)
    op = value.op
    if op is None:
        raise _NoRule("its scale is given")
    if is_amax(op):
        return _Steps(op)
    if op.name == "select_n":
        return _guarded(op, highest, is_amax)
    _need(op.name == "max" or (op.name in ("mul", "div") and value.dtype == _FLOAT32))
    numbers = [constants.number(v) for v in op.inputs]
    at = 1 if numbers[1] is not None or op.name == "div" else 0
    constant = numbers[at]
    if constant is None:
        raise _NoRule
    steps = _steps(op.inputs[1 - at], highest, is_amax)
    if op.name == "max":
        return _floored(steps, constant)
    wanted = highest if op.name == "div" else float(per(highest))
    _need(not steps.divided and constant == wanted)
    of_zeros = None if steps.of_zeros is None else float(np.float32(steps.of_zeros) * per(highest))
    return dataclasses.replace(steps, divided=True, of_zeros=of_zeros)


def before_reshapes(value: Value) -> Value:
    """The same numbers before they were reshaped or widened."""
    while (op := value.op) is not None:
        source = op.inputs[0] if op.inputs else value
        is_wider = op.name == "convert_element_type" and source.dtype in dtypes.WIDE_FLOAT
        is_reshape = graph.is_reshape(op) and source.size == value.size
        if not is_reshape and not (is_wider and value.dtype == _FLOAT32):
            break
        value = source
    return value


def _floored(steps: _Steps, floor: float) -> _Steps:
    """After `max` with a number."""
    _need(steps.of_zeros is None and 0 < floor < np.inf)
    if steps.divided:
        return dataclasses.replace(steps, scale_floor=max(steps.scale_floor, floor))
    return dataclasses.replace(steps, amax_floor=max(steps.amax_floor, floor))


def _guarded(op: Op, highest: float, is_amax: Callable[[Op], bool]) -> _Steps:
    """After `where` has put another number for a maximum, or a scale, of 0."""
    test = before_reshapes(op.inputs[0]).op
    if len(op.inputs) != 3 or test is None or test.name not in _TESTS:
        raise _NoRule
    zeros_at, with_nan = _TESTS[test.name]
    of_zeros = constants.number(op.inputs[zeros_at])
    steps = _steps(op.inputs[3 - zeros_at], highest, is_amax)
    try:
        tested = _steps(test.inputs[0], highest, is_amax)
    except _NoRule:
        raise _NoRule from None  # the reason is that of the scale, not of the test
    _need(steps.is_bare and tested.is_bare and constants.number(test.inputs[1]) == 0)
    _need(of_zeros is not None and 0 < of_zeros < np.inf)
    return dataclasses.replace(steps, of_zeros=of_zeros, guards_nan=with_nan)
