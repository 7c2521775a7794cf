"""Plots of cases: a roofline, and our speed relative to the peers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxfp8._bench import _rows
from jaxfp8._bench._case import Measured, is_ours

_INCH_PER_CASE, _WIDTH = 0.32, 15.0
# Contenders with a colour of their own; further ones are grey.
_COLOURS = 9


def figure(title: str, done: Sequence[Measured]) -> Any:
    """Both plots, side by side."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    height = max(6.0, 2 + _INCH_PER_CASE * len(done))
    whole = Figure(figsize=(_WIDTH, height), layout="constrained")
    roofs, ratios = whole.subplots(1, 2)
    whole.suptitle(title)
    roofline(roofs, done)
    times(ratios, done)
    return whole


def roofline(axes: Any, done: Sequence[Measured]) -> None:
    """Operations per second over operations per byte, below the machine's peaks."""
    axes.set(xscale="log", yscale="log", title="Roofline")
    axes.set(xlabel="operations per byte moved", ylabel="operations per second")
    placed = [m for m in done if m.case.flops and m.case.bytes]
    places = {m.case.name: m.case.flops / m.case.bytes for m in placed}
    for ours, label, style in ((False, "peers", ".7"), (True, "jaxfp8", "tab:blue")):
        points = [
            (places[m.case.name], m.case.flops / seconds)
            for m in placed
            for name in m.timings
            if is_ours(name) == ours and (seconds := m.seconds(name))
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=14, color=style, label=label, zorder=3)
    for number, (label, x, y) in enumerate(_roofs(places.values(), done)):
        axes.plot(x, y, linewidth=1, color=f"C{number + 1}", label=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _roofs(
    places: Any, done: Sequence[Measured]
) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Lines of the best rates seen, as far as there are points."""
    best: dict[str, float] = {}
    for measured in done:
        for kind, peak in measured.peaks.items():
            best[kind] = max(peak, best.get(kind, 0.0))
    if not places:
        return
    low, high = min(places) / 2, max(places) * 2
    products = {kind: peak for kind, peak in best.items() if kind != "read"}
    for kind, peak in products.items():
        yield f"{_rows.peak_name(kind)}, {_rows.rate(peak, kind)}", (low, high), (peak, peak)
    if "read" in best:
        end = min(high, max(products.values(), default=best["read"] * high) / best["read"])
        label = f"reading memory, {_rows.rate(best['read'], 'read')}"
        yield label, (low, end), (low * best["read"], end * best["read"])


def times(axes: Any, done: Sequence[Measured]) -> None:
    """For each case, our speed relative to the others."""
    compared = [m for m in done if len(m.timings) > 1 and m.seconds(m.ours)]
    axes.set(xscale="log", title="Time, as a multiple of jaxfp8's; left of 1 is faster")
    axes.axvline(1, color="tab:blue", linewidth=1)
    axes.set_yticks(range(len(compared)), [m.case.name for m in compared], fontsize=8)
    axes.invert_yaxis()
    names = list(dict.fromkeys(name for m in compared for name in m.timings if name != m.ours))
    for number, name in enumerate(names):
        points = [
            (ratio, row) for row, m in enumerate(compared) if (ratio := m.ratio(name)) is not None
        ]
        if points:
            colour = f"C{number + 1}" if number < _COLOURS else ".7"
            axes.scatter(*zip(*points, strict=True), s=16, color=colour, label=name, zorder=3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points
