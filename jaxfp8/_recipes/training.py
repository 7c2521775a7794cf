"""The product of FP8 training: forward and both backward products on 8-bit operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call import explicit, ffi
from jaxfp8._call.quantize_call import Encoded, encode
from jaxfp8._ops.dimensions import normalise
from jaxfp8._ops.quantize import quantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import CurrentScaling, DelayedScaling, TrainingRecipe
from jaxfp8._recipes.scaling import Scaling, ScalingState, next_scale, record
from jaxfp8._recipes.training_dot import Codes, multiply
from jaxfp8._value import compat
from jaxfp8._value.checks import as_array, as_dtype
from jaxfp8._value.dtypes import WIDE_FLOAT
from jaxfp8._value.errors import message
from jaxfp8._value.no_gradient import undifferentiated
from jaxfp8._value.qarray import QArray, as_bytes, scale_and_zero_point
from jaxfp8._value.spec import DimensionNumbers, Shape, tile_counts


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """A product for FP8 training: its value and its gradients come from 8-bit operands.

    `y = q(lhs) . q(rhs)` with both operands in e4m3fn; for a gradient `g` of `y`, in e5m2,
    `d_lhs = q(g) . q(rhs)^T` and `d_rhs = q(lhs)^T . q(g)`. Rounding is differentiated as if it
    were the identity. What is kept for the backward pass is 8-bit, and so cannot be differentiated
    again; `CurrentScaling(second_derivatives=True)` keeps floats, too. Everything saturates: no
    value becomes NaN or infinite by being quantised.

    Args:
      lhs: activations, float32, bfloat16 or float16.
      rhs: weights, likewise; master weights in float32 go with activations in bfloat16.
      dimension_numbers: as in `jax.lax.dot_general`.
      state: the scales of `DelayedScaling`. The gradient with respect to it is the next state,
        which is to overwrite it. Under vmap, scan and shard_map, a state that several products
        share takes the maximum; where `jax.grad` adds up gradients of one state (a layer used
        twice, a scan that closes over it), give it a dtype that adds by maximum, such as
        `flax.linen.fp8_ops.fp32_max_grad`.
      recipe: `DelayedScaling` (default) or `CurrentScaling`, which has no state.
      preferred_element_type: output dtype; by default the dtype both operands promote to.
      out_sharding: sharding of the output, as of `jax.lax.dot_general`.

    Returns:
      The product; its gradients have the dtypes of the operands.

    Raises:
      TypeError: an operand is of no such dtype, or state and recipe do not go together; or a
        gradient is differentiated, and the recipe keeps no floats for that.
      ValueError: shapes do not fit.

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
    operation = "jaxfp8.fp8_dot_general"
    recipe = DelayedScaling() if recipe is None else recipe
    _check_state(operation, recipe, state)
    lhs, rhs = _floats(operation, "lhs", lhs), _floats(operation, "rhs", rhs)
    promoted = jnp.promote_types(lhs.dtype, rhs.dtype)
    dtype = promoted if preferred_element_type is None else preferred_element_type
    problem = _Problem(
        numbers=normalise(operation, dimension_numbers, (lhs.shape, rhs.shape)),
        recipe=recipe,
        out_dtype=as_dtype(operation, "preferred_element_type", dtype, WIDE_FLOAT),
        types=(jax.typeof(lhs), jax.typeof(rhs)),
        out_sharding=out_sharding,
    )
    lhs, rhs = compat.vary_alike((lhs, rhs))
    return compat.sharded(_product(problem, lhs, rhs, state), out_sharding)


def forward_codes(
    recipe: TrainingRecipe, x: jax.Array, old: Scaling | None, contracting: Shape, batch: Shape
) -> QArray:
    """An operand as the forward product takes it; `old` is its delayed scaling, if it has one."""
    dtype = recipe.forward_dtype
    if isinstance(recipe, DelayedScaling) and old is not None:
        return quantize(x, dtype, scale=next_scale(recipe, dtype, old))
    return _unremembered(recipe, dtype).quantize(x, contracting, batch)


