"""Prints a report: as text or as HTML.

On a terminal a table fits its width, by rich if it is installed. Elsewhere, in a file or a pipe, a
row is one line, and nothing is cut. `COLUMNS` sets a width there too.

Rows of equal layers print as one row: their paths differ only in numbers.
"""

from __future__ import annotations

import html as _html
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import rich.console as rich_console
    import rich.table as rich_table
except ImportError:  # an extra; without it the table is plain text
    rich_console = rich_table = None  # type: ignore[assignment]

Row = Sequence[str]


def text(title: str, head: Row, rows: Sequence[Row], footer: Sequence[str] = ()) -> str:
    """A title, a table, and lines below it."""
    columns = width()
    if rich_table is None or columns is None or not rows:
        body = plain(head, rows)
    else:
        body = _rich(head, rows, columns)
    return "\n".join([title, *body, *footer])


def width() -> int | None:
    """The columns of the terminal, or `COLUMNS`; None if neither limits a line."""
    return shutil.get_terminal_size((0, 0)).columns or None


def plain(head: Row, rows: Sequence[Row]) -> list[str]:
    """A line for each row, its cells padded to the widest of their column."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    return [line.rstrip() for line in lines]


def html(title: str, head: Row, rows: Sequence[Row], footer: Sequence[str] = ()) -> str:
    """The same as HTML."""
    cells = "".join(_html_row("td", row) for row in rows)
    return (
        f"<p>{_html.escape(title)}</p><table><thead>{_html_row('th', head)}</thead>"
        f"<tbody>{cells}</tbody></table>" + "".join(f"<p>{_html.escape(x)}</p>" for x in footer)
    )


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
        rest = [value for name, value in vars(row).items() if name != "path"]
        groups.setdefault((numberless(row.path), *rest), []).append(row)
    return list(groups.values())


def numberless(path: str) -> str:
    """A path with a star for each number."""
    return re.sub(r"\d+", "*", path)


def starred(paths: set[str]) -> str:
    """Several paths as one, with a star for each different number."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    columns = zip(*parts, strict=True)
    return "".join(c[0] if len(set(c)) == 1 else "*" for c in columns)


def _html_row(tag: str, row: Row) -> str:
    return "<tr>" + "".join(f"<{tag}>{_html.escape(cell)}</{tag}>" for cell in row) + "</tr>"


def _rich(head: Row, rows: Sequence[Row], columns: int) -> list[str]:
    table = rich_table.Table()
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console = rich_console.Console(width=columns, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return [captured.get().rstrip()]
