"""The results of ways: as tables, as JSON with the fields of docs/precision.md, as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench._rows import MARKS, time
from jaxfp8._bench._run import Screen
from jaxfp8._bench.compare.result import KERNEL, LAYER, STAGES, Compared, Result
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


def product(compared: Compared) -> dict[str, Any]:
    """The ways on one pair of operands."""
    m, n, k = compared.shape
    front = compared.front
    ways = [
        {**_result(result, compared.operations), "on_front": result.way in front}
        for result in compared.results
    ]
    missing = [{"name": name, "missing": why} for name, why in compared.missing.items()]
    return {"name": compared.name, "m": m, "n": n, "k": k, "ways": [*ways, *missing]}


def _result(result: Result, operations: float) -> dict[str, Any]:
    return {
        "name": result.way,
        "relative_l2": result.error.relative_l2,
        "max_abs": result.error.max_abs,
        "sqnr": result.error.sqnr,
        "bytes": result.bytes,
        "times": {stage: _timing(t, operations) for stage, t in result.timings.items()},
        "check": None
        if result.check is None
        else {
            "share_of_bound": result.check.share,
            "what": result.check.what,
            "passed": result.check.passed,
        },
    }


def _timing(timing: Timing | Missing, operations: float) -> dict[str, Any]:
    if isinstance(timing, Missing):
        return {"missing": timing.reason}
    gops = operations / timing.median / 1e9
    return {"seconds": timing.median, "spread": timing.spread, "gops": gops}


_SIDE, _COLUMNS = 6.0, 3


def figure(title: str, done: Sequence[Compared]) -> Any:
    """A plot for each pair of operands."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    columns = max(1, min(_COLUMNS, len(done)))
    lines = -(-max(len(done), 1) // columns)
    whole = Figure(figsize=(_SIDE * columns, _SIDE * lines), layout="constrained")
    whole.suptitle(title)
    for axes, compared in zip(
        whole.subplots(lines, columns, squeeze=False).flat, done, strict=False
    ):
        errors_over_times(axes, compared)
    return whole


def errors_over_times(axes: Any, compared: Compared) -> None:
    """A point for each way, as a layer; those on the front are joined by a line."""
    axes.set(xscale="log", yscale="log", title=compared.name)
    axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.set(xlabel="seconds, weight held ahead", ylabel="relative L2 error")
    points = {
        r.way: (seconds, r.error.relative_l2)
        for r in compared.results
        if (seconds := r.seconds(LAYER)) is not None and r.error.relative_l2 > 0
    }
    front = sorted(points[name] for name in compared.front if name in points)
    if front:
        label = "none is better in both"
        axes.plot(*zip(*front, strict=True), color="tab:blue", linewidth=1, label=label)
        axes.legend(fontsize=8)
    for name, (x, y) in points.items():
        on_front = name in compared.front
        axes.scatter([x], [y], s=24, color="tab:blue" if on_front else ".6", zorder=3)
    _name(axes, points)


def _name(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Names beside the plot, in the order of the errors, each with a line to its point."""
    names = sorted(points, key=lambda name: points[name][1], reverse=True)
    line = {"arrowstyle": "-", "color": ".8", "linewidth": 0.6}
    for number, name in enumerate(names):
        place = (1.02, 1 - (number + 0.5) / len(names))
        axes.annotate(
            name,
            points[name],
            place,
            textcoords="axes fraction",
            fontsize=7,
            va="center",
            arrowprops={**line, "shrinkA": 0, "shrinkB": 2},
        )
