"""The error of a model from 8 bits, layer by layer, worst first."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jaxfp8._ops import int8_compute
from jaxfp8._value import tables
from jaxfp8._value.accuracy import Comparison, Error
from jaxfp8._value.spec import Shape

# A layer should stay wide if the error of its output exceeds 10 % (20 dB), or if it is 10 dB, a
# factor of three, worse than the median layer.
LEAST_DECIBELS = 20.0
BELOW_MEDIAN = 10.0
_WHOLE, _PARTS = ("SQNR dB", "error"), ("weight dB", "input dB")
_HEAD = ("layer", "kind", *_WHOLE, *_PARTS, "past", "lost", "amax", "scale")
_LEGEND = (
    "SQNR, error: relative L2 of a layer's output on its own input; weight, input: SQNR of these "
    "alone; past, lost: shares of its input (of its weight, if the input is not in 8 bits) that "
    "saturate, that become 0; amax, scale: likewise; a..b: the least and the largest of such layers"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandError:
    """The error of an operand in 8 bits.

    Attributes:
      error: of its values.
      amax: largest finite magnitude.
      scale: least and largest scale.
      saturated: share of values past the range of the 8 bits.
      underflowed: share of values rounded from nonzero to 0.
    """

    error: Error
    amax: float
    scale: tuple[float, float]
    saturated: float
    underflowed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondRounding:
    """Additional error of an FP8 weight from `compute="int8"`.

    Attributes:
      error: of the weight in int8, against the weight in FP8.
      lines: the number of lines, each with a scale in int8.
      lossy_lines: the number of lines with more than 10 % of the values becoming 0.
      worst: the largest share of values of a line that become 0.
    """

    error: Error
    lines: int
    lossy_lines: int
    worst: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerError:
    """The error of one layer in 8 bits, on its own inputs.

    Attributes:
      path: its place in the model.
      kind: name of its class.
      recipe: name of its recipe.
      shape: shape of its weight.
      calls: number of calls.
      output: error of its output, against the float layer on the same input. It is the whole error,
        of all roundings, unless the note of the report says otherwise.
      weight, activation: errors of its operands. None if the operand is not in 8 bits or its
        float values are unknown.
      second: additional error of the weight in int8; None if it is multiplied as stored.
    """

    path: str
    kind: str
    recipe: str
    shape: Shape
    calls: int
    output: Error
    weight: OperandError | None
    activation: OperandError | None
    second: SecondRounding | None = None

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise of the output, in dB."""
        return self.output.sqnr


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyReport:
    """The error of a model in 8 bits; prints as a table, worst layer first.

    Layers print as one row if their paths differ only in numbers, and kind, recipe and shape are
    equal. The row has the least and the largest figure. Layers better kept wide stand apart.

    Attributes:
      rows: one for each layer.
      total: error of the model's outputs, of all roundings.
      weights: the part of it from rounding weights: outputs of the model with dequantized weights,
        against the float model's. None unless both operands of a layer are in 8 bits.
      activations: the part from rounding activations: outputs of the 8-bit model, against the model
        with dequantized weights. None likewise.
      note: the part missing from the errors; "" if they are whole.
    """

    rows: tuple[LayerError, ...]
    total: Comparison
    weights: Comparison | None = None
    activations: Comparison | None = None
    note: str = ""

    @property
    def keep_wide(self) -> tuple[str, ...]:
        """Paths of the layers better kept in floats: below 20 dB, or 10 under the median.

        Pass `where=lambda path, layer: path not in report.keep_wide` to quantize the others.
        """
        finite = [row.sqnr for row in self.rows if math.isfinite(row.sqnr)]
        least = LEAST_DECIBELS
        if finite:
            least = max(least, statistics.median(finite) - BELOW_MEDIAN)
        return tuple(row.path for row in self.rows if not row.sqnr >= least)

    def to_json(self, indent: int | None = None) -> str:
        """Rows, totals and the suggestion as JSON; a non-finite number becomes a string."""
        rows = [{**dataclasses.asdict(row), "sqnr": row.sqnr} for row in self.rows]
        parts = {"total": self.total, "weights": self.weights, "activations": self.activations}
        figures = {name: part and _figures(part) for name, part in parts.items()}
        whole = {"note": self.note, **figures, "keep_wide": self.keep_wide, "rows": rows}
        return tables.json(whole, indent)

    def to_html(self) -> str:
        """The rows as an HTML table."""
        return tables.html(*self._table())

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return tables.text(*self._table())

    def _table(self) -> tuple[str, Any, Any, list[str]]:
        wide = self.keep_wide
        footer = [_LEGEND, *_second_roundings(self.rows)]
        if wide:
            footer.append(f"better kept wide: {', '.join(wide)}")
        return self._title(), _HEAD, [_cells(rows) for rows in _alike(self.rows, wide)], footer

    def _title(self) -> str:
        """The error of the outputs; the whole one stands first, and its parts after it."""
        title = f"outputs{', ' if self.note else ''}{self.note}: {self.total.total}"
        parts = (("weights", self.weights), ("activations", self.activations))
        lines = [f"  of rounding {name} alone: {part.total}" for name, part in parts if part]
        return "\n".join([title, *lines])


