"""The table of programs, and arguments that many of them take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rewrite.support import BF16, E4M3, Data


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its arguments, and the number of scaled dots it must hold when rewritten.

    `plain` computes the same where the float64 oracle cannot follow the function. `floor` is the
    relative error that a float32 sum in another order may have, once what follows enlarged it.
    """

    name: str
    fun: Callable[..., Any]
    make: Callable[[Data], tuple[Any, ...]]
    calls: int = 1
    plain: Callable[..., Any] | None = None
    floor: float = 1e-7

    def args(self) -> tuple[Any, ...]:
        return self.make(Data())


class Table(list[Program]):
    """The programs of one file."""

    def add(
        self,
        make: Callable[[Data], tuple[Any, ...]],
        calls: int = 1,
        plain: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """Register a function under its own name."""

        def register(fun: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Program(fun.__name__, fun, make, calls, plain))
            return fun

        return register


def weight(dtype: Any = E4M3, x: Any = BF16, scale: Any = "n", transposed: bool = False) -> Any:
    """Arguments x [M, K], q [K, N] and a scale of a named shape."""

    def make(data: Data) -> tuple[Any, ...]:
        m, k, n = data.m, data.k, data.n
        shapes = {
            "": (),
            "1": (1,),
            "n": (n,),
            "1n": (1, n),
            "k1": (k, 1),
            "11": (1, 1),
            "m1": (m, 1),
        }
        q = data.bits8(*((n, k) if transposed else (k, n)), dtype=dtype)
        return data.normal(m, k, dtype=x), q, data.scale(*shapes[scale])

    return make


def both(dtype: Any = E4M3, other: Any = None) -> Any:
    """Arguments x_q [M, K], w_q [K, N], and scales (M, 1) and (1, N)."""

    def make(data: Data) -> tuple[Any, ...]:
        m, k, n = data.m, data.k, data.n
        return (
            data.bits8(m, k, dtype=dtype),
            data.bits8(k, n, dtype=other or dtype),
            data.scale(m, 1),
            data.scale(1, n),
        )

    return make
