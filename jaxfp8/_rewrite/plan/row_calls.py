"""Rows that the function quantises itself, before a captured dot, on a GPU: one call for all of it.

    y     = a norm, or an activation and a factor, of 16-bit rows
    scale = max(abs(y)) along the last axis, divided by the largest code
    codes = clip(round(y / scale)).astype(int8), or clip(y / scale).astype(float8)

What several dots quantise alike, as query, key and value do, is one call. Rows that something else
reads are not captured: they would be made twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._call.ops.produce_call import quantize_produced, why_no_rows_kernel
from jaxfp8._call.reference.produce_reference import ProduceSpec, RowScale
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.plan import encodings, row_programs, row_scales
from jaxfp8._rewrite.plan.encodings import Encoding
from jaxfp8._rewrite.plan.row_programs import Row
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import dtypes

Replaced = Mapping[Value, Value]

# What XLA does not fuse with what reads it.
_IN_MEMORY = ("dot_general", "ragged_dot_general", "conv_general_dilated", scaled_dot_p.name)
_READ = "something else reads what is quantised"
_OTHER_FORM = "it is not quantised as clip(x / scale), in float32, with a scale for each row"
_FUSED = (
    "XLA fuses the quantisation with the operation before it, which is not a norm, an activation "
    "or a product of two arrays"
)
_CLIPPED = "its codes are clipped at -127, also in rows with NaN, whose scale is a number"


@dataclasses.dataclass(frozen=True, eq=False)
class RowCall:
    """A call that gives codes, scales and maxima.

    Attributes:
      row: what it makes the rows of.
      replaced: for the codes, the scale and the maxima, its outputs.
      swallowed: the op that makes the rows. If anything else reads them the call is dropped. None
        where the rows are `x`.
    """

    row: Row
    replaced: Replaced
    swallowed: Op | None


def schedule(walk: Walk, replaced: Replaced, order: Callable[[Replaced], Program]) -> Program:
    """The program with calls in place of rows that its captured dots quantise.

    Args:
      walk: the walk, with its dots resolved.
      replaced: the values that captured dots replace.
      order: makes the program of all that is replaced.
    """
    found = find(walk, replaced)
    calls = {one for one in found.values() if isinstance(one, RowCall)}
    while True:
        program = order({k: v for one in calls for k, v in one.replaced.items()} | dict(replaced))
        ops = {op for op, _ in program.ops}
        read = {one for one in calls if one.swallowed in ops}
        if not read:
            break
        calls -= read
    for (site, index), one in found.items():
        is_call = isinstance(one, RowCall) and one in calls
        site.quantized[index] = "one call" if is_call else "as written"
        site.producers[index] = _note(one, is_call=is_call)
    return program


def _note(one: RowCall | str, *, is_call: bool) -> str:
    if isinstance(one, str):
        return one
    return one.row.name if is_call else _READ


def find(walk: Walk, replaced: Replaced) -> dict[tuple[DotSite, int], RowCall | str]:
    """For each operand that a program quantises itself, its call, or why there is none."""
    maker = _Maker(walk, replaced)
    known: dict[Value, RowCall | str] = {}
    found: dict[tuple[DotSite, int], RowCall | str] = {}
    for site in walk.own:
        for index, (_, fact) in enumerate(site.given if site.captured is not None else ()):
            codes = fact.origin if isinstance(fact, Scaled) else None
            if codes is None or not encodings.is_cast(codes):
                continue
            if codes not in known:
                known[codes] = maker.call(codes)
            found[site, index] = known[codes]
    return found


class _Maker:
    """Makes the calls; one op for all codes that are made alike."""

    def __init__(self, walk: Walk, replaced: Replaced) -> None:
        self._walk, self._replaced, self._number = walk, replaced, Numbering()
        self._norms = row_programs.Norms(self._number)
        self._made: dict[Hashable, Op] = {}

    def call(self, codes: Value) -> RowCall | str:
        """What may take the place of codes, or why nothing does."""
        encoding = encodings.encoding_of(self._walk, codes)
        if encoding is None or encoding.multiplies:
            return _OTHER_FORM
        encoding = dataclasses.replace(encoding, x=_narrow(encoding.x))
        why = why_no_rows_kernel(encoding.x.shape, encoding.x.dtype)
        if why is not None:
            return why
        made = row_scales.read(encoding.scale, codes.dtype, self._amax_of(encoding))
        if isinstance(made, str):
            return made
        if _clips_rows_with_nan(encoding, made[0]):
            return _CLIPPED
        row = self._norms.read(encoding.x) or row_programs.elementwise(encoding.x, self._stands)
        if row is None or self._is_inside_call(row.x):
            return _FUSED
        return self._call(encoding, row, *made)

    def _call(self, encoding: Encoding, row: Row, rule: RowScale, amax: Op) -> RowCall:
        dtype = encoding.codes.dtype
        key = (self._number(encoding.x), dtype, rule)
        if key not in self._made:
            self._made[key] = _op(row, dtype, rule)
        codes, *of_rows = self._made[key].outputs
        found = (row_scales.before_reshapes(encoding.scale), amax.outputs[0])
        new = {
            old: casts.cast(graph.reshape(value, old.shape), old.dtype)
            for old, value in zip(found, of_rows, strict=True)
        }
        new[encoding.codes] = codes
        laid_out = {old: graph.laid_out_like(value, old) for old, value in new.items()}
        return RowCall(row, laid_out, None if row.x is encoding.x else encoding.x.op)

    def _stands(self, value: Value) -> bool:
        """Whether a value is in memory anyway."""
        if value in self._replaced or value.op is None:
            return True
        return value.op.name in _IN_MEMORY and not self._is_inside_call(value)

    def _is_inside_call(self, value: Value) -> bool:
        """Whether a value is of a captured dot, which gives another one: as float32, say."""
        return self._walk.product(value) is not None and value not in self._replaced

    def _amax_of(self, encoding: Encoding) -> Callable[[Op], bool]:
        """Whether an op is the largest |x| of each row."""

        def is_amax(op: Op) -> bool:
            magnitudes = graph.producer(op.inputs[0], "abs") if op.name == "reduce_max" else None
            if magnitudes is None:
                return False
            x = _narrow(magnitudes.inputs[0])
            alike = self._number(x) == self._number(encoding.x)
            return alike and tuple(op.params["axes"]) == (len(x.shape) - 1,)

        return is_amax


def _clips_rows_with_nan(encoding: Encoding, rule: RowScale) -> bool:
    """Whether a value may be clipped that the call gives a lower code: not where |x| <= amax."""
    lowest = dtypes.finite_range(encoding.codes.dtype)[0]
    return encoding.lowest != lowest and not math.isnan(rule.of_nan)


def _narrow(x: Value) -> Value:
    """The 16-bit array that was widened to `x`; else `x`."""
    op = graph.producer(x, "convert_element_type")
    is_wider = op is not None and x.dtype == np.float32 and op.inputs[0].dtype.itemsize == 2
    return op.inputs[0] if op is not None and is_wider else x


def _op(row: Row, dtype: np.dtype, rule: RowScale) -> Op:
    spec = ProduceSpec(
        dtype=dtype,
        rule=rule,
        norm=row.norm,
        activation=row.activation,
        has_factor=row.has_factor,
    )
    run = functools.partial(quantize_produced, spec=spec)
    op = Op("quantize_produced", (row.x, *row.others), run, {})
    of_rows = (*row.x.shape[:-1], 1)
    op.outputs = (
        Value(row.x.shape, dtype, op),
        *(Value(of_rows, np.dtype(np.float32), op, index) for index in (1, 2)),
    )
    return op


def is_for_here() -> bool:
    """Whether programs are for a GPU."""
    return targets.platform() == "cuda"
