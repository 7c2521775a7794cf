"""The options of `python -m jaxfp8 bench --step`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxfp8._bench import _decoder, _shapes
from jaxfp8._bench._step import CACHE, KINDS, LAYERS, LAYOUTS, ROWS, Step

NAMES = ("step", "layers", "cache", "layout", "as_written")
_MODELS = ", ".join(_decoder.MODELS)


def add(parser: argparse.ArgumentParser) -> None:
    """The options, on the parser of the command."""
    group = parser.add_argument_group("whole steps")
    rows = "; ".join(f"{kind} {','.join(map(str, ROWS[kind]))}" for kind in KINDS)
    group.add_argument(
        "--step",
        choices=KINDS,
        help="time a whole step of decoders instead of products; --shapes names them "
        f"({_MODELS}; default: {_decoder.DEFAULT}), "
        f"--rows are texts (decode) or tokens of one text (prefill; default: {rows})",
    )
    group.add_argument(
        "--layers", type=int, metavar="N", help=f"layers of the decoder (default: {LAYERS} at most)"
    )
    group.add_argument(
        "--cache", type=int, metavar="N", help=f"tokens in the cache of decode (default: {CACHE})"
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="of weights: [N, K], as in checkpoints, or [K, N] (default: nk)",
    )
    group.add_argument(
        "--as-written",
        action="store_true",
        help="time XLA's own programs for the 8-bit forms, too",
    )


def check_unused(options: argparse.Namespace) -> None:
    """Refuses options without effect unless --step is given."""
    for name in NAMES[1:]:
        if getattr(options, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} goes with --step {' or '.join(KINDS)}")


def steps(options: argparse.Namespace, rows: Sequence[int] | None) -> list[Step]:
    """The requested steps.

    Raises:
      ValueError: a model is unknown, or a number is not positive.
    """
    named = _decoder.DEFAULT if options.shapes == _shapes.TABLE else options.shapes
    models = [name.strip() for name in named.split(",")]
    for name in models:
        if name not in _decoder.MODELS:
            raise ValueError(f"--step: {name!r} is no decoder; --shapes takes {_MODELS}")
    for name in ("layers", "cache"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: a number from 1 is needed")
    if options.cache is not None and options.step != "decode":
        raise ValueError("--cache goes with --step decode; the cache of prefill has its tokens")
    return [
        Step(
            kind=options.step,
            model=name,
            rows=count,
            layers=options.layers or min(LAYERS, _decoder.MODELS[name].layers),
            cache=options.cache or CACHE,
            layout=options.layout or LAYOUTS[0],
            as_written=options.as_written,
        )
        for name in models
        for count in rows or ROWS[options.step]
    ]
