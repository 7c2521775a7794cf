"""One case of each test: what `--one-case` runs.

A hash of its name chooses the case: the same on every machine, in any order of the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

# Set by conftest from `--one-case`, before tests are imported.
one_case = False
_DRAWN = 5


def examples(count: int) -> int:
    """How many random examples a test draws, of `count` in the whole suite."""
    return -(-count // _DRAWN) if one_case else count


def chosen(names: Iterable[str]) -> str:
    """The name of the case that stands for a test."""
    return min(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
