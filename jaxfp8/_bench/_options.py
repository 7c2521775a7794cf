"""Options of both `bench` and `compare`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence

import jax

from jaxfp8._bench import _plot
from jaxfp8._call.library import ffi
from jaxfp8._value.files import why_not_written


def add(parser: argparse.ArgumentParser, items: str, plot: str) -> None:
    """The options, on the parser of a command; `--only` chooses `items`, `--plot` draws `plot`."""
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help=f"only {items} whose name contains TEXT; several times: any of them",
    )
    parser.add_argument(
        "--list", action="store_true", help=f"print the names of the {items} and stop"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON, after each table"
    )
    names = ", ".join(_plot.SUFFIXES)
    parser.add_argument("--plot", metavar="FILE", help=f"draw {plot} ({names})")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processors to use (default: all there are)"
    )
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="where to run (default: what JAX uses)"
    )


def platform_of(options: argparse.Namespace) -> str:
    """The platform, "cpu" or "cuda"; limits the process to the processors of `--threads`."""
    _limit(options.threads)
    _check_files(options)
    default = "cuda" if jax.default_backend() == "gpu" else "cpu"
    platform: str = options.platform or default
    if not options.list and not ffi.has_backend(platform):
        raise ValueError(f"--platform {platform}: JAX has no such device here")
    return platform


def chosen(only: Sequence[str], names: Sequence[str], items: str) -> list[str]:
    """The names with any of some texts in them; all of them without a text."""
    for text in only:
        if not any(text in name for name in names):
            raise ValueError(
                f"--only {text}: none of {len(names)} {items} has that in its name; "
                "--list prints the names"
            )
    return [name for name in names if not only or any(text in name for text in only)]


def _limit(threads: int | None) -> None:
    """Limits the process to some processors, before a backend makes its threads."""
    if threads is None:
        return
    allowed = sorted(os.sched_getaffinity(0))
    if not 0 < threads <= len(allowed):
        raise ValueError(f"--threads {threads}: this process may use 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:threads])


def _check_files(options: argparse.Namespace) -> None:
    """Checks the output files before the measurement, not after it."""
    if options.plot and (reason := _plot.why_not(options.plot)):
        raise ValueError(reason)
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (reason := why_not_written(path)):
            raise ValueError(f"{option} {path}: {reason}")


# N x K of the weights of a layer, and of the last product if there is one.
MODELS = {
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "minilm": ((384, 384), (1536, 384), (384, 1536)),
}
TABLE = "table"
ROWS = (1, 16, 256)
_ITEM = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")
FORM = f"models ({', '.join(MODELS)}) and sizes (NxK, MxNxK) with commas between"


def shapes(
    text: str, rows: Sequence[int] | None, usual: Sequence[int]
) -> list[tuple[int, int, int]]:
    """M, N and K of the requested products, such as "minilm,4096x4096,1x14336x4096".

    Without `rows`, models and sizes without M have the `usual` ones.
    """
    items = [item.strip() for item in text.split(",")]
    asked = [shape for item in items for shape in _written(item, rows or usual)]
    if rows is not None and all(item.count("x") == 2 for item in items):
        raise ValueError(f"--rows goes with models and NxK; {text!r} has rows of its own")
    return asked


def rows_of(text: str) -> list[int]:
    """Numbers of rows such as "1,16,256"."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise ValueError(f"{text!r} is not a list of rows such as 1,16,256")
    return [int(item) for item in items]


def _written(item: str, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    if item in MODELS:
        yield from ((m, n, k) for n, k in MODELS[item] for m in rows)
        return
    parts = _ITEM.fullmatch(item)
    if not parts or 0 in (sizes := [int(size) for size in parts.groups() if size]):
        raise ValueError(f"{item!r} is none of {FORM}")
    n, k = sizes[-2:]
    for m in sizes[:-2] or rows:
        yield m, n, k