def _figures(compared: Comparison) -> dict[str, float]:
    return {name: getattr(compared, name) for name in ("sqnr", "relative_l2", "max_abs")}


def _alike(rows: Sequence[LayerError], wide: Sequence[str]) -> list[list[LayerError]]:
    """Rows grouped by all but their figures and the numbers in their paths, in order."""
    groups: dict[Any, list[LayerError]] = {}
    for row in rows:
        named = tables.numberless(row.path), row.kind, row.recipe, row.shape, row.calls
        operands = row.weight is None, row.activation is None
        key = (*named, *operands, row.path in wide, math.isnan(row.sqnr))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cells(rows: list[LayerError]) -> tuple[str, ...]:
    """The cells of equal layers."""
    first, many = rows[0], f"{len(rows)} x " if len(rows) > 1 else ""
    weights, inputs = ([getattr(row, name) for row in rows] for name in ("weight", "activation"))
    shown = [operand for operand in (inputs if first.activation else weights) if operand]
    return (
        tables.starred({row.path for row in rows}),
        many + first.kind,
        _span([row.sqnr for row in rows], ".1f"),
        _span([row.output.relative_l2 for row in rows], ".2g"),
        *(_span([o.error.sqnr for o in operands if o], ".1f") for operands in (weights, inputs)),
        _span([operand.saturated for operand in shown], ".2%"),
        _span([operand.underflowed for operand in shown], ".2%"),
        _span([operand.amax for operand in shown], ".3g"),
        _span([scale for operand in shown for scale in operand.scale], ".2g", ".1g"),
    )


def _span(values: Sequence[float], form: str, form_of_several: str = "") -> str:
    """A figure, or the least and the largest of several; "" of none."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if f"{low:{form}}" == f"{high:{form}}":
        return f"{high:{form}}"
    form = form_of_several or form
    return f"{low:{form}}..{high:{form}}"


def _second_roundings(rows: tuple[LayerError, ...]) -> list[str]:
    """The error of the second rounding to int8, and the layers with many values set to 0."""
    seconds = [(row.path, row.second) for row in rows if row.second is not None]
    if not seconds:
        return []
    errors = [second.error.relative_l2 for _, second in seconds]
    cost = (
        "FP8 weights are rounded once more, to int8: a relative error of "
        f"{statistics.median(errors):.2g} in the median layer, {max(errors):.2g} in the worst, on "
        "top of that of FP8"
    )
    share = f"{int8_compute.MANY_LOST:.0%}"
    lossy = [
        f"{path}: int8 sets more than {share} of the values to 0 in {second.lossy_lines} of "
        f"{second.lines} lines of its weight (at most {second.worst:.0%})"
        for path, second in seconds
        if second.lossy_lines
    ]
    return [cost, *lossy]
