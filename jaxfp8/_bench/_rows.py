"""The results of cases as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxfp8._bench._case import Goal, Measured, is_ours
from jaxfp8._bench._measure import Missing
from jaxfp8._bench._profile import Group, Profile
from jaxfp8._bench._screen import Row, Screen
from jaxfp8._value import tables

CONTENDERS = ("contender", "time", "spread", "rate", "of peak", "takes")
KERNELS = ("kernel", "launches", "time", "share", "gaps before", "bytes", "of peak")
# So many rows of a breakdown are shown; the record has all.
_MOST_KERNELS = 12
GOALS = ("", "case", "compared", "to reach", "measured")
MARKS = {True: "✓", False: "✗", None: "–"}


def show(screen: Screen, measured: Measured) -> None:
    """Shows the contenders of a case, and their kernels."""
    screen.table(measured.case.name, head(measured), list(contenders(measured)))
    for title, rows in profiles(measured):
        screen.table(title, KERNELS, rows)
    for line in missing(measured):
        screen.say(f"  {line}")


def finish(screen: Screen, all_measured: Sequence[Measured]) -> bool:
    """Shows the goals, and faster peers; none of it is a failure."""
    if rows := list(goals(all_measured)):
        screen.table("What was to be reached", GOALS, rows)
    for line in summary(all_measured):
        screen.say(line)
    return False


def contenders(measured: Measured) -> Iterator[Row]:
    """A row for each timed contender, then for each peak."""
    winners = measured.winners()
    for name in measured.timings:
        seconds = measured.seconds(name)
        if seconds is None:
            continue
        meant = "ours" if is_ours(name) else "worse" if name in winners else ""
        held = measured.case.held.get(name)
        sizes = () if held is None else (tables.size(held),)
        yield Row((name, time(seconds), *_figures(measured, name), *sizes), meant)
    for kind, peak in measured.peaks.items():
        sizes = ("",) if measured.case.held else ()
        yield Row((f"peak: {peak_name(kind)}", "", "", rate(peak, kind), "", "", *sizes), "aside")


def _figures(measured: Measured, name: str) -> Iterator[str]:
    timing = measured.timings[name]
    assert not isinstance(timing, Missing)
    yield f"±{timing.spread:.0%}"
    found, share = measured.rate(name), measured.share(name)
    yield "" if found is None else rate(found, measured.limit)
    yield "" if share is None else f"{share:.0%}"
    ratio, speed = measured.ratio(name), measured.speed(name)
    if speed is not None:
        yield times(speed)
    elif ratio is None or name == measured.ours:
        yield ""
    else:
        yield times(ratio) + (" faster" if name in measured.winners() else "")


def head(measured: Measured) -> tuple[str, ...]:
    """The head of the table of contenders."""
    against = measured.case.against
    head = (*CONTENDERS[:-1], f"speed, {against} = 1") if against else CONTENDERS
    return (*head, "memory") if measured.case.held else head


def missing(measured: Measured) -> list[str]:
    """Why contenders have no row, or no breakdown."""
    timings = [f"{n}: {t.reason}" for n, t in measured.timings.items() if isinstance(t, Missing)]
    profiles = {n: p.reason for n, p in measured.profiles.items() if isinstance(p, Missing)}
    return timings + [f"{n}: no breakdown by kernel: {why}" for n, why in profiles.items()]


def profiles(measured: Measured) -> Iterator[tuple[str, list[Row]]]:
    """For each profiled contender, a title and a row for each kernel."""
    for name, profile in measured.profiles.items():
        if isinstance(profile, Profile):
            title = f"{measured.case.name}: {name} by kernel"
            yield title, list(_kernels(profile, measured.peaks.get("read")))


def _kernels(profile: Profile, peak: float | None) -> Iterator[Row]:
    groups = profile.groups()
    for group in groups[:_MOST_KERNELS]:
        yield _kernel(group.name[:_LONGEST_NAME], [group], profile, peak)
    if rest := groups[_MOST_KERNELS:]:
        yield _kernel(f"{len(rest)} others", rest, profile, peak)
    launches, gaps = str(len(profile.kernels)), time(sum(profile.gaps))
    whole = ("whole, under the profiler", launches, time(profile.span), "100%", gaps)
    yield Row((*whole, *_moved(groups, profile.span, peak)), "ours")


def _kernel(name: str, groups: Sequence[Group], profile: Profile, peak: float | None) -> Row:
    seconds, gaps = (sum(getattr(g, what) for g in groups) for what in ("seconds", "gaps"))
    launches = sum(group.launches for group in groups)
    share = f"{seconds / profile.span:.0%}"
    cells = (name, str(launches), time(seconds), share, time(gaps))
    return Row((*cells, *_moved(groups, seconds, peak)))


def _moved(groups: Sequence[Group], seconds: float, peak: float | None) -> tuple[str, str]:
    """Bytes, and their rate as a share of the peak."""
    sizes = [group.nbytes for group in groups if group.nbytes is not None]
    if len(sizes) < len(groups) or not seconds:
        return "", ""
    share = "" if peak is None else f"{sum(sizes) / seconds / peak:.0%}"
    return tables.size(sum(sizes)), share


_LONGEST_NAME = 60


def goals(all_measured: Sequence[Measured]) -> Iterator[Row]:
    """A row for each goal."""
    for measured in all_measured:
        for goal in measured.case.goals:
            reached = goal.reached(measured)
            least = f"{'≥' if goal.at_least else '≤'} {figure(goal, goal.reach)}"
            cells = (measured.case.name, goal.text, least, figure(goal, goal.value(measured)))
            meant = {True: "better", False: "worse", None: "aside"}[reached]
            yield Row((MARKS[reached], *cells), meant)


def summary(all_measured: Sequence[Measured]) -> Iterator[str]:
    """The number of goals reached, and the faster peers."""
    reached = [goal.reached(measured) for measured in all_measured for goal in measured.case.goals]
    if reached:
        yield f"{reached.count(True)} of {len(reached)} reached."
    for measured in all_measured:
        if winners := measured.winners():
            who = ", ".join(f"{name} ({times(ratio)})" for name, ratio in winners.items())
            yield f"Faster than {measured.ours} in {measured.case.name}: {who}."


def figure(goal: Goal, value: float | None) -> str:
    """A value of a goal."""
    if value is None:
        return "not measured"
    return f"{value:.1%}" if goal.percent else times(value)


def times(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def time(seconds: float) -> str:
    """A time in a suitable unit."""
    unit, size = next((u for u in _TIMES if seconds >= u[1]), _TIMES[-1])
    return f"{seconds / size:.3g} {unit}"


_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def rate(value: float, kind: str) -> str:
    """Bytes or operations per second."""
    unit = {"read": "B/s", "int8": "OP/s"}.get(kind, "FLOP/s")
    size, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / size:.3g} {prefix}{unit}"


def peak_name(kind: str) -> str:
    """The name of a peak."""
    return "reading memory" if kind == "read" else f"{kind} products"
