"""The pictures of the pages, drawn from recorded data. Needs matplotlib.

python tools/pictures.py [NAME ...]    docs/pictures/NAME.svg: roofline, decode, timeline

They are drawn from docs/measurements/.
`python -m jaxfp8 compare --plot` draws `errors.svg`, from docs/pictures/errors.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

DOCS = Path(__file__).parent.parent / "docs"
OUT = DOCS / "pictures"
_BLUE, _GREY, _ORANGE = "tab:blue", ".6", "tab:orange"
_SIZES = re.compile(r"M=(\d+) N=(\d+) K=(\d+)")
# The cases of one kind: beginning of the name, label, bytes of a value of the left side, colour.
_KINDS = (
    ("FP8 tensor", "FP8 by FP8, a scale per tensor", 1, "tab:orange"),
    ("FP8 row", "FP8 by FP8, a scale per row", 1, "tab:red"),
    ("FP8 block", "FP8 in blocks (cuBLASLt)", 1, "tab:purple"),
    ("W8A16", "8-bit weight, bfloat16 activations", 2, _BLUE),
)


def record(name: str) -> dict[str, Any]:
    """A file of docs/measurements."""
    return json.loads((DOCS / "measurements" / f"{name}.json").read_text())


def roofline() -> Figure:
    """Rates on an H200 below the rate of the copy, and below the best measured product."""
    run = record("h200")
    whole = Figure(figsize=(8, 5), layout="constrained")
    axes = whole.subplots()
    axes.set(xscale="log", yscale="log", xlabel="operations per byte moved", ylabel="TFLOP/s")
    axes.set_title(f"Products on one {run['machine']['devices'][0]}, {run['source']['date']}")
    best = 0.0
    for kind, label, width, colour in _KINDS:
        points = list(_points(run["cases"], kind, width))
        best = max([best, *(y for _, y in points)])
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=26, color=colour, label=label, zorder=3)
    ridge = best / (run["copy"] / 1e12)
    axes.plot([1, ridge], [run["copy"] / 1e12, best], color=_GREY, label="rate of the copy")
    axes.plot([ridge, 6000], [best, best], color=_GREY, linestyle="--", label="fastest product")
    axes.legend(fontsize=8)
    return whole


def _points(cases: Sequence[Any], kind: str, width: int) -> Iterator[tuple[float, float]]:
    """Operations for each byte, and TFLOP/s, of the cases of one kind with a time or rate."""
    for case in cases:
        sizes, ours = _SIZES.search(case["name"]), case["contenders"][0]
        if not case["name"].startswith(kind) or not sizes:
            continue
        m, n, k = map(int, sizes.groups())
        work, moved = 2.0 * m * n * k, n * k + width * m * k + 2.0 * m * n
        rate = work / ours["seconds"] if "seconds" in ours else ours.get("rate")
        if rate:
            yield work / moved, rate / 1e12


def decode() -> Figure:
    """The time of a decoding step on an H100, for each batch and form."""
    run = record("h100_decode")
    whole = Figure(figsize=(8, 4), layout="constrained")
    axes = whole.subplots()
    names = [contender["name"] for contender in run["cases"][0]["contenders"]]
    colours = (_BLUE, "tab:cyan", "tab:green", _GREY)
    height = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, colours, strict=True)):
        places = [row + number * height for row in range(len(run["cases"]))]
        times = [case["contenders"][number]["seconds"] * 1e3 for case in run["cases"]]
        bars = axes.barh(places, times, height, color=colour, label=name)
        axes.bar_label(bars, [f"{time:.2f}" for time in times], padding=2, fontsize=7)
    middle = height * (len(names) - 1) / 2
    batches = [re.search(r"M = (\d+)", case["name"])[1] for case in run["cases"]]  # type: ignore[index]
    axes.set_yticks([row + middle for row in range(len(batches))], [f"batch {b}" for b in batches])
    axes.invert_yaxis()
    device, source = run["machine"]["devices"][0], run["source"]
    axes.set(xlabel="milliseconds; shorter is faster")
    axes.set_title(f"A decoding step, 8 layers of Llama-3-8B, {device}, commit {source['commit']}")
    axes.legend(fontsize=8, loc="upper right")
    return whole


def timeline() -> Figure:
    """A decoding step on a CPU, launch by launch, in each form of 8 bits."""
    run = record("xeon_decode")
    (case,) = run["cases"]
    lanes = [profile for profile in case["profiles"] if profile["name"].startswith("jaxfp8")]
    seconds: Counter[str] = Counter()
    for lane in lanes:
        seconds.update({k["name"]: k["seconds"] for k in lane["kernels"]})
    names = [name for name, _ in seconds.most_common(5)]
    colours = dict(zip(names, (_BLUE, _ORANGE, "tab:green", "tab:red", "tab:purple"), strict=True))
    whole = Figure(figsize=(9, 3), layout="constrained")
    axes = whole.subplots()
    for row, lane in enumerate(lanes):
        bars = [(k["start"] * 1e3, k["seconds"] * 1e3) for k in lane["launches"]]
        stems = [k["name"].partition(".")[0] for k in lane["launches"]]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=[colours.get(n, _GREY) for n in stems])
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds, under the profiler", title=case["name"])
    handles = [Patch(color=colours.get(name, _GREY), label=name) for name in (*names, "others")]
    whole.legend(handles=handles, loc="outside right upper", fontsize=7)
    return whole


PICTURES = {f.__name__: f for f in (roofline, decode, timeline)}


def main(names: Sequence[str]) -> int:
    """Draw pictures, all unless some are named."""
    mpl.rcParams["svg.hashsalt"] = "jaxfp8"  # the same file for the same data
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    OUT.mkdir(exist_ok=True)
    for name in names or PICTURES:
        figure = PICTURES[name]()
        figure.savefig(OUT / f"{name}.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
