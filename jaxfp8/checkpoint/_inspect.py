"""The contents of a checkpoint and the form they would load in, without reading weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from jaxfp8._value import tables
from jaxfp8.checkpoint import _collector, _decode, _formats, _read
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._folder import Folder
from jaxfp8.checkpoint._header import Entry
from jaxfp8.checkpoint._items import Layout
from jaxfp8.checkpoint._plan import Plan
from jaxfp8.checkpoint._scheme import Format

_HEAD = ("name", "file has", "loads as", "scale", "activations, or why not in 8 bits", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One array of a checkpoint.

    Attributes:
      path: its name.
      stored: dtype and shape in the file.
      shape: its shape.
      loads: "QArray", or the dtype of an array; "" if it would not load.
      scale: of an 8-bit weight, its granularity and dtype; else "".
      note: the configuration of activations, or why it is no 8-bit weight.
      nbytes: bytes in the files, its scale included.
    """

    path: str
    stored: str
    shape: tuple[int, ...]
    loads: str
    scale: str
    note: str
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """What a checkpoint holds; prints as a table, with one row for equal ones.

    Weights in 8 bits come first; arrays of fewer than two axes are summed up below.

    Attributes:
      path: its path.
      format: name of its format.
      files: how many files it has.
      rows: one for each array.
      problems: why it would not load; empty if it would.
    """

    path: str
    format: str
    files: int
    rows: tuple[StoredTensor, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(row.nbytes for row in self.rows)

    @property
    def in_floats(self) -> tuple[StoredTensor, ...]:
        """What is no 8-bit weight."""
        return tuple(row for row in self.rows if row.loads and not row.scale)

    @property
    def unread(self) -> tuple[StoredTensor, ...]:
        """What would not load."""
        return tuple(row for row in self.rows if not row.loads)

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        eight, floats, unread = [r for r in self.rows if r.scale], self.in_floats, self.unread
        title = (
            f"{self.path}: {self.format}; {self.files} file{'s' * (self.files != 1)}, "
            f"{tables.size(self.nbytes)}\n{len(eight)} weights in 8 bits, {_size(eight)}; "
            f"{len(floats)} other arrays, {_size(floats)}"
        )
        if unread:
            title += f"; {len(unread)} tensors that would not load, {_size(unread)}"
        matrices = [row for row in floats if len(row.shape) > 1]
        vectors = [row for row in floats if len(row.shape) < 2]
        alike: dict[str, list[str]] = {}
        for problem in self.problems:
            alike.setdefault(tables.numberless(problem), []).append(problem)
        footer = [
            f"would not load: {first}" + (f" ({len(rest)} more alike)" if rest else "")
            for first, *rest in alike.values()
        ]
        if vectors:
            footer.insert(0, f"{len(vectors)} arrays with fewer than two axes, {_size(vectors)}")
        shown = [_cells(rows) for rows in tables.alike([*eight, *matrices, *unread])]
        return tables.text(title, _HEAD, shown, footer)


def summary(
    path: str, folder: Folder, form: Format, planned: Plan, *, values: bool = False
) -> CheckpointSummary:
    """What an open checkpoint holds.

    Args:
      path: its path.
      folder: its files.
      form: its configuration.
      planned: how it becomes arrays.
      values: whether to read all scales, in search of values that `load` refuses.
    """
    bad = _bad_scales(folder, planned) if values else ()
    with _collector.paused():
        layouts = {item.layout for item in planned.items.values()}
        fields = {layout: _fields(layout) for layout in layouts}
        rows = [_row(item.name, fields[item.layout]) for item in planned.items.values()]
        rows += map(_row_of_unread, planned.unread)
    return CheckpointSummary(
        path=path,
        format=_named(form, layouts, folder.writer),
        files=len(folder.files),
        rows=tuple(rows),
        problems=tuple(str(problem) for problem in (*planned.problems, *bad)),
    )


def _bad_scales(folder: Folder, planned: Plan) -> Iterator[CheckpointError]:
    """The errors of scales that `load` would refuse for their values."""
    for item in planned.items.values():
        if item.scale is not None:
            index = tuple(slice(0, n) for n in item.scale.shape)
            read = _decode.values(folder.files[item.scale.entry.file], item.scale, index)
            try:
                _read.check_scale(item.scale, read)
            except CheckpointError as error:
                yield error


def _named(form: Format, layouts: Iterable[Layout], writer: str) -> str:
    """The format; without a configuration, the writers of its names and of its marks."""
    if form.name != _formats.BY_TENSORS:
        return form.name
    writers = sorted({writer, *(layout.writer for layout in layouts if layout.scale)} - {""})
    return f"{form.name}, as {' and '.join(writers)} names them" if writers else form.name


def _row(name: str, fields: dict[str, Any]) -> StoredTensor:
    """The row of an item. Its fields are put in at once: a frozen class sets one by one."""
    made = object.__new__(StoredTensor)
    made.__dict__.update(fields, path=name)
    return made


def _fields(layout: Layout) -> dict[str, Any]:
    """The fields that thousands of rows share."""
    value, scale, words = layout.value, layout.scale, ""
    if scale is not None:
        zero = ", zero point" if layout.zero_point else ""
        words = f"{layout.granularity}, {scale.dtype.name}{zero}"
    return {
        "path": "",  # comes first in a row
        "stored": str(value.entry),
        "shape": value.shape,
        "loads": value.dtype.name if scale is None else "QArray",
        "scale": words,
        "note": layout.reason or layout.activations,
        "nbytes": layout.nbytes,
    }


def _row_of_unread(entry: Entry) -> StoredTensor:
    return StoredTensor(
        path=entry.name,
        stored=str(entry),
        shape=entry.shape,
        loads="",
        scale="",
        note="would not load, as said below",
        nbytes=entry.nbytes,
    )


def _cells(rows: list[StoredTensor]) -> tuple[str, ...]:
    row, many = rows[0], f"{len(rows)} x " if len(rows) > 1 else ""
    path = tables.starred({row.path for row in rows})
    return path, many + row.stored, row.loads, row.scale, row.note, _size(rows)


def _size(rows: Iterable[StoredTensor]) -> str:
    return tables.size(sum(row.nbytes for row in rows))
