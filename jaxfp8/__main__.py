"""The command line: `python -m jaxfp8 doctor`, `explain`, `bench`, `compare` and more."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jaxfp8
from jaxfp8 import _doctor, checkpoint
from jaxfp8._bench import _cli, _run
from jaxfp8._bench.compare import options as _compare
from jaxfp8._recipes.selection import nearest
from jaxfp8._value.files import why_not_written, write_whole
from jaxfp8.checkpoint._quantize import reasons
from jaxfp8.checkpoint._save import FORMATS

_EXPLAIN = """\
Traces FUNCTION with the arguments that MAKE_ARGS() returns (a tuple; shapes made by
jax.ShapeDtypeStruct will do) and prints, for each dot product, whether jaxfp8.rewrite takes it,
and if not, why, with the file and the line. Nothing is computed. An exception of FUNCTION or of
MAKE_ARGS is shown in full. Exit code 2 if arguments are wrong.

examples:
  python -m jaxfp8 explain my_model:forward --args my_model:example_arguments
  python -m jaxfp8 explain my_model:Layer.forward --args my_model:arguments --html report.html
  python -m jaxfp8 explain my_model:forward --args my_model:example_arguments --strict
"""
# A function's error names an argument; here it becomes an option.
_OPTIONS = {
    "`jaxfp8.Target`: ": "",
    "`platform`": "--target",
    "`capability`": "--target",
    "`overwrite=True`": "--overwrite",
    "`floats=True`": "--floats",
    "`unscaled=True`": "--unscaled",
}


class _UsageError(Exception):
    """Wrong arguments; the message has a remedy."""


class _Failure(Exception):
    """The files or the machine are not as the command needs them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 well, 1 broken or missed (`explain --strict`), 2 misused, 130 cut off.
    """
    code = 0
    with _reader_may_leave():
        code = _run_command(arguments)
        sys.stdout.flush()
    return code


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:  # argparse has printed the help, or the error
        sys.stdout.flush()
        raise
    try:
        return options.run(options)
    except _UsageError as error:
        return _said(options, error, 2)
    except _Failure as error:
        return _said(options, error, 1)
    except MemoryError as error:
        return _said(options, f"{error}; give smaller sizes", 1)
    except KeyboardInterrupt:
        return _said(options, getattr(options, "stopped", "stopped"), 130)


def _said(options: argparse.Namespace, error: object, code: int) -> int:
    text = str(error)
    for name, option in _OPTIONS.items():
        if option[2:] in vars(options) or not option.startswith("--"):
            text = text.replace(name, option)
    print(f"jaxfp8 {options.command}: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Printing ends without an error if the reader, such as `head`, closes the pipe."""
    try:
        yield
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            _empty(stream)


def _empty(stream: TextIO) -> None:
    """Has a buffer with no reader left go nowhere; Python writes it when it ends."""
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    strict = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    parser = strict(
        prog="python -m jaxfp8", description="8-bit matrix products that are real, in JAX."
    )
    version = f"jaxfp8 {_doctor.version_of('jaxfp8')}"
    parser.add_argument("--version", action="version", version=version)
    named: Any = {"dest": "command", "metavar": "COMMAND", "parser_class": strict}
    commands = parser.add_subparsers(required=True, **named)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what runs, and the command that mends the rest",
        description="Prints versions, libraries, processor features, kernels, devices and call "
        "counters, and runs a small product on the kernel. Exit code 1 if something is broken.",
    )
    doctor.set_defaults(run=lambda options: _doctor.run())
    _add_explain(commands)
    _add_measurements(commands)
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
        "--target",
        metavar="PLATFORM[:CAPABILITY]",
        help="the machine to explain for, such as cuda:90 for an H100 (default: this one)",
    )
    explain.add_argument(
        "--strict",
        action="store_true",
        help="exit code 1 if 8-bit data reaches a dot product that is not rewritten",
    )
    explain.set_defaults(run=_explain)


