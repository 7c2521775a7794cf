"""The product of a layer for inference: 8-bit operands, gradients straight through."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.dimensions import normalise
from jaxfp8._ops.products import dot_general
from jaxfp8._ops.terms import split_dot
from jaxfp8._recipes.recipes import Recipe, check_recipe
from jaxfp8._value import compat
from jaxfp8._value.checks import as_floats
from jaxfp8._value.prepared import EightBitArray, PreparedArray, check_prepared, stored
from jaxfp8._value.qarray import QArray, adopt, check_qarray
from jaxfp8._value.spec import DimensionNumbers
from jaxfp8._value.transposed import TransposedArray


def recipe_dot_general(
    x: ArrayLike,
    w: ArrayLike | EightBitArray,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe,
    *,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`q(x) . q(w) + bias` in the 8 bits of a recipe; an 8-bit weight stays as it is.

    Gradients are those of `x . q(w)` and `q(x) . w`: rounding and saturation are differentiated as
    if they were the identity. A `QArray` has a gradient for its scale and none for its codes.

    Args:
      x: activations, float32, bfloat16 or float16.
      w: weights, likewise, or a `QArray`, a transposed view of one, or a prepared one.
      dimension_numbers: as in `jax.lax.dot_general`.
      recipe: how both operands are held.
      scale, zero_point: of the activations, if the recipe is static.
      bias: array to broadcast over the last output axes.
      precision: as in `jaxfp8.dot_general`.
      preferred_element_type: output dtype; by default the dtype of `x`.
      out_sharding: sharding of the output, as of `jax.lax.dot_general`.

    Returns:
      The product.

    Raises:
      TypeError: `x` is no array of floats.
      ValueError: shapes do not fit, or a scale is missing.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.INT8_DYNAMIC.quantize_weight(jnp.eye(3), contracting=(0,))
      >>> jaxfp8.recipe_dot_general(
      ...     jnp.ones((1, 3)), w, (((1,), (0,)), ((), ())), jaxfp8.INT8_DYNAMIC
      ... )
      Array([[1., 1., 1.]], dtype=float32)
    """
    operation = "jaxfp8.recipe_dot_general"
    check_recipe(operation, recipe)
    x = as_floats(operation, "x", x)
    w = adopt(w)
    if isinstance(w, PreparedArray):
        check_prepared(w, operation, "w")
    elif isinstance(w, QArray | TransposedArray):
        check_qarray(stored(w), operation, "w")
    else:
        w = as_floats(operation, "w", w)
    problem = _Problem(
        numbers=normalise(operation, dimension_numbers, (x.shape, w.shape)),
        recipe=recipe,
        precision=precision if precision is None else str(jax.lax.Precision(precision)),
        out_dtype=np.dtype(x.dtype if preferred_element_type is None else preferred_element_type),
        out_sharding=out_sharding,
    )
    leaves, structure = jax.tree.flatten((x, w, scale, zero_point, bias))
    leaves = compat.vary_alike([jnp.asarray(leaf) for leaf in leaves])
    return _product(problem, *jax.tree.unflatten(structure, leaves))


_Array = jax.Array | EightBitArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    numbers: DimensionNumbers
    recipe: Recipe
    precision: str | None
    out_dtype: np.dtype
    out_sharding: Any

    def dot(
        self, x: _Array, w: _Array, bias: jax.Array | None, compute: str | None = None
    ) -> jax.Array:
        """The product of operands of any dtype: a scaled dot if one of them is 8-bit."""
        precision = None if self.precision is None else jax.lax.Precision(self.precision)
        sharded: dict[str, Any] = {"out_sharding": self.out_sharding}
        if isinstance(x, EightBitArray) or isinstance(w, EightBitArray):
            asked: dict[str, Any] = {"bias": bias, "compute": compute, **sharded}
            return dot_general(x, w, self.numbers, precision, self.out_dtype, **asked)
        if (terms := self.recipe.terms) is not None:
            dtype = self.out_dtype
            y = split_dot(x, w, self.numbers, terms=terms, preferred_element_type=dtype, **sharded)
        else:
            dtype = jnp.promote_types(x.dtype, w.dtype)
            x, w = x.astype(dtype), w.astype(dtype)
            y = jax.lax.dot_general(x, w, self.numbers, precision, self.out_dtype, **sharded)
        return y if bias is None else y + jnp.asarray(bias, self.out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(problem: _Problem, *operands: Any) -> jax.Array:
    return _forward(problem, *operands)[0]


def _forward(
    problem: _Problem, x: jax.Array, w: _Array, scale: Any, zero: Any, bias: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    (x_axes, w_axes), (x_batch, w_batch) = problem.numbers
    given = {"scale": scale, "zero_point": zero}
    recipe = problem.recipe
    x_q = recipe.quantize_activation(x, x_axes, x_batch, **given)
    w_q: _Array = w
    w_like = None
    if not isinstance(w, EightBitArray):
        w_q = recipe.quantize_weight(w, w_axes, w_batch)
        w_like = like(w)
    kept = (x_q, w_q, bias, scale, zero, like(x), w_like)
    with jax.named_scope(recipe.name) if recipe.rows > 1 else contextlib.nullcontext():
        return problem.dot(x_q, w_q, bias, recipe.compute), kept


def _backward(problem: _Problem, residuals: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    """Each gradient is a product with the other operand in 8 bits, as stored."""
    x_q, w_q, bias, scale, zero, x_like, w_like = residuals
    x, w = x_like.zeros(), w_q if w_like is None else w_like.zeros()
    _, of_x = jax.vjp(lambda x, bias: problem.dot(x, w_q, bias), x, bias)
    _, of_w = jax.vjp(lambda w: problem.dot(x_q, w, None), w)
    d_x, d_bias = of_x(g)
    nothing = jax.tree.map(no_gradient, (scale, zero))
    return d_x, *of_w(g), *nothing, d_bias


_product.defvjp(_forward, _backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Like:
    """The type of an array not kept for the backward pass."""

    type: jax.core.ShapedArray

    def zeros(self) -> jax.Array:
        """Zeros of this type. Only their shape and sharding matter: the product is linear."""
        zeros = jnp.zeros(self.type.shape, self.type.dtype)
        return compat.laid_out_like(zeros, self.type)


def like(x: jax.Array) -> _Like:
    """The type of an array."""
    return _Like(jax.typeof(x))


def no_gradient(x: Any) -> Any:
    """The gradient of a constant."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
