"""What quantising a checkpoint cost: a row for each tensor that could have been changed."""

from __future__ import annotations

import dataclasses
import json
import math

from jaxfp8._value import tables

_HEAD = ("name", "was", "is", "SQNR dB", "why not", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """What became of one tensor.

    Attributes:
      path: its name.
      before: dtype and shape in the source.
      shape: its shape.
      after: dtype of its codes; "" where it was left.
      sqnr: signal to quantisation noise of the weight, in dB; None where it was left.
      reason: why it was left; "" where it was not.
      bytes_before, bytes_after: in the files, scale and zero point included.
    """

    path: str
    before: str
    shape: tuple[int, ...]
    after: str
    sqnr: float | None
    reason: str
    bytes_before: int
    bytes_after: int

    def __post_init__(self) -> None:
        """A shape that was read from JSON is a list."""
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedCheckpoint:
    """What became of a checkpoint; prints as a table, in which rows that are alike are one.

    Attributes:
      path: where the new one is.
      recipe: name of the recipe.
      rows: one for each tensor.
    """

    path: str
    recipe: str
    rows: tuple[QuantizedTensor, ...]

    @property
    def changed(self) -> tuple[QuantizedTensor, ...]:
        """The weights that are in 8 bits now, worst first."""
        rows = (row for row in self.rows if row.sqnr is not None)
        return tuple(sorted(rows, key=lambda row: row.sqnr or 0.0))

    @property
    def left(self) -> tuple[QuantizedTensor, ...]:
        """What stays in floats."""
        return tuple(row for row in self.rows if row.sqnr is None)

    def to_json(self, indent: int | None = None) -> str:
        """All rows as JSON; a number that is not finite becomes a text."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        for row in rows:
            if row["sqnr"] is not None and not math.isfinite(row["sqnr"]):
                row["sqnr"] = str(row["sqnr"])
        content = {"path": self.path, "recipe": self.recipe, "rows": rows}
        return json.dumps(content, indent=indent, allow_nan=False)

    def __str__(self) -> str:
        before, after = (
            tables.size(sum(getattr(row, name) for row in self.rows))
            for name in ("bytes_before", "bytes_after")
        )
        title = (
            f"{self.path}: {self.recipe}; {len(self.changed)} weights in 8 bits, {len(self.left)} "
            f"tensors left; {before} -> {after}"
        )
        # Rows that differ in their error alone print as one, with the range of it.
        matrices = [row for row in self.left if len(row.shape) > 1]
        vectors = [row for row in self.left if len(row.shape) < 2]
        shown = (dataclasses.replace(r, sqnr=r.sqnr and 0.0) for r in [*self.changed, *matrices])
        errors = {row.path: row.sqnr for row in self.rows}
        size = tables.size(sum(row.bytes_after for row in vectors))
        footer = [f"{len(vectors)} tensors with fewer than two axes, {size}"] if vectors else []
        return tables.text(title, _HEAD, [_cells(r, errors) for r in tables.alike(shown)], footer)


def _cells(rows: list[QuantizedTensor], errors: dict[str, float | None]) -> tuple[str, ...]:
    row, many = rows[0], f"{len(rows)} x " if len(rows) > 1 else ""
    found = [e for e in (errors[row.path] for row in rows) if e is not None]
    sqnr = ""
    if found:
        low, high = min(found), max(found)
        sqnr = f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}..{high:.1f}"
    before = tables.size(sum(r.bytes_before for r in rows))
    after = tables.size(sum(r.bytes_after for r in rows))
    path = tables.starred({row.path for row in rows})
    sizes = before if row.reason else f"{before} -> {after}"
    return path, many + row.before, row.after or "as it was", sqnr, row.reason, sizes
