"""A picture of whole steps: each kernel a bar along the time, a lane for each contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfp8._bench._case import Measured
from jaxfp8._bench._profile import Profile, stem

_INCH_PER_LANE, _WIDTH, _LEAST_HEIGHT = 0.55, 15.0, 4.0
# Kernels with a colour of their own: the longest in all lanes together.
_COLOURS = 12
_LONGEST_NAME = 48
Lane = tuple[str, Profile]


def lanes(done: Sequence[Measured]) -> list[tuple[str, list[Lane]]]:
    """By case, the profiled contenders."""
    found = [
        (m.case.name, [(n, p) for n, p in m.profiles.items() if isinstance(p, Profile)])
        for m in done
    ]
    return [(case, lanes) for case, lanes in found if lanes]


def figure(title: str, done: Sequence[Measured]) -> Any:
    """A plot for each case, one below the other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    parts = lanes(done)
    colours = _colours([profile for _, part in parts for _, profile in part])
    heights = [1 + len(part) for _, part in parts]
    height = max(_LEAST_HEIGHT, _INCH_PER_LANE * sum(heights) + 1)
    whole = Figure(figsize=(_WIDTH, height), layout="constrained")
    plots = whole.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    whole.suptitle(title)
    for axes, (case, part) in zip(plots, parts, strict=True):
        _draw(axes, case, part, colours)
    handles = [_patch(colour, name[:_LONGEST_NAME]) for name, colour in colours.items()]
    whole.legend(handles=handles, loc="outside right upper", fontsize=7)
    return whole


def _colours(profiles: Sequence[Profile]) -> dict[str, Any]:
    """A colour for each of the longest kernels, and grey for the rest."""
    from matplotlib import colormaps  # noqa: PLC0415

    total: dict[str, float] = {}
    for profile in profiles:
        for group in profile.groups():
            total[group.name] = total.get(group.name, 0.0) + group.seconds
    longest = sorted(total, key=lambda name: -total[name])[:_COLOURS]
    palette = colormaps["tab20"]
    own = {name: palette(number) for number, name in enumerate(longest)}
    return own if len(total) <= _COLOURS else {**own, "others": (0.8, 0.8, 0.8, 1.0)}


def _draw(axes: Any, case: str, part: Sequence[Lane], colours: dict[str, Any]) -> None:
    for row, (_, profile) in enumerate(part):
        bars = [(kernel.start * 1e6, kernel.seconds * 1e6) for kernel in profile.kernels]
        faces = [
            colours.get(stem(kernel.name), colours.get("others")) for kernel in profile.kernels
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=faces)
    axes.set_yticks(range(len(part)), [name for name, _ in part], fontsize=8)
    axes.invert_yaxis()
    axes.set(title=case, xlabel="µs since the first kernel, under the profiler")
    axes.set_xlim(left=0)


def _patch(colour: Any, name: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415

    return Patch(color=colour, label=name)
