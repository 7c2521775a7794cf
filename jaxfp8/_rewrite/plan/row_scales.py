"""How a program makes the scale of a row from the largest magnitude of what it quantises.

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
# For each test of a magnitude against 0: which operand of `select_n` is the one for zeros, and
# whether NaN counts as zero.
_TESTS = {"eq": (2, False), "le": (2, False), "ne": (1, False), "gt": (1, True)}


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
    """A scale, as far as it was read back.

    Attributes:
      amax: the op that finds the maxima.
      divided: whether they were divided by the largest code.
      amax_floor, scale_floor: the least number before and after that.
      of_zeros: what a guard gives for 0; None without a guard.
      guards_nan: whether it gives that for NaN, too.
    """

    amax: Op
    divided: bool = False
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    of_zeros: float | None = None
    guards_nan: bool = False


def read(scale: Value, dtype: np.dtype, is_amax: Callable[[Op], bool]) -> tuple[RowScale, Op] | str:
    """The rule that makes a scale, and the op that finds the maxima; or why there is none.

    Args:
      scale: float32.
      dtype: the dtype of the codes.
      is_amax: whether an op gives the maxima of what is quantised.
    """
    highest = dtypes.finite_range(dtype)[1]
    found = _read(scale, highest, is_amax)
    if isinstance(found, str):
        return found
    if not found.divided:
        return _no_rule(highest)
    least = max(float(np.float32(found.amax_floor) * per(highest)), found.scale_floor)
    of_zeros = least if found.of_zeros is None else found.of_zeros
    rule = RowScale(
        amax_floor=found.amax_floor,
        scale_floor=found.scale_floor,
        of_zeros=of_zeros,
        of_nan=of_zeros if found.guards_nan else math.nan,
    )
    return rule, found.amax


def _no_rule(highest: float) -> str:
    return f"its scale is not the largest magnitude / {highest:g}, floored or with a guard for 0"


def _read(value: Value, highest: float, is_amax: Callable[[Op], bool]) -> _Read | str:
    value = before_reshapes(value)
    op = value.op
    if op is None:
        return "its scale is given"
    if is_amax(op):
        return _Read(op)
    if op.name == "select_n":
        return _guarded(op, highest, is_amax)
    if op.name != "max" and (op.name not in ("mul", "div") or value.dtype != _FLOAT32):
        return _no_rule(highest)
    numbers = [constants.number(v) for v in op.inputs]
    at = 1 if numbers[1] is not None or op.name == "div" else 0
    constant = numbers[at]
    if constant is None:
        return _no_rule(highest)
    found = _read(op.inputs[1 - at], highest, is_amax)
    if isinstance(found, str):
        return found
    if op.name == "max":
        return _floored(found, constant) or _no_rule(highest)
    wanted = highest if op.name == "div" else float(per(highest))
    if found.divided or constant != wanted:
        return _no_rule(highest)
    of_zeros = None if found.of_zeros is None else float(np.float32(found.of_zeros) * per(highest))
    return dataclasses.replace(found, divided=True, of_zeros=of_zeros)


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


def _floored(found: _Read, floor: float) -> _Read | None:
    """After `max` with a number."""
    if found.of_zeros is not None or not 0 < floor < np.inf:
        return None
    if found.divided:
        return dataclasses.replace(found, scale_floor=max(found.scale_floor, floor))
    return dataclasses.replace(found, amax_floor=max(found.amax_floor, floor))


def _guarded(op: Op, highest: float, is_amax: Callable[[Op], bool]) -> _Read | str:
    """After `where` has put another number for a maximum, or a scale, of 0."""
    test = before_reshapes(op.inputs[0]).op
    if len(op.inputs) != 3 or test is None or test.name not in _TESTS:
        return _no_rule(highest)
    zeros_at, with_nan = _TESTS[test.name]
    of_zeros = constants.number(op.inputs[zeros_at])
    found = _read(op.inputs[3 - zeros_at], highest, is_amax)
    tested = _read(test.inputs[0], highest, is_amax)
    if isinstance(found, str) or isinstance(tested, str):
        return found if isinstance(found, str) else _no_rule(highest)
    if not (_is_bare(found) and _is_bare(tested)) or constants.number(test.inputs[1]) != 0:
        return _no_rule(highest)
    if of_zeros is None or not 0 < of_zeros < np.inf:
        return _no_rule(highest)
    return dataclasses.replace(found, of_zeros=of_zeros, guards_nan=with_nan)


def _is_bare(found: _Read) -> bool:
    return found.of_zeros is None and not (found.amax_floor or found.scale_floor)
