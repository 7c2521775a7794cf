"""The results of ways as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxfp8._bench._measure import Timing
from jaxfp8._bench._rows import MARKS, time
from jaxfp8._bench._run import Screen
from jaxfp8._bench.compare.result import KERNEL, STAGES, Compared, Result
from jaxfp8._value import tables


def show(screen: Screen, compared: Compared, timed: bool, spread: bool, verify: bool) -> None:
    """Shows a row for each way, and a line for each failure."""
    if compared.results:
        cells = list(rows(compared, timed, spread, verify))
        screen.table(compared.name, head(timed, verify), cells)
    for line in compared.missed:
        screen.say(f"  {line}")


def finish(screen: Screen, all_compared: Sequence[Compared]) -> bool:
    """Shows each broken bound, after `--verify`; returns whether there is one."""
    checked = [(c.name, r, r.check) for c in all_compared for r in c.results if r.check]
    left = [row for row in checked if not row[2].passed]
    for name, result, check in left:
        screen.say(
            f"{MARKS[False]} {result.way}, {name}: {check.what} is {check.share:.3g} of its bound"
        )
    if checked:
        screen.say(f"{len(checked) - len(left)} of {len(checked)} within their bounds.")
    return bool(left)


def head(timed: bool, verify: bool) -> list[str]:
    """The names of the columns."""
    times = [*STAGES, "GOPS", ""] if timed else []
    return ["way", "rel. L2", "max err", "dB", "bytes", *times, *(["bound"] if verify else [])]


def rows(compared: Compared, timed: bool, spread: bool, verify: bool) -> Iterator[tuple[str, ...]]:
    """A row for each way, in the order of the list."""
    front = compared.front
    for result in compared.results:
        cells = [
            result.way,
            f"{result.error.relative_l2:.2e}",
            f"{result.error.max_abs:.2e}",
            f"{result.error.sqnr:.1f}",
            tables.size(result.bytes),
        ]
        if timed:
            cells += [_time(result, stage, spread) for stage in STAGES]
            seconds = result.seconds(KERNEL)
            cells.append("" if seconds is None else f"{compared.operations / seconds / 1e9:.0f}")
            cells.append("*" if result.way in front else "")
        if verify:
            cells.append("" if result.check is None else f"{result.check.share:.2g}")
        yield tuple(cells)


def _time(result: Result, stage: str, spread: bool) -> str:
    timing = result.timings.get(stage)
    if not isinstance(timing, Timing):
        return "–" if timing is None else "failed"
    return time(timing.median) + (f" ±{timing.spread:.0%}" if spread else "")
