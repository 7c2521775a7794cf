"""One value with the derivative of another: rounding differentiated as if it were the identity.

    value:       straight_through(value, like) = value
    derivative:  that of `like`

This is a primitive and no `custom_jvp`: JAX 0.10 drops custom rules from the forward part of a loop
when it splits the loop for a backward pass, and second derivatives would be wrong silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8._value import compat

straight_through_p = Primitive("straight_through")


def straight_through(value: jax.Array, like: jax.Array) -> jax.Array:
    """`value` with the derivative of `like`, of one shape; only a derivative computes `like`."""
    like = compat.laid_out_like(like.astype(value.dtype), jax.typeof(value))
    return straight_through_p.bind(*compat.vary_alike((value, like)))


@straight_through_p.def_abstract_eval
def _abstract_eval(value: Any, like: Any) -> Any:
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise TypeError(f"`straight_through`: {value} cannot have the derivative of {like}.")
    return value


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return straight_through_p.bind(*primals), tangents[1]


def _batch(operands: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[jax.Array, int]:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    moved = (compat.in_front(x, axis, size) for x, axis in zip(operands, axes, strict=True))
    return straight_through(*moved), 0


straight_through_p.def_impl(lambda value, like: value)
ad.primitive_jvps[straight_through_p] = _jvp
batching.primitive_batchers[straight_through_p] = _batch
mlir.register_lowering(straight_through_p, lambda ctx, value, like: [value])
