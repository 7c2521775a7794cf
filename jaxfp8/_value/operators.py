"""The function behind `@` of 8-bit arrays. `_ops` sets it, as `_value` may not import `_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MATMUL: list[Callable[[Any, Any], Any]] = []


def set_matmul(function: Callable[[Any, Any], Any]) -> None:
    """Has `@` compute this."""
    _MATMUL[:] = [function]


class MatmulOperator:
    """`x @ q` and `q @ x`, which are `jaxfp8.matmul`."""

    # numpy would make an array of objects of the other side; so it asks that side.
    __array_ufunc__ = None

    def __matmul__(self, other: Any) -> Any:
        return _MATMUL[0](self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _MATMUL[0](other, self)
