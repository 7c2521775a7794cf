"""The options of `python -m jaxfp8 bench`, and the plan that they make."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxfp8._bench import _cpu, _gpu, _plot, _shapes, _step, _step_options
from jaxfp8._bench._case import Case
from jaxfp8._call.library import ffi
from jaxfp8._value.files import why_not_written

ROUNDS, QUICK_ROUNDS = 15, 4
SUITES: dict[str, Any] = {"cpu": _cpu, "cuda": _gpu}

DESCRIPTION = """\
Times matrix products on 8-bit data beside what else computes them on this machine: XLA on the same
expression and on wider types, and oneDNN where PyTorch is installed. All take turns; a row has the
median and the spread (half the distance between the quartiles), the rate, its share of the peak
that the same turns showed, and how many times longer than jaxfp8 it takes. docs/benchmark.md says
how it is done and what the options are good for.

examples:
  python -m jaxfp8 bench                                     the table the kernels are judged by
  python -m jaxfp8 bench --shapes llama3-8b --rows 1,16      products of a known model
  python -m jaxfp8 bench --shapes 4096x4096,1x14336x4096     your own, NxK or MxNxK
  python -m jaxfp8 bench --only int8 --json int8.json --plot int8.html
  python -m jaxfp8 bench --shapes llama3-8b --step decode    a whole decoding step, by kernel
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run.

    Attributes:
      cases: functions that make the cases, by name.
      platform: "cpu" or "cuda".
      rounds: turns of each contender.
      aims: whether results are compared with the figures that the kernels are to reach.
      json, plot: files to write, or None.
      settings: the options, for the record.
    """

    cases: Mapping[str, Callable[[], Case]]
    platform: str
    rounds: int
    aims: bool
    json: str | None
    plot: str | None
    settings: Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--shapes",
        default=_shapes.TABLE,
        metavar="SHAPES",
        help=f"{_shapes.FORM} (default: {_shapes.TABLE})",
    )
    rows = ",".join(map(str, _shapes.ROWS))
    parser.add_argument("--rows", metavar="M,M,...", help=f"M for NxK and models (default: {rows})")
    _step_options.add(parser)
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="only cases whose name contains TEXT; several times: any of them",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON, after each case")
    names = ", ".join(_plot.SUFFIXES)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help=f"draw a roofline and the ratios, of steps a timeline ({names})",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}"
    )
    parser.add_argument(
        "--aims",
        action="store_true",
        help="compare with the figures that the kernels are developed towards, too",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processors to use (default: all there are)"
    )
    parser.add_argument(
        "--platform", choices=sorted(SUITES), help="where to run (default: what JAX uses)"
    )


def plan(options: argparse.Namespace) -> Plan:
    """The plan for the options.

    Raises:
      ValueError: options are wrong; the message says what to give instead.
      LibraryError: the kernel library cannot be used.
    """
    limit(options.threads)
    check_files(options)
    platform = options.platform or default_platform()
    cases = _cases(options, platform)
    parts = options.only or [""]
    for part in parts:
        if not any(part in name for name in cases):
            raise ValueError(
                f"--only {part}: none of {len(cases)} cases has that in its name; "
                "--list prints the names"
            )
    chosen = {name: make for name, make in cases.items() if any(part in name for part in parts)}
    if not options.list and not ffi.has_backend(platform):
        raise ValueError(f"--platform {platform}: JAX has no such device here")
    return Plan(
        cases=chosen,
        platform=platform,
        rounds=QUICK_ROUNDS if options.quick else ROUNDS,
        aims=options.aims,
        json=options.json,
        plot=options.plot,
        settings={key: getattr(options, key) for key in _settings(options)},
    )


def _settings(options: argparse.Namespace) -> tuple[str, ...]:
    """The options that a record has."""
    of_step = _step_options.NAMES if options.step else ()
    return ("shapes", "rows", "only", "quick", *of_step)


def limit(threads: int | None) -> None:
    """Limits the process to some processors, before a backend makes its threads."""
    if threads is None:
        return
    allowed = sorted(os.sched_getaffinity(0))
    if not 0 < threads <= len(allowed):
        raise ValueError(f"--threads {threads}: this process may use 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:threads])


def check_files(options: argparse.Namespace) -> None:
    """Checks the output files before the measurement, not after it."""
    if options.plot and (reason := _plot.why_not(options.plot)):
        raise ValueError(reason)
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (reason := why_not_written(path)):
            raise ValueError(f"{option} {path}: {reason}")


def default_platform() -> str:
    """Where JAX runs if nothing else is asked for: "cpu" or "cuda"."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def _cases(options: argparse.Namespace, platform: str) -> dict[str, Callable[[], Case]]:
    suite = SUITES[platform]
    rows = None if options.rows is None else _shapes.rows_of(options.rows)
    if options.step:
        return dict(_step.cases(_step_options.steps(options, rows), suite.memory))
    _step_options.check_unused(options)
    if options.shapes != _shapes.TABLE:
        return dict(suite.shaped(_shapes.shapes(options.shapes, rows)))
    if rows is not None:
        raise ValueError(f"--rows goes with --shapes; the {_shapes.TABLE} has rows of its own")
    return dict(suite.table())
