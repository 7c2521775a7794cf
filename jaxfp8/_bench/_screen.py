"""Tables and a progress bar if rich is installed, else plain lines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxfp8._value import tables

try:
    import rich.console as rich_console
    import rich.markup as rich_markup
    import rich.progress as rich_progress
    import rich.table as rich_table
except ImportError:  # an extra
    rich_console = None  # type: ignore[assignment]

_STYLES = {"ours": "bold", "better": "green", "worse": "red", "aside": "dim"}
_LEFT = ("contender", "way", "", "case", "compared", "kernel")

# Shows the current case, and the number of finished cases, with fractions.
Show = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """Cells of a table, and their meaning: "ours", "better", "worse", "aside" or ""."""

    cells: tuple[str, ...]
    meant: str = ""


class Screen(Protocol):
    """Shows results as they come.

    Attributes:
      said: all lines and tables so far, as text.
    """

    said: list[str]

    def progress(self, count: int) -> contextlib.AbstractContextManager[Show]:
        """A bar for so many cases."""

    def say(self, text: str) -> None:
        """One line."""

    def table(self, title: str, head: Sequence[str], rows: Sequence[Row]) -> None:
        """A table."""


def screen() -> Screen:
    """With lines and colours on a terminal if rich is installed; else a row is one line."""
    return Plain() if rich_console is None or tables.width() is None else Rich()


class Plain:
    """Lines of text."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextlib.contextmanager
    def progress(self, count: int) -> Iterator[Show]:
        """None: the tables tell."""
        if rich_console is None:
            print("Plain text; `pip install rich` for tables with colours and a progress bar.")
        yield lambda name, done: None

    def say(self, text: str) -> None:
        """One line."""
        self.said.append(text)
        print(text, flush=True)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Row]) -> None:
        """Columns with two spaces between."""
        self.say(f"\n{text(title, head, rows)}")


class Rich:
    """Tables with lines and colours, and a bar below them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._console = rich_console.Console(highlight=False, width=tables.width())

    @contextlib.contextmanager
    def progress(self, count: int) -> Iterator[Show]:
        """A bar, if there is a terminal; drawn between turns, not beside them."""
        columns = (
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.description}", markup=False),
        )
        bar = rich_progress.Progress(
            *columns, console=self._console, transient=True, auto_refresh=False
        )

        def show(name: str, done: float) -> None:
            bar.update(task, description=name, completed=done, refresh=True)

        with bar:
            task = bar.add_task("", total=count)
            yield show

    def say(self, text: str) -> None:
        """One line."""
        self.said.append(text)
        self._console.print(text, markup=False, soft_wrap=True)  # commands stay in one piece

    def table(self, title: str, head: Sequence[str], rows: Sequence[Row]) -> None:
        """A table with its title above."""
        self.said.append(f"\n{text(title, head, rows)}")
        table = rich_table.Table(title=rich_markup.escape(title), title_justify="left")
        for name in head:
            table.add_column(
                name,
                justify="left" if name in _LEFT else "right",
                overflow="fold",
                no_wrap=name == "way",
            )
        for row in rows:
            cells = map(rich_markup.escape, row.cells)
            table.add_row(*cells, style=_STYLES.get(row.meant))
        self._console.print(table)


def text(title: str, head: Sequence[str], rows: Sequence[Row]) -> str:
    """A table as text."""
    lines = [tuple(head), *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if name in _LEFT else ">" for name in head]
    cells = [
        [f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)]
        for line in lines
    ]
    return "\n".join([title, *("  ".join(line).rstrip() for line in cells)])
