"""Contenders on one set of operands after the other, each result waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfp8._bench._measure import Contender


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Makes the next of some calls whenever it is called, the first again after the last."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def one_at_a_time(function: Callable[..., Any], copies: Sequence[tuple], **more: Any) -> Contender:
    """A jitted function; each call is waited for.

    On the CPU, calls started without a wait may run beside each other and share its cores.
    """
    jitted = jax.jit(function)

    def call(operands: tuple) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(jitted(*operands))

    return Contender(rotating([call(operands) for operands in copies]), **more)
