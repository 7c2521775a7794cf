"""A weight of FP8 training in 8 bits, encoded once for all the products of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxfp8._ops.dimensions import axes_of_rhs, free_axes
from jaxfp8._recipes.recipes import CurrentScaling, DelayedScaling, TrainingRecipe
from jaxfp8._recipes.scaling import Scaling, ScalingState, check_state
from jaxfp8._recipes.training_codes import encode_for_products, is_twice_differentiable
from jaxfp8._recipes.training_dot import Codes
from jaxfp8._value import compat
from jaxfp8._value.checks import as_floats
from jaxfp8._value.errors import message
from jaxfp8._value.spec import DimensionNumbers, Shape, tile_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightCodes:
    """A weight in 8 bits for the products of a training step, made by `encode_weight`.

    A pytree without derivatives: it passes through `jax.jit`, `jax.vmap` and `jax.lax.scan`, and
    collectives move its leaves.

    Attributes:
      forward: the codes for the forward product.
      backward: those for the gradient of the activations; None if they are the same.
      scaling: the next scaling of the weight; None for `CurrentScaling`.
      encoded: the shape of the encoded weight, of a shard if codes were gathered.
    """

    forward: Codes
    backward: Codes | None
    scaling: Scaling | None
    encoded: Shape = dataclasses.field(metadata={"static": True})

    def gathered(self, axis_name: Any, axis: int) -> WeightCodes:
        """The codes of a whole weight from those of its shards, inside `jax.shard_map`.

        Codes and scales are sent, a quarter of the bytes of a float32 weight. A delayed scale is
        that of all shards; otherwise each shard keeps scales of its own.

        Args:
          axis_name: the mesh axis, or axes, along which the weight is split.
          axis: the axis of the weight that is split.

        Raises:
          ValueError: tiles do not divide the shards, so a gathered scale would have another tile.
        """
        gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True)
        alike = self.scaling is not None

        def whole(codes: Codes) -> Codes:
            place = codes.order.index(axis % len(codes.order))
            values, scale, tiles = gather(codes.values, axis=place), codes.scale, codes.tiles
            if not alike:
                _check_shard(axis, codes.values.shape[place], tiles[place])
                scale = gather(scale, axis=place)
            else:  # one tile
                tiles = (*tiles[:place], values.shape[place], *tiles[place + 1 :])
            return dataclasses.replace(codes, values=values, scale=scale, tiles=tiles)

        backward = self.backward and whole(self.backward)
        scaling = self.scaling
        # With `check_vma=False` nobody knows that shards differ, so each has recorded its own amax.
        if scaling is not None and not compat.varying_axes(self.forward.values):
            history = scaling.amax_history
            largest = jax.lax.pmax(history[0], axis_name)
            scaling = dataclasses.replace(scaling, amax_history=history.at[0].set(largest))
        forward = whole(self.forward)
        return dataclasses.replace(self, forward=forward, backward=backward, scaling=scaling)


def _check_shard(axis: int, size: int, tile: int) -> None:
    if tile < size and size % tile:
        got, needs = f"has {size} values in each shard", f"tiles of {tile} have to divide them"
        remedy = "split another axis, or gather the weight and encode the whole"
        operation = "jaxfp8.WeightCodes.gathered"
        raise ValueError(message(operation, f"axis {axis}", got, needs, remedy))


def encode_weight(
    w: ArrayLike,
    dimension_numbers: DimensionNumbers,
    state: ScalingState | None = None,
    *,
    recipe: TrainingRecipe | None = None,
) -> WeightCodes:
    """A weight in 8 bits, for several products of one training step.

    Each product encodes its weight by itself. A step with microbatches, with remat, or with a
    weight used twice would read the weight and round it again each time. Encode it once here, and
    give the codes to each product: `fp8_dot_general(x, w, numbers, state, rhs_codes=codes)`. The
    numbers of a step are the same, and gradients still go to `w`. Encode again after the
    optimiser's update. Before its first step `DelayedScaling` has a scale of 1, and these codes
    have it, too. A product without a gradient then takes a scale from the weight; so leave codes
    out there.

    Args:
      w: the weight, float32, bfloat16 or float16, as the products get it.
      dimension_numbers: those of the products; the weight is their `rhs`.
      state: the scales of `DelayedScaling`, as the products get it.
      recipe: `DelayedScaling` (default) or `CurrentScaling` (without a state).

    Returns:
      The codes, on a GPU in the layouts of both products that read them.

    Raises:
      TypeError: the weight has another dtype, or the state does not fit the recipe.
      ValueError: the dimension numbers name an axis twice, or one that the weight lacks; or the
        state has negative values and is no tracer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> numbers, recipe = (((1,), (0,)), ((), ())), jaxfp8.CurrentScaling()
      >>> w, batches = jnp.full((32, 16), 0.01), jnp.ones((4, 8, 32))
      >>> codes = jaxfp8.encode_weight(w, numbers, recipe=recipe)
      >>> def loss(w, x):
      ...     y = jaxfp8.fp8_dot_general(x, w, numbers, recipe=recipe, rhs_codes=codes)
      ...     return jnp.sum(y**2)
      >>> total, _ = jax.lax.scan(lambda t, x: (t + jax.grad(loss)(w, x), None), 0 * w, batches)
      >>> total.shape
      (32, 16)
    """
    operation = "jaxfp8.encode_weight"
    recipe = DelayedScaling() if recipe is None else recipe
    check_state(operation, recipe, state)
    w = as_floats(operation, "w", w)
    summed, batch = axes_of_rhs(operation, dimension_numbers, w.ndim)
    return weight_codes(recipe, w, state, summed, batch)


def weight_codes(
    recipe: TrainingRecipe,
    w: jax.Array,
    state: ScalingState | None,
    summed: Shape,
    batch: Shape,
    training: bool = True,
) -> WeightCodes:
    """The codes of a weight for a forward product over the axes `summed`."""
    w, state = jax.lax.stop_gradient((w, state))
    both, scaling = encode_for_products(
        recipe,
        recipe.forward_dtype,
        w,
        None if state is None else state.kernel,
        (summed, free_axes(w.ndim, summed, batch)),
        batch,
        training=training,
        is_weight=True,
    )
    first, second = (dataclasses.replace(codes, wide=None) for codes in both)
    same = first.values is second.values
    backward = None if same else second
    return WeightCodes(forward=first, backward=backward, scaling=scaling, encoded=w.shape)


def given_codes(
    recipe: TrainingRecipe, given: WeightCodes, w: jax.Array
) -> tuple[tuple[Codes, Codes], Scaling | None]:
    """Codes for both products, and the next scaling, as `encode_for_products` gives them."""
    first, second = given.forward, given.backward or given.forward
    if is_twice_differentiable(recipe):
        first, second = (dataclasses.replace(codes, wide=w) for codes in (first, second))
    return (first, second), given.scaling


def check_codes(
    operation: str,
    recipe: TrainingRecipe,
    given: Any,
    shape: Shape,
    state: ScalingState | None,
    numbers: DimensionNumbers,
) -> None:
    """Refuses codes of another weight, recipe, product or kind."""
    if not isinstance(given, WeightCodes):
        got, needs = f"is of type {type(given).__name__}", "codes of a weight are needed"
        raise TypeError(message(operation, "`rhs_codes`", got, needs, _REMEDY))
    codes, dtype = given.forward, np.dtype(recipe.forward_dtype).name
    found = _in_order(codes, codes.values.shape)
    if (found, codes.dtype) != (shape, dtype) or (given.scaling is None) != (state is None):
        scaling = "without" if given.scaling is None else "with"
        got = f"has {codes.dtype}{list(found)} {scaling} delayed scaling"
        wanted = "without" if state is None else "with"
        needs = f"`rhs` needs {dtype}{list(shape)} {wanted} it"
        raise ValueError(message(operation, "`rhs_codes`", got, needs, _REMEDY))
    if isinstance(recipe, CurrentScaling):
        (_, summed), (_, batch) = numbers
        both = summed, free_axes(len(shape), summed, batch)
        how = recipe.quantization(dtype, is_weight=True)
        for axes, own in zip(both, (codes, given.backward or codes), strict=True):
            _check_tiles(operation, own, given.encoded, how.tiles(given.encoded, axes, batch))


_REMEDY = "make them by `jaxfp8.encode_weight` of the same weight, state, recipe and numbers"


def _check_tiles(operation: str, codes: Codes, shape: Shape, wanted: Mapping[int, int]) -> None:
    """Refuses codes of a weight of `shape` whose scales are not those of the `wanted` tiles."""
    whole = tuple(wanted.get(axis, max(size, 1)) for axis, size in enumerate(shape))
    tiles = _in_order(codes, codes.tiles)
    if tile_counts(shape, tiles) != tile_counts(shape, whole):
        got = f"has scales of tiles {list(tiles)}"
        needs = f"the recipe has tiles {list(whole)} for these dimension numbers"
        raise ValueError(message(operation, "`rhs_codes`", got, needs, _REMEDY))


def _in_order(codes: Codes, sizes: Shape) -> Shape:
    """Sizes by axis of the values, by axis of the operand."""
    return tuple(sizes[codes.order.index(axis)] for axis in range(len(codes.order)))
