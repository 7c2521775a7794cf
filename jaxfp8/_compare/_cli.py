"""The options of `python -m jaxfp8 compare`, and the plan that they make."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfp8._bench import _plot, _shapes
from jaxfp8._bench._cli import check_files, default_platform, limit
from jaxfp8._call.library import ffi
from jaxfp8._compare import _data
from jaxfp8._compare._data import Data, Shape
from jaxfp8._compare._paths import PATHS, Path

ROUNDS, MANY_ROUNDS = 4, 15
# N and K of what is compared if nothing else is asked for, and its rows.
_DEFAULT = (256, 1024, 1024)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run.

    Attributes:
      data: functions that make the operands, in order.
      paths: the ways to multiply.
      platform: "cpu" or "cuda".
      rounds: turns of each way; 0 times nothing.
      spread: whether spreads are shown.
      verify: whether results are compared with their bounds.
      json, plot: files to write, or None.
      settings: the options, for the record.
    """

    data: Sequence[Callable[[], Data]]
    paths: Sequence[Path]
    platform: str
    rounds: int
    spread: bool
    verify: bool
    json: str | None
    plot: str | None
    settings: Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--shape", metavar="M,N,K", action="append", help="sizes of a product; several times: each"
    )
    models = ", ".join(_shapes.MODELS)
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
        help=f"{_data.FORM}; several times: each (default: normal)",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="only ways whose name contains TEXT; several times: any of them",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the ways and stop")
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
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON, after each table"
    )
    names = ", ".join(_plot.SUFFIXES)
    parser.add_argument("--plot", metavar="FILE", help=f"draw errors over times ({names})")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processors to use (default: all there are)"
    )
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="where to run (default: what JAX uses)"
    )


def plan(options: argparse.Namespace) -> Plan:
    """The plan for the options.

    Raises:
      ValueError: options are wrong; the message says what to give instead.
    """
    limit(options.threads)
    check_files(options)
    if options.time and options.no_time:
        raise ValueError("--time and --no-time: give one of them")
    if options.plot and options.no_time:
        raise ValueError("--plot draws errors over times; leave --no-time out")
    platform = options.platform or default_platform()
    if not ffi.has_backend(platform):
        raise ValueError(f"--platform {platform}: JAX has no such device here")
    rounds = 0 if options.no_time else MANY_ROUNDS if options.time else ROUNDS
    kept = ("shape", "model", "rows", "data", "only", "verify", "time", "no_time", "threads")
    return Plan(
        data=_operands(options),
        paths=paths(options.only),
        platform=platform,
        rounds=rounds,
        spread=options.time,
        verify=options.verify,
        json=options.json,
        plot=options.plot,
        settings={key: getattr(options, key) for key in kept},
    )


def paths(only: Sequence[str]) -> list[Path]:
    """The ways whose name contains any of some texts; all of them without a text.

    Raises:
      ValueError: a text is in no name.
    """
    for text in only:
        if not any(text in path.name for path in PATHS):
            raise ValueError(f"--only {text}: no way has that in its name; --list prints the names")
    return [path for path in PATHS if not only or any(text in path.name for text in only)]


def _operands(options: argparse.Namespace) -> list[Callable[[], Data]]:
    shapes, rows = _shapes_of(options), _rows_of(options)
    made: list[Callable[[], Data]] = []
    for text in options.data or ["normal"]:
        if text in _data.DISTRIBUTIONS:
            made += [functools.partial(_data.drawn, text, shape) for shape in shapes]
        elif options.shape or options.model:
            raise ValueError(f"--data {text}: a file has sizes of its own; leave --shape, --model")
        elif text.endswith(".npy"):
            for m in rows:
                _data.loaded(text, m)  # says now what is wrong with it
                made.append(functools.partial(_data.loaded, text, m))
        else:
            raise ValueError(f"--data {text}: that is none of {_data.FORM}")
    return made


def _shapes_of(options: argparse.Namespace) -> list[Shape]:
    if options.model:
        if options.model not in _shapes.MODELS:
            known = ", ".join(_shapes.MODELS)
            raise ValueError(f"--model {options.model}: that is none of {known}")
        return _shapes.shapes(options.model, _rows_of(options))
    return [_shape(text) for text in options.shape or []] or [_DEFAULT]


def _shape(text: str) -> Shape:
    found = _SHAPE.fullmatch(text)
    if not found or 0 in (sizes := [int(size) for size in found.groups()]):
        raise ValueError(f"--shape {text}: three sizes are needed, such as 16,4096,4096")
    m, n, k = sizes
    return m, n, k


def _rows_of(options: argparse.Namespace) -> list[int]:
    if options.rows is None:
        return [_DEFAULT[0]]
    from_files = any(text.endswith(".npy") and "," not in text for text in options.data or ())
    if not options.model and not from_files:
        raise ValueError("--rows goes with --model and with a file of weights")
    return _shapes.rows_of(options.rows)
