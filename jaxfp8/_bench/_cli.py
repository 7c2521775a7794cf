"""The options of `python -m jaxfp8 bench`, and the plan made from them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxfp8._bench import (
    _cases,
    _decoder,
    _options,
    _plot,
    _promise,
    _record,
    _rows,
    _scale,
    _scale_rows,
    _step,
    _written,
)
from jaxfp8._bench._case import Case, Measured, timed
from jaxfp8._bench._run import Plan

ROUNDS, QUICK_ROUNDS = 15, 4
_LARGE = next(iter(_scale.AMOUNTS))
_SETTINGS, _OF_STEPS = ("shapes", "rows", "only", "quick"), ("step", "layers", "cache")

DESCRIPTION = """\
Times matrix products on 8-bit data beside what else computes them on this machine: XLA on the same
expression and on wider types, and oneDNN where PyTorch is installed. All take turns; a row has the
median and the spread (half the distance between the quartiles), the rate, its share of the peak
that the same turns showed, and how many times longer than jaxfp8 it takes. docs/benchmark.md says
how it is done and what the options are good for.

examples:
  python -m jaxfp8 bench                                     all cases
  python -m jaxfp8 bench --shapes llama3-8b --rows 1,16      products of a known model
  python -m jaxfp8 bench --shapes 4096x4096,1x14336x4096     your own, NxK or MxNxK
  python -m jaxfp8 bench --step decode --rows 1,16           whole steps of Llama-3-8B's sizes
  python -m jaxfp8 bench --never-slower                      rewritten functions beside the written
  python -m jaxfp8 bench --devices 4                         whole programs on 1, 2 and 4 devices
  python -m jaxfp8 bench --only int8 --json int8.json --plot int8.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--shapes",
        default=_options.TABLE,
        metavar="SHAPES",
        help=f"{_options.TABLE}, or {_options.FORM} (default: {_options.TABLE})",
    )
    rows = ",".join(map(str, _options.ROWS))
    parser.add_argument("--rows", metavar="M,M,...", help=f"M for NxK and models (default: {rows})")
    parser.add_argument(
        "--step",
        choices=tuple(_step.ROWS),
        help=f"time whole steps of decoders ({', '.join(_decoder.MODELS)}; --shapes names them, by "
        f"default {_step.MODEL}); --rows are texts (decode), or tokens of one (others)",
    )
    for name, default, what in (
        ("layers", _step.LAYERS, "layers of --step"),
        ("cache", _step.CACHE, "tokens in the cache of --step decode"),
    ):
        text = f"{what} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--never-slower",
        action="store_true",
        help="time products and programs rewritten and as written; fails if any becomes slower",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="time decode, prefill, training and experts on 1, 2, 4 ... N devices, N a power of "
        f"two; --shapes is {_LARGE} (default) or tiny, and --rows are those of decode",
    )
    text = "which products --never-slower draws (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    _options.add(parser, "cases", "the times as multiples of the first contender's")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}; --devices: one device and all of them",
    )


def plan(options: argparse.Namespace) -> Plan[Measured]:
    """The plan for the options."""
    platform = _options.platform_of(options)
    cases = _cases_of(options, platform)
    names = _options.chosen(options.only, list(cases), "cases")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    settings = (*_SETTINGS, *(_OF_STEPS if options.step else ()))
    one: dict[str, Any] = {"record": _record.case, "show": _rows.show, "finish": _rows.finish}
    measure = timed
    if options.never_slower:
        settings = ("never_slower", "seed", "only", "quick")
        one = {name: getattr(_promise, name) for name in ("record", "show", "finish")}
        measure = _promise.twice
    elif options.devices:
        settings = ("devices", *_SETTINGS)
        one |= {name: getattr(_scale_rows, name) for name in ("show", "finish")}
    return Plan(
        parts={n: functools.partial(measure, n, cases[n], rounds) for n in names},
        names=names,
        platform=platform,
        json=options.json,
        plot=options.plot,
        settings={key: getattr(options, key) for key in settings},
        schema=1,
        key="cases",
        figure=_plot.times,
        **one,
    )


def _cases_of(options: argparse.Namespace, platform: str) -> dict[str, Callable[[], Case]]:
    rows = None if options.rows is None else _options.rows_of(options.rows)
    layers, cache, is_table = options.layers, options.cache, options.shapes == _options.TABLE
    if layers < 1 or cache < 1:
        raise ValueError("--layers and --cache: a number from 1 is needed")
    of_decode, of_steps = cache != _step.CACHE, layers != _step.LAYERS
    if (of_decode and options.step != "decode") or (of_steps and not options.step):
        raise ValueError("--layers goes with --step, and --cache with --step decode")
    if options.devices is not None:
        return dict(_on_devices(options, platform, rows))
    if options.never_slower:
        if options.step or rows or not is_table:
            raise ValueError("--never-slower has shapes of its own; --seed draws others")
        return dict(_written.cases(platform, options.seed))
    if options.step:
        counts = rows or _step.ROWS[options.step]
        models = _step.MODEL if is_table else options.shapes
        return dict(_cases.steps(platform, options.step, models, counts, layers, cache))
    if not is_table:
        return dict(_cases.shaped(platform, _options.shapes(options.shapes, rows, _options.ROWS)))
    if rows is not None:
        raise ValueError(f"--rows goes with --shapes; the {_options.TABLE} has rows of its own")
    return dict(_cases.table(platform))


def _on_devices(options: argparse.Namespace, platform: str, rows: list[int] | None) -> _cases.Named:
    shapes = _LARGE if options.shapes == _options.TABLE else options.shapes
    if options.step or options.never_slower or shapes not in _scale.AMOUNTS:
        known = " or ".join(_scale.AMOUNTS)
        raise ValueError(f"--devices has programs of its own; --shapes takes {known}")
    there = options.devices if options.list else jax.device_count(platform)
    if not 1 <= options.devices <= there:
        remedy = "JAX_NUM_CPU_DEVICES=N gives a CPU several"
        raise ValueError(f"--devices {options.devices}: 1 to {there} are here; {remedy}")
    if options.devices.bit_count() > 1:
        needs = "programs are split in powers of two"
        fewer = 1 << (options.devices.bit_length() - 1)
        raise ValueError(f"--devices {options.devices}: {needs}; take {fewer}")
    counts = _scale.counts(options.devices, options.quick)
    return _scale.cases(platform, counts, _scale.AMOUNTS[shapes], rows)
