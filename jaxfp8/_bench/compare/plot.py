"""Errors over times, with the Pareto front of both. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxfp8._bench.compare.result import LAYER, Compared

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
