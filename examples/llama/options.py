"""Options that the commands of this example share."""

from __future__ import annotations

import argparse

from llama.sampling import Sampling


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Options of decoding: the choice of tokens, the cache, and what runs the layers."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--cache", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument(
        "--functions", action="store_true", help="as plain functions with a loop over the layers"
    )


def sampling(options: argparse.Namespace) -> Sampling:
    """The choice of tokens that the options name; a ValueError if one is out of its range."""
    return Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
