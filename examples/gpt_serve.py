"""The trained GPT served in 8 bits; `python examples/gpt_serve.py --help` for more."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax.numpy as jnp

from gpt import text
from gpt.serve import FLOATS, RECIPES, quality, server, tokens_per_second
from gpt.train import Run, newest, restore

DESCRIPTION = """\
Serves a model that examples/gpt_train.py trained in bfloat16, with a cache of keys and values: in
float32, in bfloat16, and with 8-bit weights. Prints bytes of the parameters, tokens per second,
and on text that was not trained on the perplexity and how often the next byte is float32's.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=pathlib.Path, help="such as gpt_runs/bf16")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="of 16 texts, for the quality")
    options = parser.parse_args(arguments)
    last = newest(options.checkpoint)
    if last is None:
        parser.error(f"no checkpoint in {options.checkpoint}; examples/gpt_train.py leaves some")
    state = restore(Run(recipe="bf16"), last)
    servers = [server(name, state.params) for name in (*FLOATS, *options.recipe)]
    qualities = quality(servers, options.batches)
    _, validation = text.load()
    prompt = jnp.asarray(text.batch(validation, 1, 63, seed=0))
    speed = tokens_per_second(servers, prompt, options.tokens, options.repeat)
    print(f"checkpoint of step {int(state.step)}; greedy, one text, {prompt.shape[1]} bytes before")
    print(f"{'':12} {'KiB':>8} {'tokens/s':>9} {'perplexity':>11} {'agreement':>10}")
    for s in servers:
        row = qualities[s.name]
        print(
            f"{s.name:12} {s.nbytes / 1024:8.0f} {speed[s.name]:9.0f} {row.perplexity:11.4f} "
            f"{row.agreement:10.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
