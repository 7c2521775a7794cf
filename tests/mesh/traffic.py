"""What a compiled program sends between devices, read from its optimised HLO."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax

COLLECTIVE = re.compile(
    r"= (?P<result>\(?[a-z0-9]+\[.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute|collective-broadcast)(-start)?\("
)
ARRAY = re.compile(r"([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
EIGHT_BIT = re.compile(r"(s8|u8|pred|f8.*)$")


class Sent(NamedTuple):
    """One collective: its kind, and the bytes of its result if floats were bfloat16."""

    kind: str
    bytes: int


def sent(function: Any, *arguments: Any) -> list[Sent]:
    """The collectives of a jitted function, in the order of its HLO."""
    return sent_by(jax.jit(function).lower(*arguments).compile())


def run(function: Any, *arguments: Any) -> tuple[Any, int]:
    """What a function gives, and the bytes that it sends; compiled once for both."""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), total(sent_by(program))


def sent_by(program: jax.stages.Compiled) -> list[Sent]:
    """The collectives of a compiled program, in the order of its HLO.

    Each float counts as two bytes: on the CPU XLA widens bfloat16, and sums of products over
    devices may be float32.
    """
    found = (COLLECTIVE.search(line) for line in program.as_text().splitlines())
    return [Sent(m["kind"], _bytes(m["result"])) for m in found if m]


def _bytes(result: str) -> int:
    arrays = ARRAY.findall(result)
    return sum(
        math.prod(int(size) for size in shape.split(",") if size)
        * (1 if EIGHT_BIT.match(dtype) else 2)
        for dtype, shape in arrays
    )


def total(collectives: list[Sent]) -> int:
    """Bytes on the wire: a sum over devices sends each of its own twice, all others once."""
    return sum(c.bytes * (2 if c.kind == "all-reduce" else 1) for c in collectives)