def _add_measurements(commands: Any) -> None:
    """The measuring commands: `bench` and `compare`."""
    speed = "how fast the kernels are on this machine, beside XLA and oneDNN"
    cost = "what each way to multiply costs in accuracy and in time, on your sizes and data"
    for name, module, text in (("bench", _cli, speed), ("compare", _compare, cost)):
        command = commands.add_parser(
            name,
            help=text,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(command)
        command.set_defaults(run=_measure, plan=module.plan)


def _add_checkpoints(commands: Any) -> None:
    """The commands on checkpoints: `inspect`, `quantize` and `convert`."""
    look = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, and how its weights would load",
        description="Prints the format, arrays, bytes and scales of a checkpoint, and reads "
        "none of its weights. Exit code 1 if it would not load, 2 if arguments are wrong.",
    )
    look.add_argument(
        "path", metavar="PATH", type=_path, help="a safetensors or GGUF file, or a folder"
    )
    look.add_argument("--json", metavar="FILE", help="write it as JSON too")
    look.add_argument("--values", action="store_true", help="read all scales; name NaN and inf")
    look.set_defaults(run=_inspect)
    quantize = commands.add_parser(
        "quantize",
        help="an 8-bit checkpoint from one in floats",
        description="Quantizes the weights of SRC tensor by tensor and writes DST. The same "
        "command goes on where one that was cut off stopped. Exit code 1 if SRC would not load, or "
        "DST is taken or cannot be written; 2 if arguments are wrong, or choose no weight.",
    )
    quantize.add_argument(
        "--recipe", choices=_recipes(), required=True, help="how weights are held"
    )
    quantize.add_argument(
        "--only", metavar="REGEX", help="quantize the weights whose names it matches"
    )
    quantize.set_defaults(run=_quantize, stopped="stopped; the same command goes on from here")
    convert = commands.add_parser(
        "convert",
        help="a checkpoint that servers read, from any that loads",
        description="Writes the 8-bit weights of SRC as vLLM and transformers read them, without "
        "widening them. Exit code 1 if SRC would not load, servers cannot hold one of its weights, "
        "or DST is taken or cannot be written; 2 if arguments are wrong.",
    )
    convert.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="what to write")
    convert.add_argument(
        "--floats", action="store_true", help="write in bfloat16 what servers cannot hold in 8 bits"
    )
    convert.set_defaults(run=_convert)
    unscaled = "take FP8 values without scales as they are"
    for command in (look, convert):
        command.add_argument("--unscaled", action="store_true", help=unscaled)
    for command, kind in ((quantize, "floats"), (convert, "8 bits")):
        source = f"a safetensors or GGUF file, or a folder, in {kind}"
        command.add_argument("source", metavar="SRC", type=_path, help=source)
        command.add_argument("target", metavar="DST", type=_path, help="the folder to make")
        command.add_argument("--json", metavar="FILE", help="write the report as JSON too")
        text = "replace all that is at DST, once DST is made"
        command.add_argument("--overwrite", action="store_true", help=text)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a path is needed, and this one is empty")
    return text


def _recipes() -> list[str]:
    """The recipes for making a checkpoint."""
    named = {name: getattr(jaxfp8, name) for name in jaxfp8.__all__}
    return sorted(
        name
        for name, recipe in named.items()
        if isinstance(recipe, jaxfp8.Recipe) and recipe.weight is not None
    )


def _inspect(options: argparse.Namespace) -> int:
    _check_files(options)
    try:
        found = checkpoint.inspect(options.path, unscaled=options.unscaled, values=options.values)
    except checkpoint.CheckpointError as error:
        raise _Failure(str(error)) from error
    if options.json:
        _write(options.json, found.to_json(indent=1) + "\n")
    _show(found)
    return 1 if found.problems else 0


def _quantize(options: argparse.Namespace) -> int:
    _check_pattern(options.only)
    recipe, overwrite = getattr(jaxfp8, options.recipe), options.overwrite

    def make() -> Any:
        _check_chosen(options)
        source, target = options.source, options.target
        return checkpoint.quantize(source, target, recipe, where=options.only, overwrite=overwrite)

    return _make(options, make)


def _convert(options: argparse.Namespace) -> int:
    how = {name: getattr(options, name) for name in ("format", "floats", "unscaled", "overwrite")}
    return _make(options, lambda: checkpoint.convert(options.source, options.target, **how))


