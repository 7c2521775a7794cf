"""Delayed scaling: the state of one product's three tensors, and how a step changes it.

The names, shapes, order and arithmetic are Flax's, so one checkpoint serves both.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from jaxfp8._call.reference.quantize_reference import finite_amax
from jaxfp8._recipes.recipes import DelayedScaling, check_training_recipe
from jaxfp8._recipes.saved_codes import named_codes
from jaxfp8._value import compat
from jaxfp8._value.dtypes import finite_range
from jaxfp8._value.errors import level_of_user, message
from jaxfp8._value.scales import per, power_of_two


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """The delayed scaling of one tensor: the memory of `DelayedScaling` from earlier steps.

    Attributes:
      scale: float32 [1], the scale of the last step.
      amax_history: float32 [amax_history_length], the largest magnitude of each step. The last
        step comes first, then all others from the oldest on.
    """

    scale: jax.Array
    amax_history: jax.Array

    @classmethod
    def init(cls, recipe: DelayedScaling) -> Scaling:
        """The scaling before the first step: a scale of 1, a history of 0."""
        return cls(
            scale=jnp.ones((1,), jnp.float32),
            amax_history=jnp.zeros((recipe.amax_history_length,), jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingState:
    """The delayed scaling of the three tensors of one product.

    Its gradient is not a derivative but the next state, to overwrite it.

    Attributes:
      input: of the left operand, the activations.
      kernel: of the right operand, the weights.
      output_grad: of the gradient of the output; None scales it by its own amax in every step.

    Example:
      >>> import jaxfp8
      >>> state = jaxfp8.ScalingState.init(jaxfp8.DelayedScaling(amax_history_length=16))
      >>> state.input.scale.shape, state.input.amax_history.shape
      ((1,), (16,))
    """

    input: Scaling
    kernel: Scaling
    output_grad: Scaling | None

    @classmethod
    def init(cls, recipe: DelayedScaling) -> ScalingState:
        """The state before the first step: scales of 1, histories of 0."""
        # Each has buffers of its own, so all of them can be donated.
        return cls(
            input=Scaling.init(recipe),
            kernel=Scaling.init(recipe),
            output_grad=Scaling.init(recipe),
        )


def check_scalings(operation: str, scalings: Mapping[str, Scaling | None]) -> None:
    """Refuses states trained by an optimiser, as far as they are known: tracers pass.

    A negative scale or amax is an error. One that is not finite, or a scale of 0, is a warning:
    Flax writes these.
    """
    for name, scaling in scalings.items():
        for field in dataclasses.fields(Scaling) if scaling else ():
            array = getattr(scaling, field.name)
            if _is_known(array):
                _check_values(operation, f"`{name}.{field.name}`", np.asarray(array))


def check_state(operation: str, recipe: Any, state: Any) -> None:
    """Refuses a recipe that is not one of training, and a state that does not fit it."""
    remedy = "recipes of inference, such as FP8_DYNAMIC, have no rule for gradients"
    check_training_recipe(operation, recipe, remedy)
    if isinstance(state, ScalingState):
        names = ("input", "kernel", "output_grad")
        check_scalings(operation, {f"state.{name}": getattr(state, name) for name in names})
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


def _is_known(array: Any) -> bool:
    if isinstance(array, jax.core.Tracer) or getattr(array, "dtype", None) != np.float32:
        return False
    return getattr(array, "is_fully_addressable", True)


def _check_values(operation: str, operand: str, values: np.ndarray) -> None:
    if (values < 0).any():
        needs = "scales and magnitudes are positive: an optimiser trained the state"
        remedy = (
            "start with a new state and keep it from the optimiser, by `jaxfp8.linen.split_state` "
            "or `nnx.Optimizer(model, tx, wrt=nnx.Param)`"
        )
        got = f"has {float(values.min()):.3g}"
        raise ValueError(message(operation, operand, got, needs, remedy))
    if not np.isfinite(values).all() or (operand.endswith("scale`") and not values.all()):
        got, needs = "has values that are not finite, or a scale of 0", "these are ignored"
        remedy = "look for NaN and infinities in the program that wrote the state"
        text = message(operation, operand, got, needs, remedy)
        warnings.warn(text, UserWarning, stacklevel=level_of_user())


def record(old: Scaling, scale: jax.Array, magnitudes: jax.Array) -> Scaling:
    """The state after a step: its scale, and the largest magnitude in the history.

    `old` is of float32, or of a convertible dtype with maximum as its addition; so is the result.
    """
    history = jax.lax.convert_element_type(old.amax_history, jnp.float32)
    amax = named_codes(_amax_of_all(magnitudes, history))
    history = jnp.roll(history, -1).at[0].set(amax)
    return Scaling(
        scale=jax.lax.convert_element_type(scale.reshape(old.scale.shape), old.scale.dtype),
        amax_history=jax.lax.convert_element_type(history, old.amax_history.dtype),
    )


def next_scale(recipe: DelayedScaling, dtype: DTypeLike, old: Scaling) -> jax.Array:
    """The scalar `amax / max(dtype) * 2^margin`; the last scale while there is no amax yet.

    It is computed as the reciprocal of a reciprocal, to round as in Flax. Non-finite values are
    ignored: the state may come from another program. A negative value means that an optimiser
    changed the state. It gives NaN, since a compiled step cannot raise.
    """
    scale, history = (
        jax.lax.convert_element_type(value, jnp.float32) for value in (old.scale, old.amax_history)
    )
    changed = jnp.any(history < 0) | jnp.any(scale < 0)
    history = jnp.where(jnp.isfinite(history), history, 0)
    amax = history[:1] if recipe.amax_compute == "most_recent" else jnp.max(history, keepdims=True)
    last = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
    chosen = (finite_range(dtype)[1] / amax) / 2.0**recipe.margin
    info = jnp.finfo(jnp.float32)
    scale = 1 / jnp.where(amax > 0, chosen, 1 / last)
    scale = jnp.clip(scale, float(info.tiny), float(info.max))
    return jnp.where(changed, jnp.nan, scale).reshape(())


def scale_outside_training(
    recipe: DelayedScaling, dtype: DTypeLike, old: Scaling, x: jax.Array
) -> jax.Array:
    """`next_scale`; a power of two from the amax of `x` while no step has changed the state.

    A new state has the scale 1. That suits few tensors, and training replaces it in its second
    step. Here no step does. A power of two rounds as 1 does: results differ from Flax's only if 1
    saturates or underflows.
    """
    scale, history = (
        jax.lax.convert_element_type(value, jnp.float32) for value in (old.scale, old.amax_history)
    )
    untouched = jnp.all(history == 0) & jnp.all(scale == 1)
    x, history = jax.lax.stop_gradient((x, history))
    amax = jax.lax.cond(untouched, _amax_of_tensor, _no_amax, x, history)
    first = power_of_two(amax * per(finite_range(dtype)[1]))
    return jnp.where(amax > 0, first * 2.0**recipe.margin, next_scale(recipe, dtype, old))


# Both are functions of the module: `cond` compiles again for each new function.


def _amax_of_tensor(x: jax.Array, history: jax.Array) -> jax.Array:
    amax = _amax_of_all(finite_amax(x).astype(jnp.float32), history)
    return compat.vary_alike((amax, history[0]))[0]


def _no_amax(x: jax.Array, history: jax.Array) -> jax.Array:
    return compat.vary_alike((jnp.float32(0), history[0]))[0]


def _amax_of_all(magnitudes: jax.Array, history: jax.Array) -> jax.Array:
    """The largest magnitude over all shards and vmapped copies of one history."""
    amax = _largest(0)(magnitudes, history)
    axes = compat.varying_axes(amax) - compat.varying_axes(history)
    return jax.lax.pmax(amax, tuple(sorted(axes))) if axes else amax


@functools.cache
def _largest(kept: int) -> Any:
    """The maximum of `x` over all axes but the first `kept`, also axes of its history.

    Under vmap there is one maximum for each history. A mapped axis of `x` is reduced as well if the
    history lacks it.
    """

    @custom_vmap
    def largest(x: jax.Array, history: jax.Array) -> jax.Array:
        del history
        return jnp.max(x, axis=tuple(range(kept, x.ndim)), initial=0)

    @largest.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array, history: jax.Array) -> tuple[Any, bool]:
        x_batched, history_batched = batched
        if not history_batched:
            return largest(jnp.moveaxis(x, 0, kept), history), False
        x = x if x_batched else jnp.broadcast_to(x, (size, *x.shape))
        return _largest(kept + 1)(x, history), True

    return largest
