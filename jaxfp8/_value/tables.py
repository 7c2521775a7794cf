"""Prints a report: as text, as HTML or as JSON.

On a terminal a table fits its width. Elsewhere, in a file or a pipe, a row is one line, and nothing
is cut. `COLUMNS` sets a width there too.

Rows of equal layers print as one row: their paths differ only in numbers.
"""

from __future__ import annotations

import html as _html
import json as _json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# A text, or its lines. On a terminal they stand one below the other.
Cell = str | Sequence[str]
Row = Sequence[Cell]
_NUMBER = re.compile(r"(\d+)")
_GAP = "  "  # between columns
_NARROWEST = 8  # a column
# A word longer than a line is broken after these, after the first kind if possible.
_JOINTS = (re.compile(r"(?<=[/,])"), re.compile(r"(?<=[_.:\]>])"))


def text(title: str, head: Row, rows: Sequence[Row], footer: Sequence[str] = ()) -> str:
    """A title, a table, and lines below it."""
    columns = width()
    body = _plain(head, rows) if columns is None else _fitted(head, rows, columns)
    return "\n".join([title, *(body if rows else ()), *footer])


def width() -> int | None:
    """The columns of the terminal, or `COLUMNS`; None if neither limits a line."""
    return shutil.get_terminal_size((0, 0)).columns or None


def _plain(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row, its cells padded to the widest of their column."""
    cells = [["; ".join(_lines(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return (_line(row, widths) for row in cells)


def _fitted(head: Row, rows: Sequence[Row], columns: int) -> Iterator[str]:
    """Rows of as many lines as they need; one of several lines has an empty one below it."""
    cells = [[_lines(cell) for cell in row] for row in (head, *rows)]
    needs = [max(len(x) for cell in column for x in cell) for column in zip(*cells, strict=True)]
    widths = _widths(needs, columns - len(_GAP) * (len(needs) - 1))
    several = any(len(cell) > 1 for row in cells for cell in row)
    for row in cells:
        pairs = zip(row, widths, strict=True)
        wrapped = [[part for x in cell for part in wrap(x, n)] for cell, n in pairs]
        for i in range(max(map(len, wrapped))):
            yield _line([cell[i] if i < len(cell) else "" for cell in wrapped], widths)
        if several:
            yield ""


def _lines(cell: Cell) -> list[str]:
    return [cell] if isinstance(cell, str) else list(cell) or [""]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(map(str.ljust, cells, widths)).rstrip()


def _widths(needs: Sequence[int], total: int) -> list[int]:
    """The widths of columns within a total; the widest give way."""
    most = max(needs)
    while most > _NARROWEST and sum(min(need, most) for need in needs) > total:
        most -= 1
    return [min(need, most) for need in needs]


def wrap(text: str, width: int) -> list[str]:
    """Text in lines of at most `width`, broken between words, or inside words that are too long."""
    lines = [""]
    for word in text.split(" "):
        for i, piece in enumerate(_pieces(word, width)):
            space = " " if lines[-1] and i == 0 else ""
            if len(lines[-1]) + len(space) + len(piece) <= width:
                lines[-1] += space + piece
            else:
                lines.append(piece)
    return [line for line in lines if line] or [""]


def _pieces(word: str, width: int) -> list[str]:
    """A word, or its parts if it is longer than a line."""
    pieces = [word]
    for joint in _JOINTS:
        pieces = [
            p for piece in pieces for p in (joint.split(piece) if len(piece) > width else [piece])
        ]
    return [piece[i : i + width] for piece in pieces for i in range(0, len(piece), width)]


def html(title: str, head: Row, rows: Sequence[Row], footer: Sequence[str] = ()) -> str:
    """The same as HTML."""
    cells = "".join(_html_row("td", row) for row in rows)
    return (
        f"<p>{_html.escape(title)}</p><table><thead>{_html_row('th', head)}</thead>"
        f"<tbody>{cells}</tbody></table>" + "".join(f"<p>{_html.escape(x)}</p>" for x in footer)
    )


def page(title: str, body: str) -> str:
    """A page of HTML, which loads nothing."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_html.escape(title)}</title></head>\n<body>\n{body}\n</body></html>\n"
    )


def json(value: Any, indent: int | None = None) -> str:
    """A value as JSON; a number that is not finite becomes a string."""
    return _json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def size(nbytes: int) -> str:
    """Bytes in a short unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def alike(rows: Iterable[Any]) -> list[list[Any]]:
    """Dataclasses grouped by `path` without its numbers and by all other fields, in order."""
    groups: dict[object, list[Any]] = {}
    for row in rows:
        fields = {**vars(row), "path": numberless(row.path)}
        groups.setdefault(tuple(fields.values()), []).append(row)
    return list(groups.values())


def numberless(path: str) -> str:
    """A path with a star for each number."""
    return _NUMBER.sub("*", path)


def starred(paths: set[str]) -> str:
    """Paths that differ in numbers alone as one, with a star for each different number."""
    texts = _NUMBER.split(next(iter(paths)))
    count = len(texts) // 2
    numbers = _NUMBER.findall("\n".join(paths))
    for i in range(count):
        if len(set(numbers[i::count])) > 1:
            texts[2 * i + 1] = "*"
    return "".join(texts)


def _html_row(tag: str, row: Row) -> str:
    cells = ("".join(f"<div>{_html.escape(x)}</div>" for x in _lines(cell)) for cell in row)
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"
