"""What 8 bits cost a model, layer by layer: measured while it runs, worst first."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._ops import int8_compute
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value import tables
from jaxfp8._value.accuracy import Comparison, Error, pooled
from jaxfp8._value.dtypes import finite_range, is_float8
from jaxfp8._value.prepared import EightBitArray, PreparedArray, stored
from jaxfp8._value.qarray import QArray, scale_and_zero_point
from jaxfp8._value.spec import Shape
from jaxfp8._value.tiles import map_tiles

# A layer should stay wide if the error of its output exceeds 10 % (20 dB), or if it is 10 dB, a
# factor of three, worse than the median layer.
LEAST_DECIBELS = 20.0
BELOW_MEDIAN = 10.0
_HEAD = ("layer", "kind", "SQNR dB", "error", "past", "lost", "amax", "scale", "weight dB")
_LEGEND = (
    "error: relative L2 of a layer's output on its own input; past, lost: shares of its input (of "
    "its weight, if the input is not in 8 bits) that saturate, that become 0; amax, scale: likewise"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandError:
    """The error of an operand in 8 bits.

    Attributes:
      error: of its values.
      amax: largest finite magnitude.
      scale: least and largest scale.
      saturated: share of values past the range of the 8 bits.
      underflowed: share of values that are not 0 but become 0.
    """

    error: Error
    amax: float
    scale: tuple[float, float]
    saturated: float
    underflowed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondRounding:
    """What `compute="int8"` adds to the error of an FP8 weight.

    Attributes:
      error: of the weight in int8, against the weight in FP8.
      lines: how many lines it has, each with a scale in int8.
      lossy_lines: in how many of them more than 10 % of the values become 0.
      worst: the largest share of values of a line that become 0.
    """

    error: Error
    lines: int
    lossy_lines: int
    worst: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerError:
    """The error of one layer in 8 bits, on the inputs that it had.

    Attributes:
      path: its place in the model.
      kind: name of its class.
      recipe: name of its recipe.
      calls: how often it was called.
      output: error of its output, against the float layer on the same input.
      weight, activation: errors of its operands. None if the operand is not in 8 bits or its
        float values are unknown.
      second: what computing in int8 adds to the error of the weight; None where it is multiplied
        as it is stored.
    """

    path: str
    kind: str
    recipe: str
    calls: int
    output: Error
    weight: OperandError | None
    activation: OperandError | None
    second: SecondRounding | None = None

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise of the output, in dB."""
        return self.output.sqnr


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyReport:
    """The error of a model in 8 bits; prints as a table, worst layer first.

    Attributes:
      rows: one for each layer.
      total: error of the model's outputs.
      note: what the errors are measured against.
    """

    rows: tuple[LayerError, ...]
    total: Comparison
    note: str = ""

    @property
    def keep_wide(self) -> tuple[str, ...]:
        """Paths of the layers that are better kept in floats: below 20 dB, or 10 under the median.

        Pass `where=lambda path, layer: path not in report.keep_wide` to quantise the others.
        """
        finite = [row.sqnr for row in self.rows if math.isfinite(row.sqnr)]
        least = LEAST_DECIBELS
        if finite:
            least = max(least, statistics.median(finite) - BELOW_MEDIAN)
        return tuple(row.path for row in self.rows if not row.sqnr >= least)

    def to_json(self, indent: int | None = None) -> str:
        """Rows, totals and the suggestion as JSON; what is no finite number becomes a string."""
        rows = [{**dataclasses.asdict(row), "sqnr": row.sqnr} for row in self.rows]
        total = {
            "sqnr": self.total.sqnr,
            "relative_l2": self.total.relative_l2,
            "max_abs": self.total.max_abs,
        }
        whole = {"note": self.note, "total": total, "keep_wide": self.keep_wide, "rows": rows}
        return json.dumps(_plain(whole), indent=indent, allow_nan=False)

    def to_html(self) -> str:
        """The rows as an HTML table."""
        return tables.html(*self._table())

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return tables.text(*self._table())

    def _table(self) -> tuple[str, Any, Any, list[str]]:
        wide = self.keep_wide
        footer = [_LEGEND, *([self.note] if self.note else []), *_second_roundings(self.rows)]
        if wide:
            footer.append(f"better kept wide: {', '.join(wide)}")
        return f"outputs: {self.total.total}", _HEAD, [_cells(row) for row in self.rows], footer


