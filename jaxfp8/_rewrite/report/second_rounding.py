"""The note of a row about a second rounding of FP8 data, to int8.

The cost in general is known beforehand. The values rounded to 0 depend on the data. A row counts
them for an operand made by a few operations from given arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxfp8._call.ops import int8_form
from jaxfp8._ops import int8_compute
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import ScaledDotSpec, Shape

# `tests/test_int8_compute.py` measures these.
_COST = (
    "is {dtype} rounded once more, to int8: normal weights then cause a relative error of .028 "
    "instead of .026, weights with outliers .06 and more instead of .025"
)
# From dequantised data to its codes there are a cast, scales and views.
_FARTHEST = 12
_SIDES = ("left", "right")


def of_site(site: DotSite) -> str:
    """The note on a captured dot; "" without a second rounding."""
    assert site.captured is not None
    if site.captured.compute is None:
        return "; ".join(_of_codes([side.value for side in site.captured.sides]))
    return "; ".join(
        _note(_SIDES[i], fact.dtype.name, value, site.contracting(i))
        for i, (value, fact) in enumerate(site.given)
        if isinstance(fact, Scaled) and dtypes.is_float8(fact.dtype)
    )


def of_call(op: Op) -> str:
    """The note on a scaled dot of the function itself."""
    spec: ScaledDotSpec = op.params["spec"]
    operands = list(zip(_SIDES, op.inputs[:2], (spec.lhs, spec.rhs), strict=True))
    if op.params.get("kernel") != int8_form.IN_INT8:
        codes = [value if side.dtype == "int8" else None for _, value, side in operands]
        return "; ".join(_of_codes(codes))
    return "; ".join(
        _note(name, side.dtype, value, side.contracting if value.dtype in dtypes.FLOAT8 else ())
        for name, value, side in operands
        if dtypes.is_float8(side.dtype)
    )


def _of_codes(codes: list[Value | None]) -> Iterator[str]:
    """The notes on int8 codes made of FP8 data by the operation `quantize`."""
    for name, value in zip(_SIDES, codes, strict=True):
        made = None if value is None else _maker(value)
        if made is None:
            continue
        x, spec = made.inputs[0], made.params["spec"]
        dtype = next((v.dtype.name for v in _behind(x) if v.dtype in dtypes.FLOAT8), None)
        if dtype is not None:
            lines = tuple(a for a, size in enumerate(x.shape) if spec.tiles[a] >= size > 1)
            yield _note(name, dtype, x, lines)


def _maker(codes: Value) -> Op | None:
    """The `quantize` behind int8 codes, through views."""
    for value in _behind(codes):
        if value.op is not None and value.op.name == "quantize":
            return value.op if value.dtype == np.int8 else None
    return None


def _behind(value: Value) -> Iterator[Value]:
    """The values of one size behind a value, nearest first."""
    front, seen = [value], {value}
    for _ in range(_FARTHEST):
        yield from front
        makers = [v.op for v in front if v.op is not None]
        behind = [v for op in makers for v in op.inputs if v.size == value.size and v not in seen]
        front = list(dict.fromkeys(behind))
        seen |= set(front)


def _note(side: str, dtype: str, value: Value, lines: Shape) -> str:
    text = f"the {side} operand {_COST.format(dtype=dtype)}"
    x = _evaluated(value)
    if x is None or not lines:
        return text
    lost = np.asarray(int8_compute.lost(x, lines))
    many = int((lost > int8_compute.MANY_LOST).sum())
    if not many:
        return text
    return (
        f"{text}; in {many} of its {lost.size} lines more than {int8_compute.MANY_LOST:.0%} of the "
        f"values become 0 (at most {lost.max():.0%}): keep this product in FP8"
    )


def _evaluated(value: Value) -> jax.Array | None:
    """The array of a value, if few operations make it of known arrays."""
    behind = list(graph.behind([value]))
    ops = {v.op for v in behind if v.op is not None}
    has_region = any(op.eqn is not None and any(compat.subjaxprs(op.eqn)) for op in ops)
    if len(ops) > _FARTHEST or has_region or any(op.effectful for op in ops):
        return None
    if any(v.op is None and v.literal is None and v.concrete is None for v in behind):
        return None
    return jax.numpy.asarray(constants.evaluated(value))
