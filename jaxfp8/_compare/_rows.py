"""The results as cells of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxfp8._bench._measure import Timing
from jaxfp8._bench._rows import MARKS, Row, time
from jaxfp8._compare._result import KERNEL, STAGES, Compared, Result

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def head(timed: bool, verify: bool) -> list[str]:
    """The names of the columns."""
    times = [*STAGES, "GOPS", ""] if timed else []
    return ["way", "rel. L2", "max err", "dB", "bytes", *times, *(["bound"] if verify else [])]


def rows(compared: Compared, timed: bool, spread: bool, verify: bool) -> Iterator[Row]:
    """A row for each way, in the order of the list."""
    front = compared.front
    for result in compared.results:
        cells = [
            result.path,
            f"{result.error.relative_l2:.2e}",
            f"{result.error.max_abs:.2e}",
            f"{result.error.sqnr:.1f}",
            _size(result.bytes),
        ]
        if timed:
            cells += [_time(result, stage, spread) for stage in STAGES]
            seconds = result.seconds(KERNEL)
            cells.append("" if seconds is None else f"{compared.operations / seconds / 1e9:.0f}")
            cells.append("*" if result.path in front else "")
        if verify:
            cells.append("" if result.check is None else f"{result.check.share:.2g}")
        yield Row(tuple(cells), _meaning(result, front))


def _meaning(result: Result, front: frozenset[str]) -> str:
    if result.check is not None and not result.check.passed:
        return "worse"
    return "ours" if result.path in front else ""


def _time(result: Result, stage: str, spread: bool) -> str:
    timing = result.timings.get(stage)
    if not isinstance(timing, Timing):
        return "–" if timing is None else "failed"
    return time(timing.median) + (f" ±{timing.spread:.0%}" if spread else "")


def missing(compared: Compared) -> list[str]:
    """Why ways have no row, and why others have no time."""
    untimed = [
        f"{result.path}, {stage}: {timing.reason}"
        for result in compared.results
        for stage, timing in result.timings.items()
        if not isinstance(timing, Timing)
    ]
    return [*(f"{name}: {reason}" for name, reason in compared.missing.items()), *untimed]


def verdict(all_compared: Sequence[Compared]) -> Iterator[str]:
    """Which ways leave their bounds, and how many stay within."""
    checked = [(c.name, r) for c in all_compared for r in c.results if r.check is not None]
    for name, result in checked:
        assert result.check is not None
        if not result.check.passed:
            yield (
                f"{MARKS[False]} {result.path}, {name}: {result.check.what} is "
                f"{result.check.share:.3g} of its bound"
            )
    passed = sum(r.check is not None and r.check.passed for _, r in checked)
    yield f"{passed} of {len(checked)} within their bounds."


def _size(count: int) -> str:
    unit, size = next((u for u in _UNITS if count >= u[1]), _UNITS[-1])
    return f"{count / size:.3g} {unit}"
