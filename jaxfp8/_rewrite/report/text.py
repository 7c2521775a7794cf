"""Prints a report: a table as wide as the terminal, in colours if rich is installed.

Without a terminal a row is one line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxfp8._rewrite.report import rows
from jaxfp8._rewrite.report.model import Findings
from jaxfp8._rewrite.report.rows import Row
from jaxfp8._value import tables

try:
    import rich.console as rich_console
    import rich.text as rich_text
except ImportError:  # rich is an extra; without it the table has no colours
    rich_console = rich_text = None  # type: ignore[assignment]


_GAP = 2  # spaces between columns
_NARROWEST = 50
# The parts of the width for the places and for the products; the outcome gets the rest.
_PARTS = (0.30, 0.30)
# A word that is longer than a line is broken after these, after the first kind if possible.
_JOINTS = (re.compile(r"(?<=[/,])"), re.compile(r"(?<=[_.:\]>])"))

_HELD = "\N{NO-BREAK SPACE}"
_STYLES = {
    "where": "bold",
    "path": "cyan",
    "library": "dim",
    "call": "green",
    "missed": "red",
    "detail": "dim",
    "ended": "bold",
    "note": "yellow",
    "remedy": "yellow",
}

Piece = tuple[str, str]  # text and style
Cell = list[Piece]


def show(report: Findings) -> None:
    """Print the report, in colours if standard output is a terminal with colours."""
    if rich_console is not None and sys.stdout.isatty():
        rich_console.Console().print(report)
    else:
        print(report)


def text(report: Findings) -> str:
    """The report as text, as wide as the terminal if there is one."""
    width = tables.width()
    if width is None or not (report.sites or report.calls):
        return "\n".join([rows.headline(report), *_lines(report), *rows.footer(report)])
    return "\n".join("".join(text for text, _ in line).rstrip() for line in _table(report, width))


def _lines(report: Findings) -> list[str]:
    """A head and a line for each row."""
    cells = [[_line(cell) for cell in _cells(row)] for row in rows.rows(report)]
    return tables.plain(rows.HEAD, cells)


def _line(cell: Cell) -> str:
    """The lines of a cell as one; the second operand of a product follows the first."""
    text = "; ".join(line for line, _ in cell)
    return text.replace(f"; .{_HELD}", " . ").replace(_HELD, " ")


def renderable(report: Findings, width: int) -> Any:
    """The report for rich, in colours."""
    return rich_console.Group(*(rich_text.Text.assemble(*line) for line in _table(report, width)))


def _table(report: Findings, width: int) -> Iterator[list[Piece]]:
    """The printed lines, each as pieces with a style."""
    yield [(rows.headline(report), "bold")]
    cells = [_cells(row) for row in rows.rows(report)]
    widths = _widths(cells, width)
    padded = [*(n + _GAP for n in widths[:-1]), 0]
    head: list[Cell] = [[(name, "bold")] for name in rows.HEAD]
    for row in (head, *cells) if cells else ():
        columns = [_wrapped(cell, n) for cell, n in zip(row, widths, strict=True)]
        for i in range(max(map(len, columns))):
            pieces = (column[i] if i < len(column) else ("", "") for column in columns)
            yield [(text.ljust(n), style) for (text, style), n in zip(pieces, padded, strict=True)]
        yield []
    yield from ([(line, "yellow")] for line in rows.footer(report))


def _cells(row: Row) -> list[Cell]:
    """The four cells of a row, line by line."""
    count = [(f"{row.count} x", "dim")] if row.count > 1 else []
    sign = ("no", "bold red") if row.status == "missed" else ("ok", "bold green")
    lhs, rhs = map(_held_together, row.operands)
    sizes = re.sub(r"(?<=[a-zMNK]) ", _HELD, row.sizes)
    product = [(lhs, ""), (f".{_HELD}{rhs}", ""), (sizes, "dim")]
    return [[sign, *count], _styled(row.place), product, _styled(row.outcome)]


def _held_together(operand: str) -> str:
    """An operand with spaces held together, but for the one before its scale."""
    array, space, scale = operand.partition(" ")
    return array + space + scale.replace(" ", _HELD)


def _styled(lines: Sequence[rows.Line]) -> Cell:
    arrow = {"remedy": "-> "}
    return [
        (arrow.get(line.kind, line.before) + line.text, _STYLES.get(line.kind, ""))
        for line in lines
    ]


def _widths(cells: Sequence[Sequence[Cell]], width: int) -> list[int]:
    """The widths of the columns: as wide as they need, within their parts of the width."""
    needs = [
        max([len(name), *(len(line) for row in cells for line, _ in row[i])])
        for i, name in enumerate(rows.HEAD)
    ]
    sign = needs[0]
    left = max(width, _NARROWEST) - sign - 3 * _GAP
    place, product = (min(need, int(left * p)) for need, p in zip(needs[1:3], _PARTS, strict=True))
    return [sign, place, product, min(needs[3], left - place - product)]


def _wrapped(cell: Cell, width: int) -> Cell:
    return [(line, style) for text, style in cell for line in wrap(text, width)]


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
    return [line.replace(_HELD, " ") for line in lines if line] or [""]


def _pieces(word: str, width: int) -> list[str]:
    """A word, or its parts if it is longer than a line."""
    pieces = [word]
    for joint in _JOINTS:
        pieces = [
            p for piece in pieces for p in (joint.split(piece) if len(piece) > width else [piece])
        ]
    return [piece[i : i + width] for piece in pieces for i in range(0, len(piece), width)]
