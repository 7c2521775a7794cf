"""Operands of FP8 training in 8 bits: for the forward product, and for both backward ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxfp8._call.library import ffi
from jaxfp8._call.ops.quantize_call import Encoded, encode
from jaxfp8._ops.dimensions import free_axes
from jaxfp8._ops.quantize import quantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import CurrentScaling, DelayedScaling, TrainingRecipe
from jaxfp8._recipes.saved_codes import named_codes
from jaxfp8._recipes.scaling import Scaling, next_scale, record, scale_outside_training
from jaxfp8._recipes.training_dot import Codes
from jaxfp8._value.dtypes import E8M0, as_bytes
from jaxfp8._value.qarray import QArray, scale_and_zero_point
from jaxfp8._value.scales import granularity
from jaxfp8._value.shards import check_tiles_fit_shards
from jaxfp8._value.spec import Shape, tile_counts


def forward_codes(
    recipe: TrainingRecipe,
    x: jax.Array,
    old: Scaling | None,
    contracting: Shape,
    batch: Shape,
    is_weight: bool = False,
) -> QArray:
    """An operand as the forward product takes it; `old` is its delayed scaling, if it has one."""
    dtype = recipe.forward_dtype
    if isinstance(recipe, DelayedScaling) and old is not None:
        return quantize(x, dtype, scale=scale_outside_training(recipe, dtype, old, x))
    return _unremembered(recipe, dtype, is_weight).quantize(x, contracting, batch)


def is_twice_differentiable(recipe: TrainingRecipe) -> bool:
    """Whether the gradients of a product may be differentiated again."""
    return isinstance(recipe, CurrentScaling) and recipe.second_derivatives


def encode_for_products(
    recipe: TrainingRecipe,
    dtype: DTypeLike,
    x: jax.Array,
    old: Scaling | None,
    summed: tuple[Shape, Shape],
    batch: Shape,
    both: bool = True,
    training: bool = True,
    is_weight: bool = False,
) -> tuple[tuple[Codes, Codes], Scaling | None]:
    """A tensor in 8 bits for its two products, and its next scaling.

    The products sum over different axes. With one scale for the whole tensor, or one for each
    square, both have the same codes, on a GPU each in its fastest layout. With a scale per row,
    scales may not vary along the summed axes, so the tensor is quantized twice, with the summed
    axes last; a GPU may read it once for both. Unless `both`, only the first codes are of use. A
    training step pays for no amax in front of the codes.
    """
    if isinstance(recipe, DelayedScaling) and old is not None:
        outside = functools.partial(scale_outside_training, x=x)
        scale = (next_scale if training else outside)(recipe, dtype, old)
        encoded = encode(x, dtype, scale, _transpose_from(x, summed, batch, both))
        assert encoded.amax is not None  # there is one beside a given scale
        tiles = granularity(x.shape, {}).tiles
        return _layouts(encoded, tiles, summed), record(old, scale, encoded.amax)
    how = _unremembered(recipe, dtype, is_weight)
    if not (both and is_twice_differentiable(recipe)):
        return _by_own_amax(how, x, summed, batch, both), None
    first, second = _by_own_amax(how, jax.lax.stop_gradient(x), summed, batch, both)
    return (dataclasses.replace(first, wide=x), dataclasses.replace(second, wide=x)), None


def _by_own_amax(
    how: Quantization, x: jax.Array, summed: tuple[Shape, Shape], batch: Shape, both: bool
) -> tuple[Codes, Codes]:
    """A tensor in 8 bits for both products, with scales chosen from its values."""
    if not x.size:
        first, second = (_codes(how.quantize(x, axes, batch)) for axes in summed)
        return first, second
    sizes = [how.tiles(x.shape, axes, batch) for axes in summed]
    for of_product in sizes[: 1 + both]:
        check_tiles_fit_shards("x", x, of_product)
    ours, theirs = (granularity(x.shape, of_product).tiles for of_product in sizes)
    split, is_power = _transpose_from(x, summed, batch, both), how.scale_dtype == E8M0
    if ours == theirs:
        return _layouts(encode(x, how.dtype, None, split, ours, is_power), ours, summed)
    if both and split is not None:
        plain, turned = (ours, theirs) if x.ndim - 1 in summed[0] else (theirs, ours)
        encoded = encode(x, how.dtype, None, split, plain, is_power, turned)
        return _layouts(encoded, plain, summed, turned)

    def along(axes: Shape, tiles: Shape) -> Codes:
        """Codes with the summed axes last: what shares a scale is contiguous."""
        order = (*batch, *free_axes(x.ndim, axes, batch), *sorted(axes))
        tiles = tuple(tiles[axis] for axis in order)
        encoded = encode(x.transpose(order), how.dtype, None, None, tiles, is_power)
        return _as_codes(encoded.codes, encoded.scale, tiles, order)

    first = along(summed[0], ours)
    return first, along(summed[1], theirs) if both else first


def _unremembered(recipe: TrainingRecipe, dtype: DTypeLike, is_weight: bool) -> Quantization:
    """How a tensor without a delayed scaling is quantized: by its own amax."""
    if isinstance(recipe, DelayedScaling):
        return Quantization(dtype=dtype, granularity="tensor")
    return recipe.quantization(dtype, is_weight)


def _codes(q: QArray) -> Codes:
    scale, _, tiles = scale_and_zero_point(q)
    return _as_codes(q.qvalue, scale, tiles, tuple(range(q.ndim)))


def _as_codes(values: jax.Array, scale: jax.Array, tiles: Shape, order: Shape) -> Codes:
    dtype = values.dtype.name
    values, scale = named_codes(as_bytes(values)), named_codes(scale)
    return Codes(values=values, scale=scale, tiles=tiles, dtype=dtype, order=order)


def _transpose_from(
    x: jax.Array, summed: tuple[Shape, Shape], batch: Shape, both: bool
) -> int | None:
    """The first axis of the transposed copy, or None without a copy.

    There is a copy if one product sums over the last axes of `x` and the other over earlier ones.
    It is useless if the only product sums over the last axes, or if the platform multiplies any
    layout equally fast.
    """
    if batch or not _layout_matters():
        return None
    for place, axes in enumerate(summed):
        first = x.ndim - len(axes)
        if sorted(axes) == list(range(first, x.ndim)) and 0 < first < x.ndim:
            return first if both or place == 1 else None
    return None


def _layout_matters() -> bool:
    """Whether products along contiguous axes are faster, as on tensor cores.

    This is a guess: the program's platform is not known yet. Only its speed depends on it.
    """
    return ffi.has_backend("cuda")


def _layouts(
    x: Encoded, tiles: Shape, summed: tuple[Shape, Shape], transposed_tiles: Shape | None = None
) -> tuple[Codes, Codes]:
    """The codes for both products. With a transposed copy, each sums over its last axes."""
    axes = tuple(range(x.codes.ndim))
    # There is no scale along an empty axis.
    scale = jnp.broadcast_to(x.scale, tile_counts(x.codes.shape, tiles))
    plain = _as_codes(x.codes, scale, tiles, axes)
    if x.transposed is None:
        return plain, plain
    second_sums_last = axes[-1] in summed[1]
    split = len(axes) - len(summed[second_sums_last])
    order = axes[split:] + axes[:split]
    own = x.transposed_scale
    if own is None:
        own = scale if scale.size == 1 else scale.transpose(order)
    of_order = tuple((transposed_tiles or tiles)[axis] for axis in order)
    transposed = _as_codes(x.transposed, own, of_order, order)
    return (transposed, plain) if second_sums_last else (plain, transposed)
