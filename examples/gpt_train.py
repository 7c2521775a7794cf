"""A small GPT trained in bfloat16 and in FP8; `python examples/gpt_train.py --help` for more."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from gpt import curves
from gpt.train import RECIPES, Run, evaluate, first_state, restore, save, train

DESCRIPTION = """\
Trains a byte-level GPT of 4 layers, 256 wide, on the sources of Python's standard library, once
with each recipe, from the same weights and with the same data. Halfway each run is saved and
restored. Prints the losses, and writes them (losses.json) and a picture of them (losses.png).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["bf16", "delayed"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpt_runs"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = {}
    for recipe in options.recipe:
        run = Run(recipe=recipe, steps=options.steps, batch=options.batch)
        lines[recipe] = _train(run, options.out / recipe)
        (options.out / "losses.json").write_text(json.dumps(lines))
    curves.draw(lines, options.out / "losses.png")
    return 0


def _train(run: Run, folder: pathlib.Path) -> list[float]:
    """One run, in two halves with a checkpoint between them."""

    def report(number: int, loss: float) -> None:
        if number % 50 == 0:
            print(f"  {run.recipe:8} step {number:4}  loss {loss:.4f}", flush=True)

    start = time.perf_counter()
    state, losses = train(run, first_state(run), run.steps // 2, report)
    if not folder.exists():
        save(state, folder)
    state, rest = train(run, restore(run, folder), None, report)
    seconds = (time.perf_counter() - start) / run.steps
    last = losses + rest
    mean = sum(last[-50:]) / len(last[-50:])
    print(
        f"{run.recipe:8} training loss {mean:.4f} (mean of the last {len(last[-50:])} steps), "
        f"validation loss {evaluate(state, run):.4f}, {seconds:.2f} s per step"
    )
    return last


if __name__ == "__main__":
    sys.exit(main())
