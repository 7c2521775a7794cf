"""The ragged dot of FP8 training: experts' forward and both backward products on 8-bit operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.ops.ragged_call import ragged_dot as bind
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._ops.ragged import as_sizes, check_known_sizes, check_shapes
from jaxfp8._recipes.recipes import DelayedScaling, TrainingRecipe
from jaxfp8._recipes.scaling import ScalingState, check_state
from jaxfp8._recipes.training import Scalings, refuse_second_derivative
from jaxfp8._recipes.training_codes import encode_for_products, is_twice_differentiable
from jaxfp8._recipes.training_dot import Codes
from jaxfp8._value import compat
from jaxfp8._value.checks import as_dtype, as_floats
from jaxfp8._value.dtypes import WIDE_FLOAT
from jaxfp8._value.errors import message
from jaxfp8._value.spec import EpilogueSpec

_OPERATION = "jaxfp8.fp8_ragged_dot"
_IN_FLOATS = "take `jax.lax.ragged_dot`, which multiplies in floats"
# Axes summed over by the forward product, then by the backward product of the other operand.
_OF_TOKENS, _OF_WEIGHTS = ((1,), (0,)), ((1,), (2,))


def fp8_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` for FP8 training of experts: value and gradients from 8-bit operands.

    Rows of `lhs` are in groups: the first `group_sizes[0]` are of group 0, and so on. With g(m)
    the group of row m and k(g) the rows of group g,

        y[m]     = q(lhs)[m] . q(rhs)[g(m)]
        d_lhs[m] = q(dy)[m] . q(rhs)[g(m)]^T
        d_rhs[g] = q(lhs)[k(g)]^T . q(dy)[k(g)]

    Operands are in e4m3fn, the gradient dy in e5m2, as in `fp8_dot_general`. Each of the three
    tensors is encoded once, and on a GPU in the layouts of both its products. Each product is one
    call wherever that of `jaxfp8.ragged_dot` is. Rows of no group give zeros; their values count in
    the amax of a tensor.

    Args:
      lhs: tokens [M, K], float32, bfloat16 or float16, sorted by group.
      rhs: weights [G, K, N], likewise; master weights in float32 go with tokens in bfloat16.
      group_sizes: integers [G], as in `jaxfp8.ragged_dot`.
      state: the scales of `DelayedScaling`, as in `fp8_dot_general`.
      recipe: `DelayedScaling` (default) or `CurrentScaling`. Its granularity holds for each expert:
        with "channel" each output channel of each expert has a scale, with "block" each 128 x 128.
      preferred_element_type: output dtype; by default the dtype both operands promote to.

    Returns:
      [M, N]; its gradients have the dtypes of the operands.

    Raises:
      TypeError: an operand has another dtype; the state does not fit the recipe; or a gradient is
        differentiated.
      ValueError: shapes do not fit; known sizes do not fit `lhs`; the recipe asks for second
        derivatives; or the state has negative values and is no tracer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> def loss(w, x, sizes):
      ...     recipe = jaxfp8.CurrentScaling()
      ...     return jaxfp8.fp8_ragged_dot(x, w, sizes, recipe=recipe).sum()
      >>> sizes = jnp.array([2, 0, 1])
      >>> gradient = jax.grad(loss)(jnp.ones((3, 4, 2)), jnp.full((3, 4), 7.0), sizes)
      >>> gradient[:, 0, 0].round().tolist()
      [14.0, 0.0, 7.0]
    """
    return ragged_dot_and_scalings(
        lhs, rhs, group_sizes, state, recipe=recipe, preferred_element_type=preferred_element_type
    )[0]


