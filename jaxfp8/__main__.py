"""The command line: `python -m jaxfp8 doctor` and `python -m jaxfp8 explain MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jaxfp8
from jaxfp8 import _doctor

_EXPLAIN = """\
Traces FUNCTION with the arguments that MAKE_ARGS() returns (a tuple; shapes made by
jax.ShapeDtypeStruct will do) and prints, for each dot product, whether jaxfp8.rewrite takes it,
and if not, why, with the file and the line. Nothing is computed.

example:
  python -m jaxfp8 explain my_model:forward --args my_model:example_arguments
"""


class _UsageError(Exception):
    """What the user typed cannot be followed; the message says what to type instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 well, 1 something is broken, 2 misused)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except _UsageError as error:
        print(f"jaxfp8 {options.command}: {error}", file=sys.stderr)
        return 2
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
    explain.set_defaults(run=_explain)
    return parser


def _explain(options: argparse.Namespace) -> int:
    function = _load(options.function)
    arguments = _load(options.args)() if options.args else ()
    if not isinstance(arguments, tuple):
        got = type(arguments).__name__
        raise _UsageError(f"{options.args} returned a {got}, but a tuple of arguments is needed")
    if not options.args and _required_arguments(function):
        raise _UsageError(
            f"{options.function} takes arguments; give --args MODULE:MAKE_ARGS, a function that "
            "returns them"
        )
    print(jaxfp8.explain(function)(*arguments))
    return 0


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments without which `function` cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in C, for instance
        return []
    named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in named]


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
    """Import a module; what goes wrong inside of it is the user's to see in full."""
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
