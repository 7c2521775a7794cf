"""A small GPT trained in bfloat16 and in FP8; `python examples/gpt_train.py --help` for more."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence

import jax

from gpt import curves, mesh
from gpt.model import SIZES
from gpt.train import RECIPES, Run, evaluate, train_with_checkpoints, why_not_in

DESCRIPTION = """\
Trains a byte-level GPT of 4 layers, 256 wide, on the sources of Python's standard library, once
with each recipe, from the same weights and with the same data. Each run leaves four checkpoints;
one that was stopped goes on from its last, on the same mesh or another one. Prints the losses,
and writes them (losses.json) and a picture of them (losses.png).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["bf16", "delayed"])
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="124m is GPT-2's, with words as tokens"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the initial weights; each needs an --out of its own"
    )
    parser.add_argument(
        "--mesh",
        default="",
        help="devices to train on, such as data=2,fsdp=2,model=2; a size each, in any order",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpt_runs"))
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, as a cluster starts them; the mesh spans all their devices",
    )
    options = parser.parse_args(arguments)
    if options.distributed:
        jax.distributed.initialize()
    given = {name: getattr(options, name) for name in ("steps", "batch", "seed", "mesh")}
    runs = [Run(recipe=recipe, config=SIZES[options.size], **given) for recipe in options.recipe]
    for run in runs:
        if wrong := _why_not_split(run) or why_not_in(run, options.out / run.recipe):
            parser.error(wrong)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = {}
    for run in runs:
        lines[run.recipe] = _train(run, options.out / run.recipe)
        if jax.process_index() == 0:
            (options.out / "losses.json").write_text(json.dumps(lines))
    if jax.process_index() == 0:
        curves.draw(lines, options.out / "losses.png")
    return 0


def _why_not_split(run: Run) -> str | None:
    """Why a run cannot be split over its mesh."""
    width = run.config.width
    try:
        sizes = mesh.make(run.mesh).shape
    except ValueError as error:
        return str(error)
    if run.batch % (sizes["data"] * sizes["fsdp"]):
        return f"`--batch`: {run.batch} texts cannot be split over data x fsdp of {run.mesh}"
    if width % sizes["fsdp"] or width % sizes["model"]:
        return f"`--mesh`: fsdp and model have to divide {width}, the width of the model"
    return None


def _train(run: Run, folder: pathlib.Path) -> list[float]:
    """One run; returns the losses of all its steps."""
    ends = [time.perf_counter()]

    def report(number: int, loss: float) -> None:
        ends.append(time.perf_counter())
        if number % 50 == 0:
            print(f"  {run.recipe:8} step {number:4}  loss {loss:.4f}", flush=True)

    state, losses = train_with_checkpoints(run, folder, report)
    speed, last = "no step was left", losses[-50:]
    if len(ends) > 1:
        seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
        tokens = run.batch * run.config.length / seconds
        speed = f"{seconds:.3f} s per step, {tokens:.0f} tokens/s"
    print(
        f"{run.recipe:8} training loss {sum(last) / len(last):.4f} (mean of the last {len(last)} "
        f"steps), validation loss {evaluate(state, run):.4f}, {speed}{_peak()}"
    )
    return losses


def _peak() -> str:
    """The most memory so far in use on the first device; run one recipe to see its own."""
    used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return "" if used is None else f", {used / 2**30:.2f} GiB at most"


if __name__ == "__main__":
    sys.exit(main())
