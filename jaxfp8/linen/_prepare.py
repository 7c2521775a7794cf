"""Prepares the 8-bit weights of a model for the kernels."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax

from jaxfp8._value import prepared
from jaxfp8._value.errors import FallbackWarning, message
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray
from jaxfp8.linen._apply import applied
from jaxfp8.linen._kernel import PARAMS, Weight, noted_weights

_OPERATION = "jaxfp8.linen.prepare"


def prepare(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares the 8-bit weights of a model for the kernels of the device.

    Call it once, after a model is loaded for inference: see `jaxfp8.prepare`. The model is traced,
    since only a layer knows which axis of its weight it sums over, and not run. On a GPU only
    layers change whose recipe holds activations in 8 bits. Restore a checkpoint before you prepare.

    Args:
      model: a module that holds layers of `jaxfp8.linen`.
      variables: its variables, in 8 bits.
      *args, **kwargs: what `model.apply` takes.

    Returns:
      The variables, with a `PreparedArray` for each weight that can be prepared: the product sums
      over one axis, size and tiles are as `jaxfp8.prepare` needs them, and there is no metadata
      of sharding. For each other weight a `FallbackWarning` says why. Embeddings are not prepared.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> x = jnp.ones((1, 8))
      >>> model = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8)
      >>> variables = jaxfp8.linen.prepare(model, model.init(jax.random.key(0), x), x)
      >>> variables["params"]["kernel"], model.apply(variables, x).shape
      (PreparedArray(int8[8,64], contracting=-2), (1, 64))
    """
    with noted_weights() as weights:
        jax.eval_shape(
            lambda held: applied(model, held, args, kwargs, constant=(PARAMS,))[0], variables
        )

    left: list[str] = []

    def leaf(path: Any, value: Any) -> Any:
        weight = weights.get(tuple(str(getattr(entry, "key", entry)) for entry in path))
        if weight is None or not isinstance(value, QArray | TransposedArray):
            return value
        reason = _why_not(weight, value)
        if not reason:
            return prepared.prepare(value, weight.contracting[0] - len(weight.shape))
        if reason not in prepared.IN_PLACE and not weight.looked_up:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            text = message(_OPERATION, f"`{name}`", f"is {value}", reason, "it is left as it is")
            left.append(text)
        return value

    params = jax.tree_util.tree_map_with_path(leaf, variables[PARAMS], is_leaf=prepared.is_held)
    for text in left:
        warnings.warn(text, FallbackWarning, stacklevel=2)
    return {**variables, PARAMS: params}


def _why_not(weight: Weight, value: QArray | TransposedArray) -> str:
    """Why a weight is left as it is; "" if it is prepared."""
    if weight.looked_up:
        return "its rows are looked up"
    q = prepared.stored(value)
    if not all(hasattr(leaf, "dtype") for leaf in (q.qvalue, q.scale)):
        return "it has metadata of sharding"
    if value.shape[-len(weight.shape) :] != weight.shape:
        return f"layers of {weight.shape} are stacked along another axis than the first"
    axes, rank = weight.contracting, len(weight.shape)
    in_8_bits = weight.recipe.activation is not None
    return prepared.why_not_layer(value, axes, rank, meets_8_bits=in_8_bits)
