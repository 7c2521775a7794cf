"""Values without a gradient: differentiating them is an error with a remedy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8._value.dtypes import is_float8
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray


def constant_codes(q: Any, operation: str, operand: str, remedy: str) -> Any:
    """`q` itself; a gradient with respect to its FP8 codes is an error with these words.

    The gradient of an FP8 array is an FP8 array itself. It does not saturate, and an optimiser
    would apply it as a step. JAX refuses gradients of integers by itself. Scales have gradients.
    """
    if isinstance(q, PreparedArray):
        packed = constant_codes(q.packed, operation, operand, remedy)
        return dataclasses.replace(q, packed=packed)
    if isinstance(q, TransposedArray):
        stored = constant_codes(q.stored, operation, operand, remedy)
        return dataclasses.replace(q, stored=stored)
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


# This is a primitive and no `custom_jvp`: JAX 0.10 drops custom rules from the forward part of a
# loop when it splits the loop for a backward pass.
undifferentiated_p = Primitive("undifferentiated")


def undifferentiated(text: str, x: jax.Array) -> jax.Array:
    """`x` itself; differentiating it is a TypeError with this text."""
    return undifferentiated_p.bind(x, text=text)


def _refuse(primals: Sequence[Any], tangents: Sequence[Any], *, text: str) -> Any:
    if not isinstance(tangents[0], ad.Zero):
        raise TypeError(text)
    return undifferentiated_p.bind(*primals, text=text), tangents[0]


undifferentiated_p.def_impl(lambda x, *, text: x)
undifferentiated_p.def_abstract_eval(lambda x, *, text: x)
ad.primitive_jvps[undifferentiated_p] = _refuse
batching.primitive_batchers[undifferentiated_p] = lambda operands, axes, *, text: (
    undifferentiated_p.bind(*operands, text=text),
    axes[0],
)
mlir.register_lowering(undifferentiated_p, lambda ctx, x, *, text: [x])