def _cells(row: LayerError) -> tuple[str, ...]:
    shown = row.activation or row.weight
    weight = "" if row.weight is None else f"{row.weight.error.sqnr:.1f}"
    head = row.path, row.kind, f"{row.sqnr:.1f}", f"{row.output.relative_l2:.2g}"
    if shown is None:
        return *head, "", "", "", "", weight
    low, high = shown.scale
    scale = f"{high:.2g}" if low == high else f"{low:.1g}..{high:.1g}"
    shares = f"{shown.saturated:.2%}", f"{shown.underflowed:.2%}"
    return *head, *shares, f"{shown.amax:.3g}", scale, weight


def _second_roundings(rows: tuple[LayerError, ...]) -> list[str]:
    """What the second rounding to int8 costs, and where it sets many values to 0."""
    found = [(row.path, row.second) for row in rows if row.second is not None]
    if not found:
        return []
    errors = [second.error.relative_l2 for _, second in found]
    cost = (
        "FP8 weights are rounded once more, to int8: a relative error of "
        f"{statistics.median(errors):.2g} in the median layer, {max(errors):.2g} in the worst, on "
        "top of that of FP8"
    )
    share = f"{int8_compute.MANY_LOST:.0%}"
    lossy = [
        f"{path}: int8 sets more than {share} of the values to 0 in {second.lossy_lines} of "
        f"{second.lines} lines of its weight (at most {second.worst:.0%})"
        for path, second in found
        if second.lossy_lines
    ]
    return [cost, *lossy]


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite else str(value)


# Measuring


@dataclasses.dataclass(frozen=True)
class _Key:
    path: str
    kind: str
    recipe: str


def second_rounding(
    recipe: Recipe, weight: Any, contracting: Shape
) -> tuple[EightBitArray, Shape] | None:
    """An FP8 weight that is rounded once more, to int8, and the axes that its product sums over.

    None where the recipe multiplies it as it is stored.
    """
    if recipe.compute is None or not isinstance(weight, EightBitArray):
        return None
    codes = stored(weight.packed if isinstance(weight, PreparedArray) else weight)
    return (weight, contracting) if is_float8(codes.qvalue.dtype) else None


class Recorder:
    """Collects errors of layers while a model runs, traced or not, in loops or under vmap."""

    def __init__(self) -> None:
        self._seen: dict[_Key, list[dict[str, np.ndarray]]] = {}

    def layer(
        self,
        path: str,
        kind: str,
        recipe: str,
        *,
        exact: jax.Array,
        got: jax.Array,
        weight: tuple[Any, Any] | None = None,
        activation: tuple[Any, Any] | None = None,
        second: tuple[Any, Shape] | None = None,
    ) -> None:
        """Note one call of a layer.

        Args:
          path, kind, recipe: as in `LayerError`.
          exact, got: output of the float layer and of the 8-bit one, on one input.
          weight, activation: the float operand and what the product takes in its place; None, or
            a pair without a `QArray`, where it is not in 8 bits.
          second: as `second_rounding` gives it.
        """
        sums = _call_sums(exact, got, second, weight=weight, activation=activation)
        jax.debug.callback(functools.partial(self._note, _Key(path, kind, recipe)), sums)

    def layer_of(self, path: str, kind: str, recipe: str, **operands: Any) -> jax.Array:
        """As `layer`, noted when the value that this returns, `exact`, is computed.

        For places where a callback of its own is not allowed: the scan of linen checks that only
        its outputs depend on its inputs.
        """

        def note(sums: Any) -> np.ndarray:
            self._note(_Key(path, kind, recipe), sums)
            return np.zeros((), np.float32)

        sums, exact = _call_sums(**operands), operands["exact"]
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        return exact + jax.pure_callback(note, zero, sums, vmap_method="sequential").astype(
            exact.dtype
        )

    def _note(self, key: _Key, sums: dict[str, np.ndarray]) -> None:
        self._seen.setdefault(key, []).append({k: np.asarray(v) for k, v in sums.items()})

    def report(self, total: Comparison, note: str = "") -> AccuracyReport:
        """The report on all calls; call it after the model has run."""
        jax.effects_barrier()
        rows = [_row(key, calls) for key, calls in self._seen.items()]
        rows.sort(key=lambda row: (not math.isnan(row.sqnr), row.sqnr))
        return AccuracyReport(rows=tuple(rows), total=total, note=note)