def _make(options: argparse.Namespace, make: Callable[[], Any]) -> int:
    """Makes a checkpoint, and prints what became of its weights."""
    _check_files(options)
    try:
        report = make()
    except ValueError as error:  # a CheckpointError, or a weight outside every format
        raise _Failure(str(error)) from error
    except OSError as error:
        text = f"{options.target} cannot be written: {error.strerror or error}"
        raise _Failure(text) from error
    if options.json:
        _write(options.json, report.to_json(indent=1) + "\n")
    _show(report)
    return 0


def _check_chosen(options: argparse.Namespace) -> None:
    """Refuses a choice of no weight, before the work."""
    left = reasons(options.source, options.only)
    if "" in left.values():
        return
    can = [name for name, reason in reasons(options.source, lambda *_: True).items() if not reason]
    if options.only is None or not can:
        name, reason = next(iter((n, left[n]) for n in can or left), ("", "it has no tensor"))
        more = f" ({name!r}: {reason})" if name else ""
        remedy = "choose weights with --only" if can else "name another checkpoint"
        raise _UsageError(f"no weight of {options.source} would be quantized{more}; {remedy}")
    found = [name for name in left if re.search(options.only, name)]
    what = f"matches {found[0]!r}, but {left[found[0]]}" if found else "matches no tensor"
    some = ", ".join(map(repr, nearest(options.only, can)))
    raise _UsageError(f"--only {options.only!r} {what}; weights are named {some}")


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    if not pattern:
        raise _UsageError("--only: '' matches every name; leave it out to quantize all weights")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _UsageError(f"--only: {pattern!r} is no regular expression: {error}") from error


def _measure(options: argparse.Namespace) -> int:
    try:
        plan = options.plan(options)
    except (ValueError, jaxfp8.LibraryError) as error:
        raise _UsageError(str(error)) from error
    if options.list:
        print("\n".join(plan.names))
        return 0
    return _run.run(plan)


def _explain(options: argparse.Namespace) -> int:
    _check_files(options)
    function = _load(options.function)
    arguments = _arguments(options.args)
    if reason := _why_not_called_with(function, arguments):
        remedy = (
            f"{options.args} has to return a tuple of its arguments"
            if options.args
            else "give --args MODULE:MAKE_ARGS, a function that returns a tuple of them"
        )
        raise _UsageError(f"{options.function} takes other arguments: {reason}; {remedy}")
    target = _target(options.target)
    report = jaxfp8.explain(function, compute=options.compute, target=target)(*arguments)
    if options.json:
        _write(options.json, report.to_json(indent=1) + "\n")
    if options.html:
        _write(options.html, report.to_html())
    _show(report)
    return 1 if options.strict and report.missed else 0


def _target(text: str | None) -> jaxfp8.Target | None:
    if text is None:
        return None
    platform, colon, capability = text.partition(":")
    if colon and not capability.isdecimal():
        raise _UsageError(f"--target is {text!r}; write a number after the colon, as in cuda:90")
    try:
        return jaxfp8.Target(platform, int(capability) if colon else None)
    except ValueError as error:
        raise _UsageError(str(error)) from error


def _arguments(path: str | None) -> tuple[Any, ...]:
    """The result of the function at `path`."""
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
    """Why the function cannot take these arguments; None if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in C, for instance
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _show(report: object) -> None:
    """Prints a report; a closed pipe does not change the exit code."""
    with _reader_may_leave():
        print(report, flush=True)


def _check_files(options: argparse.Namespace) -> None:
    """Checks the output files before the work, not after it."""
    for option in ("json", "html"):
        path = getattr(options, option, None)
        if path is not None and (reason := why_not_written(path)):
            raise _UsageError(f"--{option} {path}: {reason}")


def _write(path: str, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise _UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def _load(path: str) -> Callable[..., Any]:
    """The function named by `MODULE:FUNCTION`."""
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
    if not all(part.isidentifier() for part in name.split(".")):
        module = ".".join(part for part in re.split(r"\W+", name.removesuffix(".py")) if part)
        raise _UsageError(f"{name!r} is no name of a module; one is written {module or 'my_model'}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        remedy = f"run this where `import {name}` works, or set PYTHONPATH"
        if name.endswith(".py"):
            remedy = f"a file {name} is the module {name.removesuffix('.py')}"
        raise _UsageError(f"no module {name!r} here; {remedy}") from error


if __name__ == "__main__":
    sys.exit(main())
