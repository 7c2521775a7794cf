"""Python's collector of cyclic garbage, paused while 100,000 tensors become objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses the collector: it would visit all objects made so far, again and again.

    No cycles are made meanwhile. Reading the headers of 150,000 tensors was 1.6x faster so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
