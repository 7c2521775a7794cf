"""What a row says of FP8 data that is rounded once more, to int8.

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
from jaxfp8._value.spec import OperandSpec, Shape

# `tests/test_int8_compute.py` measures these.
_COST = (
    "is {dtype} rounded once more, to int8: normal weights then cause a relative error of .028 "
    "instead of .026, weights with outliers .06 and more instead of .025"
)
# From dequantised data to its codes there are a cast, scales and views.
_FARTHEST = 12
_SIDES = ("left", "right")


def of_site(site: DotSite) -> str:
    """The note on a captured dot; "" where nothing is rounded a second time."""
    assert site.captured is not None
    if site.captured.compute is None:
        return _of_codes([side.value for side in site.captured.sides])
    notes = []
    for i, (value, fact) in enumerate(site.given):
        if isinstance(fact, Scaled) and dtypes.is_float8(fact.dtype):
            notes.append(_note(_SIDES[i], fact.dtype.name, value, site.contracting(i)))
    return "; ".join(notes)


def of_call(op: Op) -> str:
    """The note on a scaled dot that the function holds already."""
    spec = op.params["spec"]
    sides: tuple[OperandSpec, OperandSpec] = (spec.lhs, spec.rhs)
    if op.params.get("kernel") == int8_form.IN_INT8:
        return _of_stored(op, sides)
    codes = zip(op.inputs[:2], sides, strict=True)
    return _of_codes([value if side.dtype == "int8" else None for value, side in codes])


def _of_stored(op: Op, sides: tuple[OperandSpec, OperandSpec]) -> str:
    """The note on FP8 operands of a scaled dot that rounds them itself."""
    notes = []
    for name, value, side in zip(_SIDES, op.inputs[:2], sides, strict=True):
        if dtypes.is_float8(side.dtype):
            lines = side.contracting if value.dtype in dtypes.FLOAT8 else ()
            notes.append(_note(name, side.dtype, value, lines))
    return "; ".join(notes)


def _of_codes(codes: list[Value | None]) -> str:
    """The note on int8 codes that were made of FP8 data by the operation `quantize`."""
    notes = []
    for name, value in zip(_SIDES, codes, strict=True):
        made = None if value is None else _maker(value)
        if made is None:
            continue
        x, spec = made.inputs[0], made.params["spec"]
        dtype = next((v.dtype.name for v in _behind(x) if v.dtype in dtypes.FLOAT8), None)
        if dtype is not None:
            lines = tuple(a for a, size in enumerate(x.shape) if spec.tiles[a] >= size > 1)
            notes.append(_note(name, dtype, x, lines))
    return "; ".join(notes)


def _maker(codes: Value) -> Op | None:
    """The `quantize` that made int8 codes, through views."""
    for value in _behind(codes):
        if value.op is not None and value.op.name == "quantize":
            return value.op if value.dtype == np.int8 else None
    return None


def _behind(value: Value) -> Iterator[Value]:
    """The values of one size that a value was made of, nearest first."""
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
    """The array that a value is, where few operations make it of arrays that are known."""
    behind = list(graph.behind([value]))
    ops = {v.op for v in behind if v.op is not None}
    if len(ops) > _FARTHEST or any(op.effectful or _is_region(op) for op in ops):
        return None
    if any(v.op is None and v.literal is None and v.concrete is None for v in behind):
        return None
    return jax.numpy.asarray(constants.evaluated(value))


def _is_region(op: Op) -> bool:
    return op.eqn is not None and any(compat.subjaxprs(op.eqn))
