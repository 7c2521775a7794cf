"""The command line: `python -m jaxfp8 doctor`, `explain`, `bench`, `compare` and more."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jaxfp8
from jaxfp8 import _doctor, checkpoint
from jaxfp8._bench import _cli, _run
from jaxfp8._compare import _cli as _compare_cli
from jaxfp8._compare import _run as _compare_run
from jaxfp8._rewrite import show
from jaxfp8._value.files import write_whole

_EXPLAIN = """\
Traces FUNCTION with the arguments that MAKE_ARGS() returns (a tuple; shapes made by
jax.ShapeDtypeStruct will do) and prints, for each dot product, whether jaxfp8.rewrite takes it,
and if not, why, with the file and the line. Nothing is computed.

examples:
  python -m jaxfp8 explain my_model:forward --args my_model:example_arguments
  python -m jaxfp8 explain my_model:Layer.forward --args my_model:arguments --html report.html
  python -m jaxfp8 explain my_model:forward --args my_model:example_arguments --strict
"""


class _UsageError(Exception):
    """Wrong arguments; the message says what to type instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 well, 1 broken or missed (`explain --strict`), 2 misused, 130 cut off.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except _UsageError as error:
        print(f"jaxfp8 {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8", description="8-bit matrix products that are real, in JAX."
    )
    version = f"jaxfp8 {_doctor.version_of('jaxfp8')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what runs, and the command that mends the rest",
        description="Prints versions, libraries, processor features, kernels, devices and call "
        "counters, and runs a small product on the kernel. Exit code 1 if something is broken.",
    )
    doctor.set_defaults(run=lambda options: _doctor.run())
    _add_explain(commands)
    bench = commands.add_parser(
        "bench",
        help="how fast the kernels are on this machine, beside XLA and oneDNN",
        description=_cli.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _cli.add_options(bench)
    bench.set_defaults(run=_bench)
    compare = commands.add_parser(
        "compare",
        help="what each way to multiply costs in accuracy and in time, on your sizes and data",
        description=_compare_cli.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _compare_cli.add_options(compare)
    compare.set_defaults(run=_compare)
    _add_checkpoints(commands)
    return parser


def _add_explain(commands: Any) -> None:
    """The command on the products of a function."""
    explain = commands.add_parser(
        "explain",
        help="which dot products of a function are rewritten, and why not the others",
        description=_EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("function", metavar="MODULE:FUNCTION", help="what to look into")
    explain.add_argument(
        "--args",
        metavar="MODULE:MAKE_ARGS",
        help="function of no arguments that returns the tuple of FUNCTION's (default: none)",
    )
    explain.add_argument(
        "--compute",
        choices=("int8",),
        help="as `rewrite(FUNCTION, compute=...)`: FP8 data rounded once more, and what that costs",
    )
    explain.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    explain.add_argument("--html", metavar="FILE", help="write the report as a page too")
    explain.add_argument(
        "--device",
        metavar="NAME",
        help="print what each product takes on a device, too, and where bfloat16 is faster (h100, "
        "h200)",
    )
    explain.add_argument(
        "--strict",
        action="store_true",
        help="exit code 1 if 8-bit data reaches a dot product that is not rewritten",
    )
    explain.set_defaults(run=_explain)


def _add_checkpoints(commands: Any) -> None:
    """The commands on checkpoints: `inspect` and `quantize`."""
    look = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, and how its weights would load",
        description="Prints the format, arrays, bytes and scales of a checkpoint, and reads "
        "none of its weights. Exit code 1 if it would not load.",
    )
    look.add_argument("path", metavar="PATH", help="a safetensors file, or a folder")
    look.add_argument("--json", metavar="FILE", help="write it as JSON too")
    look.set_defaults(run=_inspect)
    quantize = commands.add_parser(
        "quantize",
        help="an 8-bit checkpoint from one in floats",
        description="Quantises the weights of SRC tensor by tensor and writes DST. The same "
        "command goes on where one that was cut off stopped.",
    )
    quantize.add_argument("source", metavar="SRC", help="a safetensors file or folder, in floats")
    quantize.add_argument("target", metavar="DST", help="the folder to make")
    names = sorted(n for n in jaxfp8.__all__ if isinstance(getattr(jaxfp8, n), jaxfp8.Recipe))
    quantize.add_argument("--recipe", choices=names, required=True, help="how weights are held")
    quantize.add_argument("--only", metavar="REGEX", help="quantise the weights it matches whole")
    quantize.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    quantize.set_defaults(run=_quantize)


def _inspect(options: argparse.Namespace) -> int:
    try:
        found = checkpoint.inspect(options.path)
    except checkpoint.CheckpointError as error:
        raise _UsageError(str(error)) from error
    if options.json:
        _write(options.json, found.to_json(indent=1) + "\n")
    print(found)
    return 1 if found.problems else 0


def _quantize(options: argparse.Namespace) -> int:
    where = _matching(options.only) if options.only else None
    recipe = getattr(jaxfp8, options.recipe)
    try:
        report = checkpoint.quantize(options.source, options.target, recipe, where=where)
    except checkpoint.CheckpointError as error:
        raise _UsageError(str(error)) from error
    if options.json:
        _write(options.json, report.to_json(indent=1) + "\n")
    print(report)
    return 0


def _matching(pattern: str) -> Callable[[str, tuple[int, ...]], bool]:
    """Whether a name matches a regular expression as a whole."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise _UsageError(f"--only: {pattern!r} is no regular expression: {error}") from error
    return lambda name, shape: compiled.fullmatch(name) is not None


def _bench(options: argparse.Namespace) -> int:
    try:
        plan = _cli.plan(options)
    except (ValueError, jaxfp8.LibraryError) as error:
        raise _UsageError(str(error)) from error
    if options.list:
        print("\n".join(plan.cases))
        return 0
    return _run.run(plan)


def _compare(options: argparse.Namespace) -> int:
    try:
        plan = _compare_cli.plan(options)
    except (ValueError, jaxfp8.LibraryError) as error:
        raise _UsageError(str(error)) from error
    if options.list:
        print("\n".join(path.name for path in plan.paths))
        return 0
    return _compare_run.run(plan)


def _explain(options: argparse.Namespace) -> int:
    function = _load(options.function)
    arguments = _arguments(options.args)
    if reason := _why_not_called_with(function, arguments):
        remedy = (
            f"{options.args} has to return a tuple of its arguments"
            if options.args
            else "give --args MODULE:MAKE_ARGS, a function that returns a tuple of them"
        )
        raise _UsageError(f"{options.function} takes other arguments: {reason}; {remedy}")
    report = jaxfp8.explain(function, compute=options.compute)(*arguments)
    predicted = _predicted(report, options.device)
    if options.json:
        _write(options.json, report.to_json(indent=1) + "\n")
    if options.html:
        _write(options.html, report.to_html())
    show(report)
    if predicted is not None:
        print(predicted)
    return 1 if options.strict and report.missed else 0


def _predicted(report: jaxfp8.Report, device: str | None) -> Any:
    if device is None:
        return None
    try:
        return report.predict(device)
    except ValueError as error:
        raise _UsageError(str(error)) from error


def _arguments(path: str | None) -> tuple[Any, ...]:
    """What the function that `path` names returns."""
    if path is None:
        return ()
    make = _load(path)
    if reason := _why_not_called_with(make, ()):
        raise _UsageError(f"{path} has to be a function of no arguments: {reason}")
    arguments = make()
    if not isinstance(arguments, tuple):
        got = type(arguments).__name__
        raise _UsageError(f"{path} returned a {got}, but a tuple of arguments is needed")
    return arguments


def _why_not_called_with(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str | None:
    """Why the function cannot take that many arguments; None if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in C, for instance
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _write(path: str, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise _UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def _load(path: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names."""
    module_name, colon, names = path.partition(":")
    if not (module_name and colon and names):
        raise _UsageError(f"{path!r} is not of the form MODULE:FUNCTION, as in my_model:forward")
    found = _import(module_name)
    for name in names.split("."):
        if not hasattr(found, name):
            raise _UsageError(f"{path!r}: there is no {name!r} in {found!r}")
        found = getattr(found, name)
    if not callable(found):
        raise _UsageError(f"{path!r} is a {type(found).__name__}, but a function is needed")
    return found


def _import(name: str) -> Any:
    """Imports a module; an exception inside it is shown to the user in full."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _UsageError(
            f"no module {name!r} here; run this where `import {name}` works, or set PYTHONPATH"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