def _floats(operation: str, name: str, value: ArrayLike) -> jax.Array:
    array = as_array(operation, name, value)
    as_dtype(operation, name, array.dtype, WIDE_FLOAT)
    return array


def _check_state(operation: str, recipe: Any, state: Any) -> None:
    if not isinstance(recipe, DelayedScaling | CurrentScaling):
        got, needs = f"is {recipe!r}", "DelayedScaling or CurrentScaling is needed"
        remedy = "recipes of inference, such as FP8_DYNAMIC, have no rule for gradients"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))
    if isinstance(recipe, DelayedScaling) == isinstance(state, ScalingState):
        return
    got = f"is of type {type(state).__name__}"
    if isinstance(recipe, DelayedScaling):
        needs = "DelayedScaling keeps a ScalingState from step to step"
        remedy = "start with `jaxfp8.ScalingState.init(recipe)`"
    else:
        needs, remedy = "CurrentScaling has none", "leave it out"
        if state is None:
            return
    raise TypeError(message(operation, "`state`", got, needs, remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """What is known of a product before its data is.

    Attributes:
      numbers: normalised dimension numbers.
      recipe: how tensors are scaled.
      out_dtype: dtype of the output.
      types: those of the operands, and so of their gradients.
      out_sharding: of the output, as the caller states it.
    """

    numbers: DimensionNumbers
    recipe: TrainingRecipe
    out_dtype: np.dtype
    types: tuple[Any, Any]
    out_sharding: Any


# The product and its rule


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    problem: _Problem, lhs: jax.Array, rhs: jax.Array, state: ScalingState | None
) -> jax.Array:
    return _forward(problem, lhs, rhs, state, backward=False)[0]


def _forward(
    problem: _Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    state: ScalingState | None,
    backward: bool = True,
) -> tuple[jax.Array, Any]:
    """The product, and for the backward pass, if any, both operands as it will need them."""
    recipe, ((lhs_axes, rhs_axes), (lhs_batch, rhs_batch)) = problem.recipe, problem.numbers
    if backward:
        lhs, rhs = _differentiated(recipe, "lhs", lhs), _differentiated(recipe, "rhs", rhs)
    old = (None, None) if state is None else (state.input, state.kernel)
    code = functools.partial(_encode, recipe, recipe.forward_dtype, both=backward)
    lhs_codes, new_input = code(lhs, old[0], (lhs_axes, _free(lhs, lhs_axes, lhs_batch)), lhs_batch)
    rhs_codes, new_kernel = code(
        rhs, old[1], (rhs_axes, _free(rhs, rhs_axes, rhs_batch)), rhs_batch
    )
    out_dtype, precision = problem.out_dtype, recipe.precision
    rank = lhs.ndim + rhs.ndim - 2 * len(lhs_axes) - len(lhs_batch)
    sharding = compat.explicit_spec(problem.out_sharding, rank)
    y = multiply(lhs_codes[0], rhs_codes[0], problem.numbers, out_dtype, precision, sharding)
    gradient = None if state is None else state.output_grad
    return y, (lhs_codes[1], rhs_codes[1], new_input, new_kernel, gradient)


def _backward(
    problem: _Problem, residuals: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, ScalingState | None]:
    """Gradients of both operands; in place of a gradient of the state, the next state."""
    lhs, rhs, new_input, new_kernel, old = residuals
    recipe, (_, (lhs_batch, _)) = problem.recipe, problem.numbers
    batch = tuple(range(len(lhs_batch)))
    border = g.ndim - len(_free(rhs.values, problem.numbers[0][1], problem.numbers[1][1]))
    of_lhs, of_rhs = tuple(range(len(batch), border)), tuple(range(border, g.ndim))
    g = _differentiated(recipe, "the gradient of the output", g)
    codes, new = _encode(recipe, recipe.gradient_dtype, g, old, (of_rhs, of_lhs), batch)
    d_lhs = _gradient_of_lhs(problem, codes[0], rhs, of_rhs, batch)
    d_rhs = _gradient_of_rhs(problem, lhs, codes[1], of_lhs, batch)
    if new_input is None:
        return d_lhs, d_rhs, None
    return d_lhs, d_rhs, ScalingState(input=new_input, kernel=new_kernel, output_grad=new)


_product.defvjp(_forward, _backward)


def _is_twice_differentiable(recipe: TrainingRecipe) -> bool:
    return isinstance(recipe, CurrentScaling) and recipe.second_derivatives


def _differentiated(recipe: TrainingRecipe, name: str, x: jax.Array) -> jax.Array:
    """`x` where a first derivative is taken; a second one passes codes, which have none."""
    if _is_twice_differentiable(recipe):
        return x
    operand = name if " " in name else f"`{name}`"
    got = "is differentiated twice"
    needs = (
        f"{type(recipe).__name__} keeps only codes for the backward pass, which have no gradient"
    )
    remedy = (
        "take `jaxfp8.CurrentScaling(second_derivatives=True)`, which keeps floats as well, or "
        "multiply in floats here"
    )
    return undifferentiated(message("jaxfp8.fp8_dot_general", operand, got, needs, remedy), x)


def _gradient_of_lhs(
    problem: _Problem, g: Codes, rhs: Codes, of_rhs: Shape, batch: Shape
) -> jax.Array:
    """`g . rhs^T`, its axes in the order of lhs."""
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = problem.numbers
    rhs_free = _free(rhs.values, rhs_axes, rhs_batch)
    numbers = ((of_rhs, rhs_free), (batch, rhs_batch))
    paired = dict(zip(rhs_axes, lhs_axes, strict=True))
    rank = len(problem.types[0].shape)
    lhs_free = [a for a in range(rank) if a not in {*lhs_axes, *lhs_batch}]
    order = (*lhs_batch, *lhs_free, *(paired[a] for a in sorted(rhs_axes)))
    dx = _in_order(_gradient(problem, 0, g, rhs, numbers, order), order)
    return compat.laid_out_like(dx, problem.types[0])


def _gradient_of_rhs(
    problem: _Problem, lhs: Codes, g: Codes, of_lhs: Shape, batch: Shape
) -> jax.Array:
    """`lhs^T . g`, its axes in the order of rhs."""
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = problem.numbers
    lhs_free = _free(lhs.values, lhs_axes, lhs_batch)
    numbers = ((lhs_free, of_lhs), (lhs_batch, batch))
    paired = dict(zip(lhs_axes, rhs_axes, strict=True))
    rank = len(problem.types[1].shape)
    rhs_free = [a for a in range(rank) if a not in {*rhs_axes, *rhs_batch}]
    order = (*rhs_batch, *(paired[a] for a in sorted(lhs_axes)), *rhs_free)
    dw = _in_order(_gradient(problem, 1, lhs, g, numbers, order), order)
    return compat.laid_out_like(dw, problem.types[1])


def _gradient(
    problem: _Problem,
    operand: int,
    left: Codes,
    right: Codes,
    numbers: DimensionNumbers,
    order: Shape,
) -> jax.Array:
    """The product that is a gradient; its axis `i` is axis `order[i]` of the operand."""
    like, precision = problem.types[operand], problem.recipe.backward_precision
    sharding = explicit.permuted(like, order, *map(jax.typeof, (left.values, right.values)))
    return multiply(left, right, numbers, like.dtype, precision, sharding)


def _in_order(x: jax.Array, axes: Shape) -> jax.Array:
    """`x`, whose axis `i` is to become axis `axes[i]`."""
    return x.transpose([axes.index(axis) for axis in range(x.ndim)])


def _free(x: jax.Array, contracting: Shape, batch: Shape) -> Shape:
    return tuple(axis for axis in range(x.ndim) if axis not in {*contracting, *batch})


# Quantising and multiplying


def _encode(
    recipe: TrainingRecipe,
    dtype: DTypeLike,
    x: jax.Array,
    old: Scaling | None,
    summed: tuple[Shape, Shape],
    batch: Shape,
    both: bool = True,
) -> tuple[tuple[Codes, Codes], Scaling | None]:
    """`x` for the two products it is in, which sum over different axes; and its next scaling.

    With one scale for the whole tensor the two have the same codes, on a GPU each in the layout
    that its product wants. With a scale per row, each product needs scales that do not vary along
    what it sums, so `x` is quantised twice. Unless `both` are needed, only the first is fit.
    """
    if both and _is_twice_differentiable(recipe):
        rounded, new = _rounded(recipe, dtype, jax.lax.stop_gradient(x), old, summed, batch, both)
        first, second = (dataclasses.replace(codes, wide=x) for codes in rounded)
        return (first, second), new
    return _rounded(recipe, dtype, x, old, summed, batch, both)


def _rounded(
    recipe: TrainingRecipe,
    dtype: DTypeLike,
    x: jax.Array,
    old: Scaling | None,
    summed: tuple[Shape, Shape],
    batch: Shape,
    both: bool,
) -> tuple[tuple[Codes, Codes], Scaling | None]:
    """The codes alone."""
    if isinstance(recipe, DelayedScaling) and old is not None:
        scale = next_scale(recipe, dtype, old)
        encoded = encode(x, dtype, scale, _turn(x, summed, batch, both))
        assert encoded.amax is not None  # there is one beside a given scale
        return _layouts(encoded, summed), record(old, scale, encoded.amax)
    how = _unremembered(recipe, dtype)
    if how.granularity == "tensor" and how.scale_dtype == np.float32 and x.size:
        return _layouts(encode(x, dtype, None, _turn(x, summed, batch, both)), summed), None
    first = _codes(how.quantize(x, summed[0], batch))
    if how.granularity == "tensor":
        return (first, first), None
    return (first, _codes(how.quantize(x, summed[1], batch))), None


def _unremembered(recipe: TrainingRecipe, dtype: DTypeLike) -> Quantization:
    """How a tensor is quantised whose amax is nowhere remembered."""
    if isinstance(recipe, DelayedScaling):
        return Quantization(dtype=dtype, granularity="tensor")
    return recipe.quantization(dtype)


def _codes(q: QArray) -> Codes:
    scale, _, tiles = scale_and_zero_point(q)
    return _as_codes(q.qvalue, scale, tiles, tuple(range(q.ndim)))


def _as_codes(values: jax.Array, scale: jax.Array, tiles: Shape, order: Shape) -> Codes:
    dtype = values.dtype.name
    return Codes(values=as_bytes(values), scale=scale, tiles=tiles, dtype=dtype, order=order)


def _turn(x: jax.Array, summed: tuple[Shape, Shape], batch: Shape, both: bool) -> int | None:
    """Where the axes that one of the products sums over begin, behind those of the other.

    None where they do not lie so, or where a turned copy is of no use: the first product has what
    it sums over last already, or the platform multiplies any layout as fast.
    """
    if batch or not _layout_matters():
        return None
    for place, axes in enumerate(summed):
        first = x.ndim - len(axes)
        if sorted(axes) == list(range(first, x.ndim)) and 0 < first < x.ndim:
            return first if both or place == 1 else None
    return None


def _layout_matters() -> bool:
    """Whether products are faster along contiguous axes, as those of tensor cores are.

    A guess, made before it is known where the program will run; only its speed hangs on it.
    """
    return ffi.has_backend("cuda")


def _whole(values: jax.Array, scale: jax.Array, order: Shape) -> Codes:
    """Codes with one scale; an empty axis has none."""
    tiles = tuple(max(size, 1) for size in values.shape)
    scale = jnp.broadcast_to(scale, tile_counts(values.shape, tiles))
    return _as_codes(values, scale, tiles, order)


def _layouts(x: Encoded, summed: tuple[Shape, Shape]) -> tuple[Codes, Codes]:
    """The codes for both products: each has what it sums over last, where there is a choice."""
    axes = tuple(range(x.codes.ndim))
    plain = _whole(x.codes, x.scale, axes)
    if x.transposed is None:
        return plain, plain
    split = len(summed[0]) if axes[-1] in summed[1] else len(summed[1])
    order = axes[split:] + axes[:split]
    turned = _whole(x.transposed, x.scale, order)
    return (turned, plain) if axes[-1] in summed[1] else (plain, turned)
