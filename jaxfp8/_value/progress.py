"""A bar on stderr for work of more than a second, on a terminal only."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

_WIDTH = 24
# Seconds before the first drawing, and between two.
_FIRST, _NEXT = 1.0, 0.1
_ERASE = "\r\x1b[K"


@contextlib.contextmanager
def progress(
    title: str, total: int, shown: Callable[[int], str] = str
) -> Iterator[Callable[..., None]]:
    """Gives a function to call after each lot of work, with its amount and its name."""
    if not sys.stderr.isatty():
        yield lambda done, what="": None
        return
    bar = _Bar(title, total, shown)
    try:
        yield bar.advance
    finally:
        bar.draw(_ERASE if bar.is_drawn else "")


class _Bar:
    def __init__(self, title: str, total: int, shown: Callable[[int], str]) -> None:
        self.title, self.total, self.shown = title, max(total, 1), shown
        self.done, self.is_drawn = 0, False
        self.begun = time.monotonic()
        self.due = self.begun + _FIRST

    def advance(self, done: int, what: str = "") -> None:
        self.done = min(self.done + done, self.total)
        now = time.monotonic()
        if now >= self.due:
            self.due, self.is_drawn = now + _NEXT, True
            self.draw(_ERASE + self.line(now - self.begun, what))

    def line(self, seconds: float, what: str) -> str:
        filled = _WIDTH * self.done // self.total
        left = seconds * (self.total - self.done) / max(self.done, 1)
        bar = f"[{'#' * filled}{'.' * (_WIDTH - filled)}]"
        amount = f"{self.shown(self.done)} of {self.shown(self.total)}"
        text = f"{self.title} {bar} {amount}, {left:.0f} s left {what}"
        return text[: shutil.get_terminal_size().columns - 1]

    def draw(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
