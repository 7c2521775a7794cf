"""Times the contenders of a case."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

from jaxfp8._bench._case import OURS, Case, Measured
from jaxfp8._bench._measure import Contender, Missing, Timing, attempt, measure
from jaxfp8._bench._plan import Progress
from jaxfp8._bench._profile import Profile, profile


def timed(
    name: str, make: Callable[[], Case], rounds: int, aims: bool, progress: Progress
) -> Measured:
    """Makes a case and measures it, with its goals if they are asked for.

    A case impossible to make counts as a missing contender of ours.
    """
    made = attempt(make)
    case = Case(name=name, contenders={OURS: made}) if isinstance(made, Missing) else made
    return measured(case if aims else dataclasses.replace(case, goals=()), rounds, progress)


def measured(case: Case, rounds: int, progress: Progress = lambda part: None) -> Measured:
    """Times the contenders of a case and its peaks, all in turns."""
    peaks = {f"peak {kind}": peak for kind, peak in case.peaks.items()}
    contenders = {**case.contenders, **peaks}
    steps = len(contenders) * (rounds + 1)
    turns = itertools.count(1)
    timings = measure(contenders, rounds, lambda: progress(next(turns) / steps))
    rates = {
        kind: 1 / timing.median
        for kind in case.peaks
        if isinstance(timing := timings[f"peak {kind}"], Timing)
    }
    return Measured(
        case=dataclasses.replace(case, contenders={}, peaks={}),  # both hold the data
        timings={name: timings[name] for name in case.contenders},
        peaks=rates,
        profiles=_profiles(case, timings) if case.profiled else {},
    )


def _profiles(case: Case, timings: Mapping[str, Timing | Missing]) -> dict[str, Profile | Missing]:
    """The kernels of each timed contender.

    Runs after the timings: a profiler would disturb them.
    """
    return {
        name: attempt(functools.partial(profile, one))
        for name, one in case.contenders.items()
        if isinstance(one, Contender) and isinstance(timings[name], Timing)
    }
