"""The options of `python -m jaxfp8 compare`, and the plan made from them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

from jaxfp8._bench import _options
from jaxfp8._bench._run import Plan
from jaxfp8._bench._ways import WAYS
from jaxfp8._bench.compare import data, rows
from jaxfp8._bench.compare.data import Data
from jaxfp8._bench.compare.result import Compared, compared

ROUNDS, MANY_ROUNDS = 4, 15
# Default N and K of the comparison, and default rows.
_SHAPE, _ROWS = "1024x1024", (256,)
_SETTINGS = ("shapes", "rows", "data", "only", "verify", "time", "no_time", "threads")

DESCRIPTION = """\
Multiplies the same operands in every way this package has, and says of each what it costs: its
error against float64, and its time as a kernel alone, as a layer that quantizes its input, and end
to end from floats. A * marks ways than which none is both more accurate and faster, as a layer.
docs/precision.md says how to read the table.

examples:
  python -m jaxfp8 compare                                    256 x 1024 x 1024, normal
  python -m jaxfp8 compare --shapes 16x4096x4096 --data normal --data outliers
  python -m jaxfp8 compare --shapes llama3-8b --rows 256 --json llama.json --plot llama.html
  python -m jaxfp8 compare --data W.npy --only INT8 --time    your weight [K, N]
  python -m jaxfp8 compare --verify                           exit code 1 where a bound is left
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--shapes", metavar="SHAPES", help=f"{_options.FORM} (default: {_SHAPE})")
    parser.add_argument(
        "--rows",
        metavar="M,M,...",
        help=f"M for NxK, models and a file of weights (default: {_ROWS[0]})",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        action="append",
        help=f"{data.FORM}; several times: each (default: normal)",
    )
    _options.add(parser, "ways", "errors over times")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare operands and products with their bounds; exit code 1 where one is left",
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help=f"{MANY_ROUNDS} rounds instead of {ROUNDS}, and the spread of each time",
    )
    parser.add_argument("--no-time", action="store_true", help="errors only")


def plan(options: argparse.Namespace) -> Plan[Compared]:
    """The plan for the options."""
    if options.time and options.no_time:
        raise ValueError("--time and --no-time: give one of them")
    if options.plot and options.no_time:
        raise ValueError("--plot draws errors over times; leave --no-time out")
    platform = _options.platform_of(options)
    names = _options.chosen(options.only, [way.name for way in WAYS], "ways")
    ways = [way for way in WAYS if way.name in names]
    rounds = 0 if options.no_time else MANY_ROUNDS if options.time else ROUNDS

    def measure(make: Callable[[], Data]) -> Compared:
        return compared(make(), ways, platform, rounds, options.verify)

    return Plan(
        parts={n: functools.partial(measure, make) for n, make in _operands(options)},
        names=names,
        platform=platform,
        json=options.json,
        plot=options.plot,
        settings={key: getattr(options, key) for key in _SETTINGS},
        schema="jaxfp8.compare/1",
        key="products",
        record=rows.product,
        show=functools.partial(
            rows.show, timed=rounds > 0, spread=options.time, verify=options.verify
        ),
        finish=rows.finish,
        figure=rows.figure,
    )


def _operands(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Data]]]:
    """Functions to make the operands, by operand names."""
    rows = None if options.rows is None else _options.rows_of(options.rows)
    for text in options.data or ["normal"]:
        if text in data.DISTRIBUTIONS:
            for shape in _options.shapes(options.shapes or _SHAPE, rows, _ROWS):
                yield data.name_of(shape, text), functools.partial(data.drawn, text, shape)
        elif options.shapes:
            raise ValueError(f"--data {text}: a file has sizes of its own; leave --shapes out")
        elif text.endswith(".npy"):
            for m in rows or _ROWS:  # reports a broken file now
                yield data.loaded(text, m).name, functools.partial(data.loaded, text, m)
        else:
            raise ValueError(f"--data {text}: that is none of {data.FORM}")
