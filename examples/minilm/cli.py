"""The command line of the demo."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from minilm import files
from minilm.console import show
from minilm.job import do
from minilm.quantize import RECIPES
from minilm.sentences import SENTENCES

T = TypeVar("T")
UNCUT = 1000  # columns, where the output is no terminal
DESCRIPTION = f"""\
Embeds sentences with the real weights of all-MiniLM-L6-v2, without a network: in float32, and
by each recipe of 8 bits as XLA runs it and through jaxfp8.rewrite. Shows them all, the fastest
first, and compares the numbers of the fastest recipe with a numpy model. Without a SENTENCE it
takes {len(SENTENCES)} of its own.
Exit code: 0 all checks passed, 1 one failed or something is missing, 2 misused,
130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not have every script
    try:
        return run(options)
    except files.DemoError as error:
        print(f"minilm_demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell reports a program that Ctrl-C ended


def run(options: argparse.Namespace) -> int:
    """The job with parsed options."""
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def track(items: Sequence[T], title: str) -> Iterable[T]:
            return _tracked(progress, items, title)

        loaded = files.load()
        texts = options.sentence or SENTENCES
        recipes = [options.recipe] if options.recipe else RECIPES
        result = do(loaded, texts, recipes, options.repeat, track)
    show(result, Console(width=None if sys.stdout.isatty() else UNCUT))
    return 0 if result.passed else 1


def _tracked(progress: Progress, items: Sequence[T], title: str) -> Iterator[T]:
    """The items, with a bar that goes away at the end."""
    yield from progress.track(items, description=title)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="minilm_demo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sentence", nargs="*", metavar="SENTENCE", help="what to embed")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="measure this one alone; FP8_W8A16: FP8 weights, bfloat16 activations; FP8_DYNAMIC: "
        "FP8 activations too, a scale per token; INT8_DYNAMIC: int8 weights and activations",
    )
    parser.add_argument(
        "--repeat", type=_positive, default=7, metavar="N", help="timed passes (default 7)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)
