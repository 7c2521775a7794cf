"""The options of `python -m jaxfp8 compare`, and the plan made from them."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator

from jaxfp8._bench import _options
from jaxfp8._bench._run import Plan
from jaxfp8._bench._ways import WAYS
from jaxfp8._bench.compare import data, rows
from jaxfp8._bench.compare.data import Data, Shape
from jaxfp8._bench.compare.result import Compared, compared

ROUNDS, MANY_ROUNDS = 4, 15
# Default rows, N and K of the comparison.
_DEFAULT = (256, 1024, 1024)
_SETTINGS = ("shape", "model", "rows", "data", "only", "verify", "time", "no_time", "threads")
_SHAPE = re.compile(r"(\d+)[,x](\d+)[,x](\d+)")

DESCRIPTION = """\
Multiplies the same operands in every way this package has, and says of each what it costs: its
error against float64, and its time as a kernel alone, as a layer that quantises its input, and end
to end from floats. A * marks ways than which none is both more accurate and faster, as a layer.
docs/precision.md says how to read the table.

examples:
  python -m jaxfp8 compare                                    256 x 1024 x 1024, normal
  python -m jaxfp8 compare --shape 16,4096,4096 --data normal --data outliers
  python -m jaxfp8 compare --model llama3-8b --rows 256 --json llama.json --plot llama.html
  python -m jaxfp8 compare --data W.npy --only INT8 --time    your weight [K, N]
  python -m jaxfp8 compare --verify                           exit code 1 where a bound is left
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--shape", metavar="M,N,K", action="append", help="sizes of a product; several times: each"
    )
    models = ", ".join(_options.MODELS)
    sizes.add_argument("--model", metavar="NAME", help=f"the products of a model: {models}")
    parser.add_argument(
        "--rows",
        metavar="M,M,...",
        help=f"M for --model and for a file of weights (default: {_DEFAULT[0]})",
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
    shapes, counts = _shapes_of(options), _rows_of(options)
    for text in options.data or ["normal"]:
        if text in data.DISTRIBUTIONS:
            for shape in shapes:
                yield data.name_of(shape, text), functools.partial(data.drawn, text, shape)
        elif options.shape or options.model:
            raise ValueError(f"--data {text}: a file has sizes of its own; leave --shape, --model")
        elif text.endswith(".npy"):
            for m in counts:  # reports a broken file now
                yield data.loaded(text, m).name, functools.partial(data.loaded, text, m)
        else:
            raise ValueError(f"--data {text}: that is none of {data.FORM}")


def _shapes_of(options: argparse.Namespace) -> list[Shape]:
    if options.model:
        if options.model not in _options.MODELS:
            known = ", ".join(_options.MODELS)
            raise ValueError(f"--model {options.model}: that is none of {known}")
        return _options.shapes(options.model, _rows_of(options))
    return [_shape(text) for text in options.shape or []] or [_DEFAULT]


def _shape(text: str) -> Shape:
    parts = _SHAPE.fullmatch(text)
    if not parts or 0 in (sizes := [int(size) for size in parts.groups()]):
        raise ValueError(f"--shape {text}: three sizes are needed, such as 16,4096,4096")
    m, n, k = sizes
    return m, n, k


def _rows_of(options: argparse.Namespace) -> list[int]:
    if options.rows is None:
        return [_DEFAULT[0]]
    from_files = any(text.endswith(".npy") and "," not in text for text in options.data or ())
    if not options.model and not from_files:
        raise ValueError("--rows goes with --model and with a file of weights")
    return _options.rows_of(options.rows)
