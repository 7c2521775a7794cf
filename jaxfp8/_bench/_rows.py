"""The results of cases as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxfp8._bench._case import Measured
from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench._profile import Kernels, groups, whole
from jaxfp8._bench._run import Screen
from jaxfp8._value import tables

HEAD = ("contender", "time", "spread", "rate", "of peak", "takes")
KERNELS = ("kernel", "launches", "time", "share", "gaps before", "bytes", "of peak")
# So many kernels are shown, with so much of a name; the record has all.
_MOST_KERNELS, _LONGEST_NAME = 12, 60
MARKS = {True: "✓", False: "✗"}
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def show(screen: Screen, measured: Measured) -> None:
    """Shows the contenders of a case."""
    screen.table(measured.case.name, HEAD, list(rows(measured)))
    for name, timing in measured.timings.items():
        if isinstance(timing, Missing):
            screen.say(f"  {name}: {timing.reason}")
        elif name in measured.case.temporary:
            size = tables.size(measured.case.temporary[name])
            screen.say(f"  {name}: {size} of temporaries")
    for name, profile in measured.profiles.items():
        if isinstance(profile, Missing):
            screen.say(f"  {name}: no breakdown by kernel: {profile.reason}")
        else:
            kernels = list(_kernels(profile, measured.peaks.get("read")))
            screen.table(f"{measured.case.name}: {name} by kernel", KERNELS, kernels)


def finish(screen: Screen, all_measured: Sequence[Measured]) -> bool:
    """Shows faster peers; they are no failure."""
    for measured in all_measured:
        if winners := measured.winners():
            who = ", ".join(f"{name} ({times(ratio)})" for name, ratio in winners.items())
            screen.say(f"Faster than {measured.ours} in {measured.case.name}: {who}.")
    return False


def rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    """A row for each timed contender, then for each peak."""
    winners = measured.winners()
    for name, timing in measured.timings.items():
        if not isinstance(timing, Timing):
            continue
        reached, share, ratio = measured.rate(name), measured.share(name), measured.ratio(name)
        takes = "" if ratio is None or name == measured.ours else times(ratio)
        yield (
            name,
            time(timing.median),
            f"±{timing.spread:.0%}",
            "" if reached is None else rate(reached, measured.limit),
            "" if share is None else f"{share:.0%}",
            takes + " faster" if name in winners else takes,
        )
    for kind, peak in measured.peaks.items():
        yield (f"peak: {peak_name(kind)}", "", "", rate(peak, kind), "", "")


def _kernels(profile: Kernels, peak: float | None) -> Iterator[tuple[str, ...]]:
    """A row for each of the longest kernels, and for all."""
    call = whole(profile)
    for group in (*groups(profile)[:_MOST_KERNELS], call):
        name, share = group.name[:_LONGEST_NAME], f"{group.seconds / call.seconds:.0%}"
        size = "" if group.bytes is None else tables.size(group.bytes)
        reached = group.bytes / group.seconds if group.bytes and group.seconds else 0.0
        peaks = f"{reached / peak:.0%}" if peak and reached else ""
        yield name, str(group.launches), time(group.seconds), share, time(group.gaps), size, peaks


def times(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def time(seconds: float) -> str:
    """A time in a suitable unit."""
    unit, size = next((u for u in _TIMES if seconds >= u[1]), _TIMES[-1])
    return f"{seconds / size:.3g} {unit}"


def rate(value: float, kind: str) -> str:
    """Bytes or operations per second."""
    unit = {"read": "B/s", "int8": "OP/s"}.get(kind, "FLOP/s")
    size, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / size:.3g} {prefix}{unit}"


def peak_name(kind: str) -> str:
    """The name of a peak."""
    return "reading memory" if kind == "read" else f"{kind} products"
