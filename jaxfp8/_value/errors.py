"""The exceptions and warnings of the project, and how their sentences are made."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

# A warning skips the frames of these packages: JAX itself calls transformed functions.
_NOT_THE_USER = ("jaxfp8", "jax", "contextlib", "functools")

_LONGEST = 100  # characters of a value in a message


class UnsupportedError(NotImplementedError):
    """No kernel takes this scaled dot and `jaxfp8.strict()` forbids the reference.

    The message says why, and gives a remedy.
    """


class LibraryError(RuntimeError):
    """The kernel library is missing, cannot be loaded, or does not fit this jaxlib.

    `python -m jaxfp8 doctor` prints the command to repair it.
    """


class FallbackWarning(UserWarning):
    """Plain XLA computes something, a weight stays as it was, or a pattern selects nothing."""


def message(operation: str, operand: str, got: str, needs: str, remedy: str) -> str:
    """One sentence in the house form: operation, operand, got, needs; remedy."""
    return f"`{operation}`: {operand} {got}, but {needs}; {remedy}."


def shown(value: Any) -> str:
    """A value in a message: dtype and shape of an array; only the type of a long value."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}[{','.join(map(str, value.shape))}]"
    text = repr(value)
    is_short = len(text) <= _LONGEST and "\n" not in text
    return text if is_short else f"of type {type(value).__name__}"


def level_of_user() -> int:
    """The `stacklevel` to make the caller's warning point at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_USER:
            break
        level, frame = level + 1, frame.f_back
    return level
