"""Parts of the suite: what `--one-case` and `--share` run.

A hash of its name chooses a case or a test: the same on every machine, in any order.
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
    return min(names, key=_hashed)


def part(names: Iterable[str], share: int) -> set[str]:
    """One in `share` of the tests of a file, at least one."""
    ordered = sorted(names, key=_hashed)
    return set(ordered[: -(-len(ordered) // share)])


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
