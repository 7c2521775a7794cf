"""No cyclic garbage collection while a graph is built: it would find nothing, and look for long."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within this context, the garbage collector does not start by itself.

    Deciding and emitting make tens of thousands of objects that all live until they are done. At
    each few thousand of them the collector would walk through every object of the process: for a
    transformer of 32 layers that took longer than all the rest. References are counted as ever.
    """
    if not gc.isenabled():  # by the user, or by a rewrite around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
