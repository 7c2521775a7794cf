"""The product of FP8 training: forward and both backward products on 8-bit operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.mesh import explicit
from jaxfp8._ops.dimensions import free_axes, in_order, normalise, of_gradient
from jaxfp8._recipes.recipes import DelayedScaling, TrainingRecipe
from jaxfp8._recipes.scaling import Scaling, ScalingState, check_state
from jaxfp8._recipes.training_codes import encode_for_products, is_twice_differentiable
from jaxfp8._recipes.training_dot import Codes, multiply
from jaxfp8._recipes.weight_codes import WeightCodes, check_codes, given_codes
from jaxfp8._value import compat
from jaxfp8._value.checks import as_dtype, as_floats
from jaxfp8._value.dtypes import WIDE_FLOAT
from jaxfp8._value.errors import message
from jaxfp8._value.no_gradient import undifferentiated
from jaxfp8._value.spec import DimensionNumbers

Scalings = tuple[Scaling | None, Scaling | None]


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    rhs_codes: WeightCodes | None = None,
) -> jax.Array:
    """A product for FP8 training: its value and its gradients come from 8-bit operands.

    `y = q(lhs) . q(rhs)` with both operands in e4m3fn. A gradient `g` of `y` is in e5m2:
    `d_lhs = q(g) . q(rhs)^T` and `d_rhs = q(lhs)^T . q(g)`. Rounding is differentiated as if it
    were the identity. The backward pass keeps only 8-bit values, so there are no second
    derivatives; `CurrentScaling(second_derivatives=True)` keeps floats as well. Everything
    saturates: no value becomes NaN or infinite by being quantized.

    Args:
      lhs: activations, float32, bfloat16 or float16.
      rhs: weights, likewise; master weights in float32 go with activations in bfloat16.
      dimension_numbers: as in `jax.lax.dot_general`.
      state: the scales of `DelayedScaling`. The gradient with respect to it is the next state, to
        overwrite it. Under vmap, scan and shard_map, a state of several products takes the maximum;
        if `jax.grad` adds up gradients of one state (a layer used twice, a scan closing over it),
        give it a dtype with maximum as its addition, such as `flax.linen.fp8_ops.fp32_max_grad`.
      recipe: `DelayedScaling` (default) or `CurrentScaling` (without a state).
      preferred_element_type: output dtype; by default the dtype both operands promote to.
      out_sharding: sharding of the output, as of `jax.lax.dot_general`.
      rhs_codes: `rhs` in 8 bits, made by `encode_weight` once for several products. The values of
        `rhs` are then not read; its gradient is the same.

    Returns:
      The product; its gradients have the dtypes of the operands.

    Raises:
      TypeError: an operand has another dtype; the state does not fit the recipe; or a gradient is
        differentiated and the recipe keeps no floats for it.
      ValueError: shapes or codes do not fit; or the state has negative values and is no tracer.
        Under `jit` these give NaN.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> numbers = (((1,), (0,)), ((), ()))
      >>> def loss(w, x):
      ...     recipe = jaxfp8.CurrentScaling()
      ...     return jaxfp8.fp8_dot_general(x, w, numbers, recipe=recipe).sum()
      >>> gradient = jax.grad(loss)(jnp.ones((4, 2)), jnp.full((3, 4), 7.0))
      >>> gradient.shape, bool(jnp.allclose(gradient, 3 * 7))
      ((4, 2), True)
    """
    return dot_and_scalings(
        lhs,
        rhs,
        dimension_numbers,
        state,
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        rhs_codes=rhs_codes,
    )[0]


def dot_and_scalings(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    evaluates: bool = False,
    rhs_codes: WeightCodes | None = None,
) -> tuple[jax.Array, Scalings]:
    """The product of `fp8_dot_general`, and the next scalings of both operands.

    They come from the amaxes found while quantizing, and have no gradient. None for
    `CurrentScaling`. With `evaluates` the product is not a training step, differentiated or not.
    """
    operation = "jaxfp8.fp8_dot_general"
    recipe = DelayedScaling() if recipe is None else recipe
    check_state(operation, recipe, state)
    lhs, rhs = as_floats(operation, "lhs", lhs), as_floats(operation, "rhs", rhs)
    promoted = jnp.promote_types(lhs.dtype, rhs.dtype)
    dtype = promoted if preferred_element_type is None else preferred_element_type
    problem = _Problem(
        numbers=normalise(operation, dimension_numbers, (lhs.shape, rhs.shape)),
        recipe=recipe,
        out_dtype=as_dtype(operation, "preferred_element_type", dtype, WIDE_FLOAT),
        types=(jax.typeof(lhs), jax.typeof(rhs)),
        out_sharding=out_sharding,
        evaluates=evaluates,
    )
    if rhs_codes is not None:
        check_codes(operation, recipe, rhs_codes, rhs.shape, state, problem.numbers)
    lhs, rhs = compat.vary_alike((lhs, rhs))
    y, scalings = _product(problem, lhs, rhs, state, rhs_codes)
    return compat.sharded(y, out_sharding), jax.lax.stop_gradient(scalings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """The facts of a product known before its data."""

    numbers: DimensionNumbers  # normalised dimension numbers
    recipe: TrainingRecipe  # how tensors are scaled
    out_dtype: np.dtype  # dtype of the output
    # Those of the operands, and so of their gradients.
    types: tuple[jax.core.ShapedArray, jax.core.ShapedArray]
    out_sharding: Any  # of the output, as the caller states it
    evaluates: bool  # whether a derivative is no training step either


_KEEP_FLOATS = (
    "take `jaxfp8.CurrentScaling(second_derivatives=True)`, which keeps floats as well, or "
    "multiply in floats here"
)


def refuse_second_derivative(
    operation: str, recipe: TrainingRecipe, name: str, x: jax.Array, remedy: str = _KEEP_FLOATS
) -> jax.Array:
    """`x`, with an error if it is differentiated twice and only codes are kept."""
    if is_twice_differentiable(recipe):
        return x
    operand = name if " " in name else f"`{name}`"
    got = "is differentiated twice"
    needs = (
        f"{type(recipe).__name__} keeps only codes for the backward pass, which have no gradient"
    )
    return undifferentiated(message(operation, operand, got, needs, remedy), x)


_once = functools.partial(refuse_second_derivative, "jaxfp8.fp8_dot_general")


# The product and its rule


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    problem: _Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    state: ScalingState | None,
    rhs_codes: WeightCodes | None,
) -> tuple[jax.Array, Scalings]:
    return _forward(problem, lhs, rhs, state, rhs_codes, backward=False)[0]


def _forward(
    problem: _Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    state: ScalingState | None,
    given: WeightCodes | None,
    backward: bool = True,
) -> tuple[tuple[jax.Array, Scalings], Any]:
    """The product with the next scalings, and the residuals: operands and scalings."""
    recipe, ((lhs_axes, rhs_axes), (lhs_batch, rhs_batch)) = problem.recipe, problem.numbers
    if backward:
        lhs, rhs = _once(recipe, "lhs", lhs), _once(recipe, "rhs", rhs)
    old = (None, None) if state is None else (state.input, state.kernel)
    code = functools.partial(
        encode_for_products,
        recipe,
        recipe.forward_dtype,
        both=backward,
        training=backward and not problem.evaluates,
    )
    summed = lhs_axes, free_axes(lhs.ndim, lhs_axes, lhs_batch)
    lhs_codes, new_input = code(lhs, old[0], summed, lhs_batch)
    if given is None:
        summed = rhs_axes, free_axes(rhs.ndim, rhs_axes, rhs_batch)
        rhs_codes, new_kernel = code(rhs, old[1], summed, rhs_batch, is_weight=True)
    else:
        rhs_codes, new_kernel = given_codes(recipe, given, rhs)
    out_dtype, precision = problem.out_dtype, recipe.precision
    rank = lhs.ndim + rhs.ndim - 2 * len(lhs_axes) - len(lhs_batch)
    sharding = compat.explicit_spec(problem.out_sharding, rank)
    y = multiply(lhs_codes[0], rhs_codes[0], problem.numbers, out_dtype, precision, sharding)
    gradient = None if state is None else state.output_grad
    scalings = new_input, new_kernel
    return (y, scalings), (lhs_codes[1], rhs_codes[1], *scalings, gradient)


def _backward(
    problem: _Problem, residuals: Any, cotangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array, ScalingState | None, None]:
    """Gradients of both operands, and the next state in place of a gradient of the state."""
    g, _ = cotangents
    lhs, rhs, new_input, new_kernel, old = residuals
    recipe, (_, (lhs_batch, _)) = problem.recipe, problem.numbers
    batch = tuple(range(len(lhs_batch)))
    border = g.ndim - len(free_axes(rhs.values.ndim, problem.numbers[0][1], problem.numbers[1][1]))
    of_lhs, of_rhs = tuple(range(len(batch), border)), tuple(range(border, g.ndim))
    g = _once(recipe, "the gradient of the output", g)
    codes, new = encode_for_products(recipe, recipe.gradient_dtype, g, old, (of_rhs, of_lhs), batch)
    d_lhs = _gradient(problem, 0, codes[0], rhs)
    d_rhs = _gradient(problem, 1, codes[1], lhs)
    if new_input is None:
        return d_lhs, d_rhs, None, None
    new_state = ScalingState(input=new_input, kernel=new_kernel, output_grad=new)
    return d_lhs, d_rhs, new_state, None


_product.defvjp(_forward, _backward)


def _gradient(problem: _Problem, side: int, g: Codes, other: Codes) -> jax.Array:
    """The gradient of one operand (0 for lhs, 1 for rhs), its axes in the operand's order."""
    like, precision = problem.types[side], problem.recipe.backward_precision
    lhs, rhs = problem.types
    numbers, order = of_gradient(problem.numbers, (len(lhs.shape), len(rhs.shape)), side)
    left, right = (g, other) if side == 0 else (other, g)
    types = (jax.typeof(codes.values) for codes in (left, right))
    sharding = explicit.permuted(like, order, *types)
    y = multiply(left, right, numbers, like.dtype, precision, sharding)
    return compat.laid_out_like(in_order(y, order), like)
