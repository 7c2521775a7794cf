"""Chooses a part of the cases of a test, in which the values of its parameters still occur.

Parameters vary regularly from case to case, so every Nth case may have the same value of one of
them. Cases are chosen by a hash of their names instead. That gives the same cases on every machine,
and does not follow the order of the parameters.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

# What `--every` says; conftest sets it before tests are imported.
every_nth = 1
# Two tell whether a parameter means anything.
_LEAST = 2


def examples(count: int) -> int:
    """How many examples a test draws that draws so many where all cases run."""
    return -(-count // every_nth)


def chosen(cases: Mapping[str, Sequence[tuple[str, Any]]], every: int) -> set[str]:
    """About one in `every` of the cases of one test, but two at least where it has as many.

    Args:
      cases: by the name of each case its parameters, as pairs of a name and what tells a value.
      every: how many cases there are to one that is chosen.

    Returns:
      The names of the chosen cases. Each value that a parameter has in several cases is in one of
      them at least.
    """
    order = sorted(cases, key=_hash)
    number = max(_LEAST, -(-len(order) // every))
    names = set(order[:number])
    missing = shared_values(cases).difference(*(cases[name] for name in names))
    for name in order[number:]:
        if not missing.isdisjoint(cases[name]):
            names.add(name)
            missing.difference_update(cases[name])
    return names


def shared_values(cases: Mapping[str, Sequence[tuple[str, Any]]]) -> set[tuple[str, Any]]:
    """The values that parameters have in several cases."""
    count = collections.Counter(pair for pairs in cases.values() for pair in pairs)
    return {pair for pair, number in count.items() if number > 1}


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
