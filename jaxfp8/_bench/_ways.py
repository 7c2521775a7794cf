"""The compared ways to multiply: operands' formats, and their product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import jaxfp8
from jaxfp8 import QArray, Quantization, Recipe

INT8 = Quantization(dtype=jnp.int8)
_TENSOR = dataclasses.replace(INT8, granularity="tensor")
_GROUP = dataclasses.replace(INT8, granularity=(128, 1))
_ASYMMETRIC = dataclasses.replace(INT8, symmetric=False)
_FP8 = Quantization()
_FP8_TENSOR = Quantization(granularity="tensor")
_MX = Quantization(granularity=(32, 1), scale_dtype=jnp.float8_e8m0fnu)
FLOATS = Recipe(name="floats", weight=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to multiply `x` [M, K] by `w` [K, N], both float32."""

    name: str  # its name in tables
    recipe: Recipe  # formats of the operands, and compute type of the product
    # x_dtype, w_dtype: floats to convert operands to before that.
    x_dtype: DTypeLike = jnp.float32
    w_dtype: DTypeLike = jnp.float32
    out_dtype: DTypeLike = jnp.float32  # of the product

    def hold_x(self, x: jax.Array) -> QArray | jax.Array:
        """The left operand as stored."""
        return self.recipe.quantize_activation(x.astype(self.x_dtype), (1,))

    def hold_w(self, w: jax.Array, axis: int = 0) -> QArray | jax.Array:
        """The right operand as stored; `axis` is summed over."""
        return self.recipe.quantize_weight(w.astype(self.w_dtype), (axis,))

    def multiply(self, x: Any, w: Any, axis: int = 0, **more: Any) -> jax.Array:
        """The product of held operands; `more` are arguments of `jaxfp8.dot_general`."""
        if self.recipe.terms is not None:
            return jaxfp8.split_dot(x, w, terms=self.recipe.terms)
        numbers = (((1,), (axis,)), ((), ()))
        more = {"preferred_element_type": self.out_dtype, **more}
        if isinstance(x, jax.Array) and isinstance(w, jax.Array):
            precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            return lax.dot_general(x, w, numbers, precision, **more)
        return jaxfp8.dot_general(x, w, numbers, **more, compute=self.recipe.compute)

    # The timed stages: the kernel alone; a layer, its weight quantized ahead; and all of it.

    def layer(self, x: jax.Array, w: Any) -> jax.Array:
        """The product of a float and a held weight."""
        return self.multiply(self.hold_x(x), w)

    def end_to_end(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The product of floats."""
        return self.multiply(self.hold_x(x), self.hold_w(w))


def _held(name: str, weight: Quantization, activation: Quantization) -> Way:
    return Way(name=name, recipe=Recipe(name=name, weight=weight, activation=activation))


_HALF: dict[str, Any] = {"x_dtype": jnp.bfloat16}
# "tensor" and "channel" are the granularities of a recipe, for both operands unless it says more.
WAYS = (
    Way(name="float32", recipe=FLOATS),
    Way(name="bfloat16", recipe=FLOATS, **_HALF, w_dtype=jnp.bfloat16),
    Way(name="INT8 3 terms", recipe=jaxfp8.INT8_SPLIT),
    Way(name="INT8 2 terms", recipe=dataclasses.replace(jaxfp8.INT8_SPLIT, terms=2)),
    Way(name="W8A16 e4m3", recipe=jaxfp8.FP8_W8A16, **_HALF),
    Way(name="W8A16 int8", recipe=jaxfp8.INT8_W8A16, **_HALF),
    _held("INT8 tensor", _TENSOR, _TENSOR),
    _held("INT8 tensor x, channel w", INT8, _TENSOR),
    _held("INT8 channel", INT8, INT8),
    _held("INT8 groups of 128", _GROUP, _GROUP),
    _held("INT8 asymmetric x", INT8, _ASYMMETRIC),
    _held("INT8 asymmetric", _ASYMMETRIC, _ASYMMETRIC),
    _held("FP8 tensor", _FP8_TENSOR, _FP8_TENSOR),
    _held("FP8 channel", _FP8, _FP8),
    Way(name="FP8 blocks of 128", recipe=jaxfp8.FP8_BLOCK),
    Way(name="FP8_AS_INT8", recipe=jaxfp8.FP8_AS_INT8),
    _held("MX blocks of 32", _MX, _MX),
)
