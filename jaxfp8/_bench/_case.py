"""A case of the benchmark: contenders for one result, and how long they took."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from jaxfp8._bench._measure import Contender, Missing, Timing, attempt, measure
from jaxfp8._bench._profile import Kernels, profile

OURS = "jaxfp8"  # prefix of contenders' names, peers aside
# A smaller lead of a peer counts as none: machines are shared.
_LEVEL = 1.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders for one result."""

    name: str  # the computation
    contenders: Mapping[str, Contender | Missing]  # by name; ours first
    flops: float = 0.0  # operations of one unit, or 0 if memory is the limit
    bytes: float = 0.0  # the least bytes moved by one unit
    # Bytes of a contender of whole steps; `bytes` are those of the others.
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Bytes of a contender's program beside its arguments and results, where it is known.
    temporary: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Of a contender on several devices, bytes that each device sends, by kind of collective.
    sent: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    product: str = ""  # the kind of its products, a key of `peaks`; "" if no peak is known
    # Loops at the limit of the machine, timed in the same rounds. A unit of "read" is a byte, a
    # unit of a kind of products an operation.
    peaks: Mapping[str, Contender] = dataclasses.field(default_factory=dict)
    # Gives the result in float64, for tests; None if nothing is known to be exact.
    exact: Callable[[], np.ndarray] | None = None
    note: str = ""  # what a reader has to know beside the times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A case and its results."""

    case: Case
    timings: Mapping[str, Timing | Missing]  # for each contender its timing, or why there is none
    # The best rates in the same rounds, in bytes or operations per second.
    peaks: Mapping[str, float]
    # The kernels of contenders with a program, or why they are unknown.
    profiles: Mapping[str, Kernels | Missing] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> str:
        """The base of comparisons."""
        return next(iter(self.timings))

    @property
    def failed(self) -> bool:
        """Whether a contender of ours did not run."""
        ours = [timing for name, timing in self.timings.items() if is_ours(name)]
        return any(isinstance(timing, Missing) and timing.failed for timing in ours)

    @property
    def limit(self) -> str:
        """The limit with the longest time at its peak: "read", or the kind of products."""
        work = {"read": self.case.bytes, self.case.product: self.case.flops}
        least = {kind: work[kind] / peak for kind, peak in self.peaks.items() if work.get(kind)}
        if least:
            return max(least, key=least.__getitem__)
        return self.case.product if self.case.flops else "read"

    def seconds(self, name: str) -> float | None:
        """The median of a contender, or None."""
        timing = self.timings.get(name)
        return timing.median if isinstance(timing, Timing) else None

    def ratio(self, slow: str, fast: str = "") -> float | None:
        """The speed of `fast`, by default ours, relative to `slow`."""
        long, short = self.seconds(slow), self.seconds(fast or self.ours)
        return None if long is None or short is None else long / short

    def rate(self, name: str) -> float | None:
        """The rate of a contender: bytes or operations per second, by the limit of the case."""
        seconds = self.seconds(name)
        moved = self.case.moved.get(name, self.case.bytes)
        amount = moved if self.limit == "read" else self.case.flops
        return amount / seconds if seconds and amount else None

    def share(self, name: str = "") -> float | None:
        """A contender's rate as a share of the case's limiting peak."""
        rate, peak = self.rate(name or self.ours), self.peaks.get(self.limit)
        return rate / peak if rate and peak else None

    def winners(self) -> dict[str, float]:
        """Peers faster than ours, and their speedup; empty without a contender of ours."""
        if not is_ours(self.ours):
            return {}
        ratios = {name: self.ratio(self.ours, name) for name in self.timings if not is_ours(name)}
        return {name: ratio for name, ratio in ratios.items() if ratio and ratio > _LEVEL}


def is_ours(name: str) -> bool:
    """Whether a contender is one of this package."""
    return name.startswith(OURS)


def timed(name: str, make: Callable[[], Case], rounds: int) -> Measured:
    """Makes a case and measures it.

    A case impossible to make counts as a missing contender of ours.
    """
    made = attempt(make)
    case = Case(name=name, contenders={OURS: made}) if isinstance(made, Missing) else made
    return measured(case, rounds)


def measured(case: Case, rounds: int) -> Measured:
    """Times the contenders of a case and its peaks, all in turns."""
    peaks = {f"peak {kind}": peak for kind, peak in case.peaks.items()}
    timings = measure({**case.contenders, **peaks}, rounds)
    rates = {
        kind: 1 / timing.median
        for kind in case.peaks
        if isinstance(timing := timings[f"peak {kind}"], Timing)
    }
    return Measured(
        case=dataclasses.replace(case, contenders={}, peaks={}, exact=None),  # these hold the data
        timings={name: timings[name] for name in case.contenders},
        peaks=rates,
        profiles={
            name: attempt(functools.partial(profile, one))
            for name, one in case.contenders.items()
            if isinstance(timings[name], Timing) and isinstance(one, Contender) and one.program
        },
    )
