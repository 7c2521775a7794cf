"""`--never-slower`: whether rewritten functions take longer than the functions as written."""

from __future__ import annotations

import collections
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jaxfp8
from jaxfp8._bench import _rows
from jaxfp8._bench._case import Case, Measured, timed
from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench._run import Screen
from jaxfp8._bench._written import REWRITTEN, WRITTEN

# The largest allowed ratio of rewritten to written time, to which both spreads are added.
MOST = 1.05
_WORST, _AGAIN = 10, 15  # functions shown last; least rounds of a second measurement
_BORDERS = (0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 3.0, 5.0)


def twice(name: str, make: Callable[[], Case], rounds: int) -> Measured:
    """Measures a case. If it came out slower, a second measurement of more rounds counts.

    The note of a case says why a dot is no call, so the warnings are silent.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxfp8.FallbackWarning)
        measured = timed(name, make, rounds)
        return timed(name, make, max(2 * rounds, _AGAIN)) if is_slower(measured) else measured


def is_slower(measured: Measured) -> bool:
    """Whether the rewritten function takes longer, beyond both spreads."""
    timings = [measured.timings.get(name) for name in (REWRITTEN, WRITTEN)]
    spreads = sum(timing.spread for timing in timings if isinstance(timing, Timing))
    speedup = measured.ratio(WRITTEN)
    return speedup is not None and 1 / speedup > MOST + spreads


def record(measured: Measured) -> dict[str, Any]:
    """A case as JSON."""
    return {
        "name": measured.case.name,
        "seconds": {name: measured.seconds(name) for name in measured.timings},
        "speedup": measured.ratio(WRITTEN),
        "is_slower": is_slower(measured),
        "note": measured.case.note or _failures(measured),
    }


def show(screen: Screen, measured: Measured) -> None:
    """A line."""
    speedup = measured.ratio(WRITTEN)
    ratio = "failed" if speedup is None else _rows.times(speedup)
    mark = "  SLOWER" if is_slower(measured) else ""
    note = _failures(measured) or measured.case.note
    screen.say(f"{ratio:>8}{mark}  {measured.case.name}  ({note})")


def _failures(measured: Measured) -> str:
    return "; ".join(t.reason for t in measured.timings.values() if isinstance(t, Missing))


def finish(screen: Screen, done: Sequence[Measured]) -> bool:
    """The mean, a histogram, and the worst; true if any is slower."""
    speedups = {m.case.name: ratio for m in done if (ratio := m.ratio(WRITTEN))}
    if not speedups:
        return True
    mean = math.exp(sum(map(math.log, speedups.values())) / len(speedups))
    slower = [m.case.name for m in done if is_slower(m)]
    screen.say(f"\n{len(speedups)} functions, speedup {_rows.times(mean)} (geometric mean)")
    counts = collections.Counter(sum(ratio >= b for b in _BORDERS) for ratio in speedups.values())
    ends = ["", *(_rows.times(b) for b in _BORDERS), ""]
    bins = [(f"{a} to {b}", str(counts[i])) for i, (a, b) in enumerate(itertools.pairwise(ends))]
    screen.table("Speedup", ("from", "functions"), bins)
    worst = sorted(done, key=lambda m: speedups.get(m.case.name, math.inf))[:_WORST]
    rows = [(m.case.name, *_times(m), _rows.times(speedups.get(m.case.name, 0.0))) for m in worst]
    screen.table(f"The slowest {_WORST}", ("function", "as written", "rewritten", "speedup"), rows)
    many = f"{len(slower)} slower than {MOST}x beyond their spread"
    screen.say(f"{many}: {', '.join(slower)}" if slower else "None is slower beyond its spread.")
    return bool(slower)


def _times(measured: Measured) -> list[str]:
    seconds = [measured.seconds(name) for name in (WRITTEN, REWRITTEN)]
    return ["failed" if one is None else _rows.time(one) for one in seconds]
