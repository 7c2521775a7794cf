"""What a compiled program sends between devices, read from its optimised HLO."""

from __future__ import annotations

from typing import Any

import jax

from jaxfp8._bench import _hlo


def sent(function: Any, *arguments: Any) -> list[_hlo.Sent]:
    """The collectives of a jitted function."""
    return sent_by(jax.jit(function).lower(*arguments).compile())


def run(function: Any, *arguments: Any) -> tuple[Any, int]:
    """What a function gives, and the bytes that it sends; compiled once for both."""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), total(sent_by(program))


def sent_by(program: jax.stages.Compiled) -> list[_hlo.Sent]:
    """The collectives of a compiled program.

    Each float counts as two bytes: on the CPU XLA widens bfloat16, and sums of products over
    devices may be float32.
    """
    return _hlo.sent(program.as_text(), float_bytes=2)


def total(collectives: list[_hlo.Sent]) -> int:
    """Bytes on the wire."""
    return sum(one.bytes for one in collectives)
