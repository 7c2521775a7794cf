"""8-bit arrays as operands of `@` and in functions of JAX and numpy.

`_ops` sets the function behind `@`, as `_value` may not import `_ops`. Functions of `jax.numpy`
take arrays alone, and widening one silently would lose its 8 bits. So they get an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from jaxfp8._value.errors import message

_MATMUL: list[Callable[[Any, Any], Any]] = []


def set_matmul(function: Callable[[Any, Any], Any]) -> None:
    """Has `@` compute this."""
    _MATMUL[:] = [function]


class _NoArray:
    """The answer to JAX's request for an array; it raises when JAX looks into it.

    `x @ q` requests one too. JAX then finds an unknown class and leaves the product to `q`.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def __jax_array__(self) -> NoReturn:
        _refuse("jax.numpy", self._held)

    def __str__(self) -> str:
        """JAX formats the refused value into its error. This better error replaces it."""
        _refuse("jax.numpy", self._held)


def _refuse(operation: str, held: Any) -> NoReturn:
    remedy = (
        "join with `jaxfp8.concatenate` or `jaxfp8.stack`, cut with an index, multiply with `@` or "
        "`jaxfp8.einsum`, or widen with `jaxfp8.dequantize`"
    )
    if hasattr(held, "unprepare"):
        remedy = "multiply by it with `@`, or take `unprepare()` of it"
    raise TypeError(message(operation, "an argument", f"is {held!r}", "it takes arrays", remedy))


class MatmulOperator:
    """`x @ q` and `q @ x` as `jaxfp8.matmul`."""

    # Otherwise numpy makes an object array of the other side. With None it calls `__rmatmul__`.
    __array_ufunc__ = None

    def __jax_array__(self) -> Any:
        return _NoArray(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("numpy", self)

    def __matmul__(self, other: Any) -> Any:
        return _MATMUL[0](self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _MATMUL[0](other, self)
