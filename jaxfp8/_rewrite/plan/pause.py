"""Pauses cyclic garbage collection while a graph is built, since it would free nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within this context, the garbage collector does not start by itself.

    Deciding and emitting make tens of thousands of objects that live until the end. After every few
    thousand the collector would visit all objects of the process. For a transformer of 32 layers
    that took longer than all the rest. Reference counting goes on.
    """
    if not gc.isenabled():  # by the user, or by a rewrite around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