def ragged_dot_and_scalings(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
    preferred_element_type: DTypeLike | None = None,
    evaluates: bool = False,
) -> tuple[jax.Array, Scalings]:
    """The product of `fp8_ragged_dot`, and the next scalings, as `dot_and_scalings` gives them."""
    recipe = DelayedScaling() if recipe is None else recipe
    check_state(_OPERATION, recipe, state)
    if is_twice_differentiable(recipe):
        got, needs = "asks for second derivatives", "groups keep codes alone"
        remedy = f"leave `second_derivatives` out, or {_IN_FLOATS}"
        raise ValueError(message(_OPERATION, "`recipe`", got, needs, remedy))
    x, w = as_floats(_OPERATION, "lhs", lhs), as_floats(_OPERATION, "rhs", rhs)
    sizes = as_sizes(_OPERATION, group_sizes)
    if (x.ndim, w.ndim) != (2, 3):
        got = f"are {list(x.shape)} and {list(w.shape)}"
        needs, remedy = "[M, K] and [G, K, N] are needed", "flatten batch axes into rows"
        raise ValueError(message(_OPERATION, "shapes of `lhs` and `rhs`", got, needs, remedy))
    check_shapes(_OPERATION, x.shape, w.shape, sizes)
    check_known_sizes(_OPERATION, group_sizes, x.shape, w.shape)
    promoted = jnp.promote_types(x.dtype, w.dtype)
    dtype = promoted if preferred_element_type is None else preferred_element_type
    problem = _Problem(
        recipe=recipe,
        out_dtype=as_dtype(_OPERATION, "preferred_element_type", dtype, WIDE_FLOAT),
        types=(jax.typeof(x), jax.typeof(w)),
        evaluates=evaluates,
    )
    x, w, sizes = compat.vary_alike((x, w, sizes))
    y, scalings = _product(problem, x, w, sizes, state)
    return y, jax.lax.stop_gradient(scalings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """How tensors are scaled, the dtype of the output, and the types of both operands.

    With `evaluates` a derivative is no training step either.
    """

    recipe: TrainingRecipe
    out_dtype: np.dtype
    types: tuple[jax.core.ShapedArray, jax.core.ShapedArray]
    evaluates: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    problem: _Problem, x: jax.Array, w: jax.Array, sizes: jax.Array, state: ScalingState | None
) -> tuple[jax.Array, Scalings]:
    return _forward(problem, x, w, sizes, state, backward=False)[0]


def _forward(
    problem: _Problem,
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    state: ScalingState | None,
    backward: bool = True,
) -> tuple[tuple[jax.Array, Scalings], Any]:
    recipe = problem.recipe
    if backward:
        x, w = (
            refuse_second_derivative(_OPERATION, recipe, name, operand, _IN_FLOATS)
            for name, operand in (("lhs", x), ("rhs", w))
        )
    old = (None, None) if state is None else (state.input, state.kernel)
    code = functools.partial(
        encode_for_products,
        recipe,
        recipe.forward_dtype,
        batch=(),
        both=backward,
        training=backward and not problem.evaluates,
    )
    x_codes, new_input = code(x, old[0], _OF_TOKENS)
    w_codes, new_kernel = code(w, old[1], _OF_WEIGHTS, is_weight=True)
    sides = (x_codes[0].spec((1,), ()), w_codes[0].spec((1,), (0,)))
    y = _multiply(x_codes[0], w_codes[0], sizes, sides, problem.out_dtype, recipe.precision)
    gradient = None if state is None else state.output_grad
    scalings = new_input, new_kernel
    return (y, scalings), (x_codes[1], w_codes[1], sizes, *scalings, gradient)


def _backward(
    problem: _Problem, residuals: Any, cotangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array, None, ScalingState | None]:
    """Gradients of tokens and weights, and the next state in place of a gradient of the state."""
    dy, _ = cotangents
    x, w, sizes, new_input, new_kernel, old = residuals
    recipe, (x_type, w_type) = problem.recipe, problem.types
    dy = refuse_second_derivative(_OPERATION, recipe, "the gradient of the output", dy, _IN_FLOATS)
    codes, new = encode_for_products(recipe, recipe.gradient_dtype, dy, old, _OF_TOKENS, ())
    precision = recipe.backward_precision
    sides = (codes[0].spec((1,), ()), w.spec((2,), (0,)))
    d_x = _multiply(codes[0], w, sizes, sides, x_type.dtype, precision, x_type)
    sides = (x.spec((0,), ()), codes[1].spec((0,), ()))
    d_w = _multiply(x, codes[1], sizes, sides, w_type.dtype, precision, w_type)
    if new_input is None:
        return d_x, d_w, None, None
    return d_x, d_w, None, ScalingState(input=new_input, kernel=new_kernel, output_grad=new)


_product.defvjp(_forward, _backward)


def _multiply(
    lhs: Codes,
    rhs: Codes,
    sizes: jax.Array,
    sides: tuple[Any, Any],
    out_dtype: np.dtype,
    precision: jax.lax.Precision,
    like: jax.core.ShapedArray | None = None,
) -> jax.Array:
    """One ragged dot of codes; along explicit mesh axes it is split like the type of an array."""
    spec = RaggedSpec(
        lhs=sides[0],
        rhs=sides[1],
        groups=sizes.shape[0],
        epilogue=EpilogueSpec(out_dtype=out_dtype.name),
        precision="default" if precision == jax.lax.Precision.DEFAULT else "highest",
    )
    named = {"lhs_scale": lhs.scale, "rhs_scale": rhs.scale, "group_sizes": sizes}
    for name, codes in (("lhs", lhs), ("rhs", rhs)):
        named[name] = jax.lax.bitcast_convert_type(codes.values, jnp.dtype(codes.dtype))
    if like is None:
        return bind(spec, named)
    sharding = compat.explicit_spec(like.sharding, len(like.shape))
    return compat.laid_out_like(bind(spec, named, sharding), like)
