"""Rows quantized by the function itself, before a captured dot, on a GPU: one call makes them, too.

    y     = a norm, or an activation and a factor, of 16-bit rows
    scale = max(abs(y)) along the last axis, divided by the largest code
    codes = clip(round(y / scale)).astype(int8), or clip(y / scale).astype(float8)

Equal rows of several dots, such as query, key and value, are one call.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from jaxfp8._call.ops.produce_call import why_no_rows_kernel
from jaxfp8._call.reference.produce_reference import ProduceSpec, RowScale
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.plan import produced, quantized_rows, row_programs, row_scales
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.produced import Produced
from jaxfp8._rewrite.plan.quantized_rows import QuantizedRows
from jaxfp8._rewrite.plan.row_programs import RowProgram
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import dtypes

_READ = "something else reads what is quantized"
_OTHER_FORM = "it is not quantized as clip(x / scale), in float32, with a scale for each row"
_FUSED = (
    "XLA fuses the quantization with the operation before it, which is not a norm, an activation "
    "or a product of two arrays"
)
_CLIPPED = "its codes are clipped at -127, also in rows with NaN, whose scale is a number"


def produce_rows(body: Body, replaced: Replaced) -> Replaced:
    """The pass: calls make and quantize rows."""
    operands = list(quantized_rows.operands(body.walk))
    maker = _Maker(body.walk, replaced)
    answers = {codes: maker.answer(codes) for codes in dict.fromkeys(c for *_, c in operands)}
    possible = dict.fromkeys(one for one in answers.values() if isinstance(one, Produced))
    calls = produced.unread(body, replaced, possible)
    for site, index, codes in operands:
        answer = answers[codes]
        site.quantized[index] = "one call" if answer in calls else "as written"
        made = answer.row.name if isinstance(answer, Produced) else answer
        site.producers[index] = made if answer in calls or isinstance(answer, str) else _READ
    return produced.with_calls(replaced, calls)


class _Maker:
    """Makes the calls; one op for all equal codes."""

    def __init__(self, walk: Walk, replaced: Replaced) -> None:
        self._walk, self._replaced, self._number = walk, replaced, Numbering()
        self._norms = row_programs.Norms(self._number)
        self._outputs: dict[Hashable, tuple[Value, ...]] = {}

    def answer(self, codes: Value) -> Produced | str:
        """The call in place of codes, or the reason why there is none."""
        rows = quantized_rows.read(codes)
        if rows is None or rows.multiplies:
            return _OTHER_FORM
        x = quantized_rows.narrow(rows.x)
        why = why_no_rows_kernel(x.shape, x.dtype)
        if why is not None:
            return why
        scale = row_scales.read(rows.scale, codes.dtype, lambda op: self._is_amax(op, x))
        if isinstance(scale, str):
            return scale
        if _clips_rows_with_nan(rows, scale[0]):
            return _CLIPPED
        row = self._norms.read(x) or row_programs.elementwise(x, self._is_in_memory)
        if row is None or self._is_inside_call(row.x):
            return _FUSED
        return self._call(rows, x, row, *scale)

    def _call(
        self, rows: QuantizedRows, x: Value, row: RowProgram, rule: RowScale, amax: Op
    ) -> Produced:
        key = (self._number(x), rows.codes.dtype, rule)
        if key not in self._outputs:
            self._outputs[key] = _outputs(row, rows.codes.dtype, rule)
        codes, *of_rows = self._outputs[key]
        by_row = (row_scales.before_reshapes(rows.scale), amax.outputs[0])
        new = {
            old: casts.cast(graph.reshape(value, old.shape), old.dtype)
            for old, value in zip(by_row, of_rows, strict=True)
        }
        new[rows.codes] = codes
        laid_out = {old: graph.laid_out_like(value, old) for old, value in new.items()}
        return Produced(row, laid_out, None if row.x is x else x.op)

    def _is_in_memory(self, value: Value) -> bool:
        """Whether a value is in memory anyway."""
        if value in self._replaced:
            return True
        return produced.is_in_memory(value) and not self._is_inside_call(value)

    def _is_inside_call(self, value: Value) -> bool:
        """Whether a value is inside a captured dot. Its call may give another one, as float32."""
        return self._walk.product(value) is not None and value not in self._replaced

    def _is_amax(self, op: Op, x: Value) -> bool:
        """Whether an op is the largest |x| of each row."""
        of = quantized_rows.maximised(op)
        return (
            of is not None and len(op.params["axes"]) == 1 and self._number(of) == self._number(x)
        )


def _clips_rows_with_nan(rows: QuantizedRows, rule: RowScale) -> bool:
    """Whether the function may clip a value to a higher code than the call: not if |x| <= amax."""
    lowest = dtypes.finite_range(rows.codes.dtype)[0]
    return rows.lowest != lowest and not math.isnan(rule.of_nan)


def _outputs(row: RowProgram, dtype: np.dtype, rule: RowScale) -> tuple[Value, ...]:
    """The codes, the scales and the maxima of a call."""
    spec = ProduceSpec(
        dtype=dtype,
        rule=rule,
        norm=row.norm,
        activation=row.activation,
        has_factor=row.has_factor,
    )
    of_rows = ((*row.x.shape[:-1], 1), np.dtype(np.float32))
    types = ((row.x.shape, dtype), of_rows, of_rows)
    return produced.outputs_of(spec, (row.x, *row.others), types)
