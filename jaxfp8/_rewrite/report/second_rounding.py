"""The note of a row about a second rounding of FP8 data, to int8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxfp8._call.ops import int8_form
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._value import dtypes

# `tests/test_int8_compute.py` measures these.
_COST = (
    "the {side} operand is {dtype} rounded once more, to int8: normal weights then cause a "
    "relative error of .028 instead of .026, weights with outliers .06 and more instead of .025"
)
# From dequantized data to its codes there are a cast, scales and views.
_FARTHEST = 12
_SIDES = ("left", "right")


def of_site(site: DotSite) -> str:
    """The note on a captured dot; "" without a second rounding."""
    assert site.captured is not None
    if site.captured.compute is None:
        return _note(_before_codes(side.value) for side in site.captured.sides)
    facts = (fact for _, fact in site.given)
    return _note(fact.dtype if isinstance(fact, Scaled) else None for fact in facts)


def of_call(op: Op) -> str:
    """The note on a scaled dot of the function itself."""
    if op.params.get("kernel") != int8_form.IN_INT8:
        return _note(map(_before_codes, op.inputs[:2]))
    spec = op.params["spec"]
    return _note(np.dtype(side.dtype) for side in (spec.lhs, spec.rhs))


def _note(rounded: Iterable[np.dtype | None]) -> str:
    """The note on both operands, from the dtypes before the rounding."""
    pairs = zip(_SIDES, rounded, strict=True)
    return "; ".join(
        _COST.format(side=side, dtype=dtype.name)
        for side, dtype in pairs
        if dtype is not None and dtype in dtypes.FLOAT8
    )


def _before_codes(codes: Value) -> np.dtype | None:
    """The FP8 dtype behind int8 codes that the operation `quantize` made; None for others."""
    made = next((v for v in _behind(codes) if v.op is not None and v.op.name == "quantize"), None)
    if made is None or made.op is None or made.dtype != np.int8:
        return None
    return next((v.dtype for v in _behind(made.op.inputs[0]) if v.dtype in dtypes.FLOAT8), None)


def _behind(value: Value) -> Iterator[Value]:
    """The values of one size behind a value, nearest first."""
    front, seen = [value], {value}
    for _ in range(_FARTHEST):
        yield from front
        makers = [v.op for v in front if v.op is not None]
        behind = [v for op in makers for v in op.inputs if v.size == value.size and v not in seen]
        front = list(dict.fromkeys(behind))
        seen |= set(front)
