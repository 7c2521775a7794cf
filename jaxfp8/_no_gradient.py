"""Codes have no gradient: it would be in 8 bits itself, so asking for one is an error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxfp8._dtypes import is_float8
from jaxfp8._errors import message
from jaxfp8._prepared import PreparedArray
from jaxfp8._qarray import QArray


def constant_codes(q: Any, operation: str, operand: str, remedy: str) -> Any:
    """`q` itself, whose codes refuse to be differentiated; its scale may be.

    The gradient of an FP8 array is an FP8 array, which does not saturate, and an optimiser would
    take it for a step to make. JAX refuses gradients of integers by itself.

    Args:
      q: a `QArray`, prepared or not; anything else is returned as it is.
      operation, operand, remedy: what the error says.

    Raises:
      TypeError: when differentiated with respect to the codes.
    """
    if isinstance(q, PreparedArray):
        packed = constant_codes(q.packed, operation, operand, remedy)
        return dataclasses.replace(q, packed=packed)
    if not isinstance(q, QArray) or not is_float8(q.qvalue.dtype):
        return q
    got, needs = "has 8-bit codes, of which a gradient is asked for", "codes have none"
    text = message(operation, f"`{operand}`", got, needs, remedy)
    return dataclasses.replace(q, qvalue=_constant(text, q.qvalue))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(text: str, x: jax.Array) -> jax.Array:
    return x


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _(text: str, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(text)
    return primals[0], tangents[0]
