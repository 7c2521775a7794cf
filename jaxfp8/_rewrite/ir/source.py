"""The place of an op in the user's code."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sysconfig

import jax

from jaxfp8._rewrite.ir.graph import Op
from jaxfp8._value import compat

_JAX = os.path.dirname(jax.__file__) + os.sep
_HERE = str(pathlib.Path(os.path.abspath(__file__)).parents[2]) + os.sep  # the package
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

Frame = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's code, and the library frame inside it, if any."""

    file: str
    line: int
    function: str
    library: str


def place(op: Op) -> Place:
    """The innermost frame of an op outside JAX, installed libraries and this package.

    The stack of an equation in a jitted function begins at that function. If it has only library
    frames, the place is the call of the function.
    """
    inner: Frame | None = None
    for call in reversed(op.inside):
        frames = [f for f in compat.frames(call) if not _is_plumbing(f[0])]
        inner = inner or next(iter(frames), None)
        user = next((f for f in frames if not _is_installed(f[0])), None)
        if user is not None:
            return Place(*user, _named(inner) if inner not in (None, user) else "")
    return Place(*inner, "") if inner is not None else Place("<unknown>", 0, "", "")


def _named(frame: Frame | None) -> str:
    return f"{frame[0]}:{frame[1]} {frame[2]}" if frame is not None else ""


def _is_plumbing(file: str) -> bool:
    """Whether a file is part of Python, JAX or this package, not of the user's code."""
    standard = file.startswith(_STANDARD) and not _is_installed(file)
    return standard or file.startswith((_JAX, _HERE, "<frozen"))


def _is_installed(file: str) -> bool:
    return any(name in file for name in _INSTALLED)


def path(op: Op) -> str:
    """The name stack of an op: modules and named scopes."""
    return "/".join(part for eqn in op.inside if (part := str(eqn.source_info.name_stack)))
