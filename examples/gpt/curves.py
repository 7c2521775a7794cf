"""The curves of several runs in one picture."""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHING = 0.95


def smooth(losses: list[float]) -> list[float]:
    """An exponential average without the bias of its start."""
    smoothed, average = [], 0.0
    for number, loss in enumerate(losses, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**number))
    return smoothed


def draw(curves: dict[str, list[float]], file: pathlib.Path) -> None:
    """Losses by step, one line for each recipe, and below them their distance from the first."""
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    names = list(curves)
    first = smooth(curves[names[0]])
    for name in names:
        line = smooth(curves[name])
        top.plot(line, label=name, linewidth=1)
        apart = [100 * (a / b - 1) for a, b in zip(line, first, strict=False)]
        bottom.plot(apart, linewidth=1)
    top.set_ylabel("training loss (nats per byte, smoothed)")
    bottom.set_ylabel(f"% from {names[0]}")
    bottom.set_xlabel("step")
    bottom.set_ylim(-2, 2)
    top.legend()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
