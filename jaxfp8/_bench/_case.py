"""A case of the benchmark: contenders for one result, its minimal cost and its goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxfp8._bench._measure import Contender, Missing, Timing
from jaxfp8._bench._profile import Profile

OURS = "jaxfp8"  # prefix of contenders' names, peers aside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders for one result.

    Attributes:
      name: the computation.
      contenders: by name; ours first.
      flops: operations of one unit, or 0 if memory is the limit.
      bytes: the least bytes moved by one unit.
      product: the kind of its products, a key of `peaks`; "" if no peak is known.
      peaks: loops at the limit of the machine, timed in the same rounds. A unit of "read" is a
        byte, a unit of a kind of products an operation.
      goals: the figures to reach.
      moved: bytes by contender, if they differ from `bytes`.
      held: bytes held by one unit of a contender at a time, if compared.
      against: the base of speeds, a contender; "" if times refer to ours.
      profiled: whether one unit of each contender is broken down by kernel.
    """

    name: str
    contenders: Mapping[str, Contender | Missing]
    flops: float = 0.0
    bytes: float = 0.0
    product: str = ""
    peaks: Mapping[str, Contender] = dataclasses.field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    against: str = ""
    profiled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A case and its results.

    Attributes:
      case: the case.
      timings: for each contender its timing, or why there is none.
      peaks: the best rates in the same rounds, in bytes or operations per second.
      profiles: for each contender its kernels, or why they are not known; empty unless profiled.
    """

    case: Case
    timings: Mapping[str, Timing | Missing]
    peaks: Mapping[str, float]
    profiles: Mapping[str, Profile | Missing] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> str:
        """The base of comparisons."""
        return next(iter(self.timings))

    @property
    def failed(self) -> bool:
        """Whether a contender of ours did not run."""
        return any(is_ours(n) and isinstance(t, Missing) for n, t in self.timings.items())

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

    def speed(self, name: str) -> float | None:
        """Speed of a contender relative to the base of the case."""
        return self.ratio(self.case.against, name) if self.case.against else None

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


# A smaller lead of a peer counts as none: machines are shared.
_LEVEL = 1.03


def is_ours(name: str) -> bool:
    """Whether a contender is one of this package."""
    return name.startswith(OURS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure for a case to reach.

    Attributes:
      text: the comparison in words.
      value: computes the figure; None if a timing is missing.
      reach: the least or largest value allowed.
      at_least: whether `reach` is the least.
      percent: whether the figure is a share.
    """

    text: str
    value: Callable[[Measured], float | None]
    reach: float
    at_least: bool = True
    percent: bool = False

    def reached(self, measured: Measured) -> bool | None:
        """Whether the goal is reached; None if it could not be measured."""
        value = self.value(measured)
        if value is None:
            return None
        return value >= self.reach if self.at_least else value <= self.reach


def faster_than(peer: str, reach: float, ours: str = OURS) -> Goal:
    """Our speed relative to a peer."""
    text = f"{ours}: times faster than {peer}"
    return Goal(text=text, value=lambda m: m.ratio(peer, ours), reach=reach)


def share_of_peak(reach: float) -> Goal:
    """The share of the case's limiting peak."""
    text = f"{OURS}: share of the measured peak"
    return Goal(text=text, value=Measured.share, reach=reach, percent=True)


def no_slower_than(other: str, share: float, ours: str = OURS) -> Goal:
    """The additional time of ours over another form of it, as a share."""

    def value(measured: Measured) -> float | None:
        ratio = measured.ratio(ours, other)
        return None if ratio is None else ratio - 1

    text = f"{ours}: more time than {other}"
    return Goal(text=text, value=value, reach=share, at_least=False, percent=True)


def apart(one: str, other: str, share: float) -> Goal:
    """The additional time of the slower of two, as a share."""

    def value(measured: Measured) -> float | None:
        ratio = measured.ratio(one, other)
        return None if ratio is None else max(ratio, 1 / ratio) - 1

    text = f"{one} and {other} apart"
    return Goal(text=text, value=value, reach=share, at_least=False, percent=True)


def part_of_the_whole(without: str, share: float, whole: str = OURS) -> Goal:
    """The share of the whole's time beyond the time of a part."""

    def value(measured: Measured) -> float | None:
        ratio = measured.ratio(without, whole)
        return None if ratio is None else 1 - ratio

    text = f"{whole}: share of what {without} does not need"
    return Goal(text=text, value=value, reach=share, at_least=False, percent=True)
