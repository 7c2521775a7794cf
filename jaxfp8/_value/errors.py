"""The exceptions and warnings of the project, and how their sentences are made."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """No kernel takes this scaled dot and `jaxfp8.strict()` forbids the reference.

    The message says why, and what to change.
    """


class LibraryError(RuntimeError):
    """The kernel library is missing, cannot be loaded, or does not fit this jaxlib.

    `python -m jaxfp8 doctor` prints the command that mends it.
    """


class FallbackWarning(UserWarning):
    """Something stayed as plain XLA has it, or a weight as it was; says why, once."""


def message(operation: str, operand: str, got: str, needs: str, remedy: str) -> str:
    """One sentence in the house form: operation, operand, got, needs; remedy."""
    return f"`{operation}`: {operand} {got}, but {needs}; {remedy}."
