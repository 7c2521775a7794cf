"""The plot of a run, with matplotlib: as a file, or as a page with tables below it."""

from __future__ import annotations

import html
import importlib.util
import io
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxfp8._bench._case import Measured
from jaxfp8._value import tables

SUFFIXES = (".png", ".svg", ".pdf", ".html")
_INCH_PER_CASE, _WIDTH, _LEAST_HEIGHT = 0.32, 9.0, 6.0
# Contenders with a colour of their own; further ones are grey.
_COLOURS = 9


def why_not(path: str) -> str | None:
    """Why a plot cannot be drawn into a file of this name, or None if it can."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        return f"--plot {path}: the name has to end with one of {', '.join(SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or pip install 'jaxfp8[bench]'"
    return None


def drawn(path: str, title: str, figure: Any, body: str) -> bytes:
    """A figure of matplotlib as a file of this name; a page has a text below it."""
    suffix = pathlib.Path(path).suffix.lower()[1:]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if suffix == "html" else suffix, dpi=120)
    if suffix != "html":
        return buffer.getvalue()
    svg = buffer.getvalue().decode()
    style = "<style>svg { max-width: 100%; height: auto }</style>"
    text = f"{style}\n{svg[svg.index('<svg') :]}\n<pre>{html.escape(body)}</pre>"
    return tables.page(title, text).encode()


def times(title: str, done: Sequence[Measured]) -> Any:
    """For each case, the time of each contender as a multiple of the first one's."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    height = max(_LEAST_HEIGHT, 2 + _INCH_PER_CASE * len(done))
    whole = Figure(figsize=(_WIDTH, height), layout="constrained")
    whole.suptitle(title)
    axes: Any = whole.subplots()
    compared = [m for m in done if len(m.timings) > 1 and m.seconds(m.ours)]
    axes.set(xscale="log", title="Time as a multiple of the first contender's")
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
    return whole
