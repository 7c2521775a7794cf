"""The product of groups in a layer for inference: 8-bit operands, gradients straight through."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxfp8._call.ops.ragged_epilogue import rows_of
from jaxfp8._ops.ragged import as_sizes, check_shapes, ragged_dot
from jaxfp8._recipes.recipe_dot import like, no_gradient
from jaxfp8._recipes.recipes import Recipe, check_recipe
from jaxfp8._value import compat
from jaxfp8._value.checks import as_floats
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import EightBitArray
from jaxfp8._value.qarray import QArray

_OPERATION = "a product of groups"


def recipe_ragged_dot(
    x: ArrayLike,
    w: ArrayLike | EightBitArray,
    group_sizes: ArrayLike,
    recipe: Recipe,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    precision: Any = None,
) -> jax.Array:
    """`jaxfp8.ragged_dot` in the 8 bits of a recipe; the twin of `recipe_dot_general`.

    Gradients are those of `recipe_dot_general`. A weight in 8 bits has none, for its scale neither.

    Args:
      x: rows [M, K] sorted by group.
      w: a matrix for each group [G, K, N], in floats or in 8 bits.
      group_sizes: integers [G].
      recipe: how both operands are held; groups are not multiplied by `terms` or `compute`.
      scale: of `x`, if the recipe is static.
      bias: one for each group [G, N].
      precision: as in `jaxfp8.ragged_dot`.
    """
    check_recipe(_OPERATION, recipe)
    check_groups(_OPERATION, recipe)
    x, sizes = as_floats(_OPERATION, "x", x), as_sizes(_OPERATION, group_sizes)
    w = w if isinstance(w, EightBitArray) else as_floats(_OPERATION, "w", w)
    check_shapes(_OPERATION, x.shape, w.shape, sizes)
    problem = _Problem(
        recipe=recipe,
        precision=precision if precision is None else str(jax.lax.Precision(precision)),
        out_dtype=x.dtype,
    )
    leaves, structure = jax.tree.flatten((x, w, sizes, scale, bias))
    leaves = compat.vary_alike([jnp.asarray(leaf) for leaf in leaves])
    return _product(problem, *jax.tree.unflatten(structure, leaves))


def check_groups(operation: str, recipe: Recipe) -> None:
    """Refuses a recipe that computes in another way than it holds operands."""
    if recipe.terms is None and recipe.compute is None:
        return
    needs = "groups are multiplied as they are held"
    remedy = "give experts a recipe without `terms` and `compute`, such as INT8_DYNAMIC"
    raise ValueError(message(operation, "`recipe`", f"is {recipe.name}", needs, remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    recipe: Recipe
    precision: str | None
    out_dtype: np.dtype

    @property
    def lax_precision(self) -> jax.lax.Precision | None:
        """The precision as JAX has it."""
        return None if self.precision is None else jax.lax.Precision(self.precision)

    def dot(self, x: Any, w: Any, sizes: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """The product of operands of any dtype."""
        precision = self.lax_precision
        if isinstance(x, EightBitArray) or isinstance(w, EightBitArray):
            y: jax.Array = ragged_dot(x, w, sizes, precision, self.out_dtype, bias=bias)
            return y
        dtype = jnp.promote_types(x.dtype, w.dtype)
        x, w = x.astype(dtype), w.astype(dtype)
        y = jax.lax.ragged_dot(x, w, sizes, precision, self.out_dtype)
        return y if bias is None else with_bias(y, bias, sizes)


def with_bias(y: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows, with the bias [G, N] of their group added; its gradient is summed in float32."""
    wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return y + rows_of(wide, sizes, y.shape[0]).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    problem: _Problem, x: Any, w: Any, sizes: jax.Array, scale: Any, bias: Any
) -> jax.Array:
    return _forward(problem, x, w, sizes, scale, bias)[0]


def _forward(
    problem: _Problem, x: Any, w: Any, sizes: jax.Array, scale: Any, bias: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    is_held, recipe = isinstance(w, EightBitArray), problem.recipe
    x_q = recipe.quantize_activation(x, (1,), scale=scale)
    w_q = w if is_held else recipe.quantize_weight(w, (1,), (0,))
    likes = [None if given is None else like(given) for given in (x, None if is_held else w, bias)]
    return problem.dot(x_q, w_q, sizes, bias), (x_q, w_q, sizes, scale, *likes)


def _backward(problem: _Problem, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    """Each gradient is a product with the other operand in 8 bits, as stored."""
    x, w, sizes, scale, x_like, w_like, bias_like = residuals
    d_x = problem.dot(g, w.mT, sizes).astype(x_like.type.dtype)
    d_w, d_bias = jax.tree.map(no_gradient, w), None
    if bias_like is not None:
        (d_bias,) = jax.vjp(lambda bias: with_bias(g, bias, sizes), bias_like.zeros())[1](g)
    if isinstance(x, QArray) and w_like is not None:
        d_w = ragged_dot(x.mT, g, sizes, problem.lax_precision, w_like.type.dtype)
    elif w_like is not None:
        (d_w,) = jax.vjp(lambda w: problem.dot(x, w, sizes), w_like.zeros())[1](g)
    return d_x, d_w, no_gradient(sizes), jax.tree.map(no_gradient, scale), d_bias


_product.defvjp(_forward, _backward)
