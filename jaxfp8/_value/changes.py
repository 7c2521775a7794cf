"""The changes to a model's weights: one row per weight, printed as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxfp8._value import tables

_HEAD = ("where", "kind", "weight", "becomes", "recipe, or why not", "SQNR dB", "bytes")
_SQNR = _HEAD.index("SQNR dB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """The change to one weight.

    Attributes:
      path: path of its layer in the model, such as "layers/0/query"; the path of the parameter
        itself if its layer has no 8-bit twin.
      kind: name of the class of that layer, or of the parameter's module.
      shape: shape of the weight.
      before, after: dtypes of the weight.
      recipe: name of the recipe; "" if the weight stayed as it was.
      reason: why the weight stayed as it was; "" if it was changed.
      bytes_before, bytes_after: of weight, scale and zero point, without the bias.
      sqnr: signal to quantization noise of the weight, in dB; None if it was not measured.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    before: str
    after: str
    recipe: str
    reason: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes to a model; prints as a table, equal rows merged.

    Attributes:
      rows: one per weight, wide ones included, in the order of the model.
      others: number of parameters without a row: biases and scales of Flax's layers, and arrays
        with fewer than two axes.
      other_bytes: bytes of these.
      left_scales: static scales of inputs in a checkpoint, for layers whose recipes choose others.
    """

    rows: tuple[Change, ...]
    others: int = 0
    other_bytes: int = 0
    left_scales: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Change], others: Sequence[Any] = ()) -> Changes:
        """With parameters that have no row."""
        return cls(rows=tuple(rows), others=len(others), other_bytes=nbytes(others))

    @property
    def changed(self) -> tuple[Change, ...]:
        """The changed weights."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left(self) -> tuple[Change, ...]:
        """The unchanged weights."""
        return tuple(row for row in self.rows if row.reason)

    @property
    def bytes_saved(self) -> int:
        """Bytes saved on weights; negative after `dequantize`."""
        return sum(row.bytes_before - row.bytes_after for row in self.rows)

    def to_json(self, indent: int | None = None) -> str:
        """All rows, and totals, as JSON."""
        names = ("bytes_saved", "others", "other_bytes", "left_scales")
        totals = {name: getattr(self, name) for name in names}
        rows = [dataclasses.asdict(row) for row in self.rows]
        return tables.json({**totals, "rows": rows}, indent)

    def to_html(self) -> str:
        """The table as HTML."""
        return tables.html(self._title(), *self._table(), self._footer())

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return tables.text(self._title(), *self._table(), self._footer())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Head and rows. Weights that differ in their error alone print as one, with its range."""
        errors = {row.path: row.sqnr for row in self.rows}
        groups = tables.alike(dataclasses.replace(row, sqnr=None) for row in self.rows)
        cells = [_HEAD, *(_cells(rows, [errors[row.path] for row in rows]) for rows in groups)]
        if all(error is None for error in errors.values()):
            cells = [row[:_SQNR] + row[_SQNR + 1 :] for row in cells]
        return cells[0], cells[1:]

    def _title(self) -> str:
        before, after = (
            sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after")
        )
        return (
            f"{len(self.changed)} of {len(self.rows)} weights changed; they were "
            f"{tables.size(before)}, are {tables.size(after)}"
        )

    def _footer(self) -> list[str]:
        lines = []
        if self.others:
            what = "biases, scales and parameters with fewer than two axes are not listed"
            lines.append(f"{self.others} {what}, {tables.size(self.other_bytes)}")
        if self.left_scales:
            what = "static scales of inputs are left out, since the recipe chooses its own"
            names = ", ".join(sorted(set(map(tables.numberless, self.left_scales))))
            lines.append(f"{len(self.left_scales)} {what}: {names}")
        return lines


def change(
    path: str, kind: type, before: Any, after: Any, *, recipe: str = "", reason: str = ""
) -> Change:
    """The row of a weight before and after: arrays, 8-bit arrays, shapes, or dictionaries.

    `path` and `kind` are of its layer, or of the weight and its module without an 8-bit twin.
    """
    return Change(
        path=path,
        kind=kind.__name__,
        shape=tuple(_of_codes(before, "shape")),
        before=str(_of_codes(before, "dtype")),
        after=str(_of_codes(after, "dtype")),
        recipe="" if reason else recipe,
        reason=reason,
        bytes_before=nbytes(before),
        bytes_after=nbytes(after),
    )


def _of_codes(held: Any, name: str) -> Any:
    """An attribute of a weight, or of its first array: the codes."""
    if name == "shape" and hasattr(held, "shape"):
        return held.shape
    return getattr(jax.tree.leaves(held)[0], name)


def nbytes(tree: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# Modules of Flax's layers and ours. Flax also has a module there that is not a layer.
_LAYERS = ("flax.nnx.nn.", "flax.linen.", "jaxfp8.nnx.", "jaxfp8.linen.")
_BASE = "flax.linen.module"


def _layer(kind: type) -> str:
    """Name of a layer class, or of its base layer; "" if there is none."""
    for base in kind.__mro__:
        if base.__module__.startswith(_LAYERS) and base.__module__ != _BASE:
            return base.__name__
    return ""


def has_no_row(kind: type, name: str, axes: int) -> bool:
    """Whether a parameter is too small to be listed: a bias or scale of a layer, or a vector."""
    return axes < 2 or (name in ("bias", "scale") and _layer(kind) != "")


def why_wide(kind: type) -> str:
    """Why a parameter stays in floats; not for weights of layers with an 8-bit twin."""
    layer = _layer(kind)
    if layer:
        return f"{layer} has no 8-bit twin"
    return "it is no layer's weight; `jaxfp8.quantize_dots` can run its products in 8 bits"


def _cells(rows: list[Change], errors: list[float | None]) -> tuple[str, ...]:
    """The cells of weights whose paths differ only in numbers."""
    row, many = rows[0], f"{len(rows)} x " if len(rows) > 1 else ""
    before, after = (tables.size(len(rows) * n) for n in (row.bytes_before, row.bytes_after))
    weight = f"{row.before}[{','.join(map(str, row.shape))}]"
    becomes, why = ("as it was", row.reason) if row.reason else (row.after, row.recipe)
    sizes = before if row.reason else f"{before} -> {after}"
    path = tables.starred({row.path for row in rows})
    shown = [f"{error:.1f}" for error in sorted(e for e in errors if e is not None)]
    sqnr = "..".join(dict.fromkeys(shown[:1] + shown[-1:]))
    return path, many + row.kind, weight, becomes, why, sqnr, sizes
