"""A bar while many bytes are read or written: with rich, on a terminal, and else nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

try:
    import rich.console as rich_console
    import rich.progress as rich_progress
except ImportError:  # an extra
    rich_console = rich_progress = None  # type: ignore[assignment]

# Less is read in about a second.
_LONG_BYTES = 1 << 30


@contextlib.contextmanager
def progress(title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told of each lot of bytes that is done."""
    if rich_progress is None or nbytes < _LONG_BYTES or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(binary_units=True),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = rich_console.Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=nbytes)
        yield lambda done: bar.advance(task, done)