def _call_sums(
    exact: jax.Array,
    got: jax.Array,
    second: tuple[Any, Shape] | None = None,
    **operands: tuple[Any, Any] | None,
) -> dict[str, jax.Array]:
    """What is kept of one call."""
    sums = {"output": _error_sums(exact, got)}
    if second is not None:
        sums["second"] = _second_sums(*second)
    for name, pair in operands.items():
        if pair is not None and isinstance(pair[1], QArray):
            sums[name] = _operand_sums(*pair)
    return sums


def _row(key: _Key, calls: list[dict[str, np.ndarray]]) -> LayerError:
    return LayerError(
        path=key.path,
        kind=key.kind,
        recipe=key.recipe,
        calls=len(calls),
        output=pooled(_error(call["output"]) for call in calls),
        weight=_operand([call["weight"] for call in calls if "weight" in call]),
        activation=_operand([call["activation"] for call in calls if "activation" in call]),
        second=_second([call["second"] for call in calls if "second" in call]),
    )


def _error(sums: np.ndarray) -> Error:
    signal, noise, largest = map(float, sums)
    return Error(signal=signal, noise=noise, max_abs=largest)


def _operand(calls: list[np.ndarray]) -> OperandError | None:
    """One operand over several calls; None if it never was in 8 bits."""
    if not calls:
        return None
    table = np.stack(calls).astype(np.float64)
    count, saturated, underflowed = table[:, 3:6].sum(0)
    return OperandError(
        error=pooled(_error(row[:3]) for row in table),
        amax=float(np.max(table[:, 6])),
        scale=(float(np.min(table[:, 7])), float(np.max(table[:, 8]))),
        saturated=float(saturated / max(count, 1)),
        underflowed=float(underflowed / max(count, 1)),
    )


def _second(calls: list[np.ndarray]) -> SecondRounding | None:
    """The second rounding of a weight, which is the same in every call."""
    if not calls:
        return None
    lines, lossy, worst = map(float, calls[0][3:])
    return SecondRounding(
        error=_error(calls[0][:3]), lines=int(lines), lossy_lines=int(lossy), worst=worst
    )


def _second_sums(q: Any, contracting: Shape) -> jax.Array:
    """The errors of an FP8 weight in int8; number of lines, of lossy ones, the largest share."""
    x = dequantize(q, jnp.float32)
    codes, scale = int8_compute.rounded(x, contracting)
    lost = int8_compute.lost(x, contracting)
    lossy = jnp.sum(lost > int8_compute.MANY_LOST)
    shares = [jnp.float32(v) for v in (lost.size, lossy, jnp.max(lost, initial=0))]
    return jnp.concatenate([_error_sums(x, codes.astype(jnp.float32) * scale), jnp.stack(shares)])


def _error_sums(exact: jax.Array, got: jax.Array) -> jax.Array:
    """Signal, noise and largest difference, in float32."""
    exact, got = exact.astype(jnp.float32), got.astype(jnp.float32)
    difference = got - exact
    sums = jnp.sum(exact**2), jnp.sum(difference**2), jnp.max(jnp.abs(difference), initial=0)
    return jnp.stack(sums)


def _operand_sums(x: jax.Array, q: QArray) -> jax.Array:
    """Those of an operand; number of values, saturated and underflowed ones; amax, scales."""
    x = x.astype(jnp.float32)
    rounded = dequantize(q, jnp.float32)
    scale, zero, tiles = scale_and_zero_point(q)
    low, high = finite_range(q.qvalue.dtype)
    shared = [scale] if zero is None else [scale, zero]

    def is_past(x: jax.Array, scale: jax.Array, zero: Any = 0) -> jax.Array:
        # Half a step past the last code still rounds to it.
        steps = x / jnp.where(scale == 0, 1, scale) + zero
        slack = 0.5 if jnp.issubdtype(q.qvalue.dtype, jnp.integer) else high / 32
        return (steps > high + slack) | (steps < low - slack)

    past = map_tiles(is_past, x, shared, tiles)
    finite = jnp.abs(jnp.where(jnp.isfinite(x), x, 0))
    counts = (
        x.size,
        jnp.sum(past),
        jnp.sum((x != 0) & (rounded == 0)),
        jnp.max(finite, initial=0),
        jnp.min(scale, initial=jnp.inf),
        jnp.max(scale, initial=0),
    )
    return jnp.concatenate([_error_sums(x, rounded), jnp.stack([jnp.float32(c) for c in counts])])
