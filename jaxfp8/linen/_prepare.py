"""Prepares the 8-bit weights of a model for the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxfp8._value import prepared
from jaxfp8._value.changes import Change, Changes, change
from jaxfp8.linen._apply import applied, check_call
from jaxfp8.linen._changes import names_of, noted
from jaxfp8.linen._kernel import PARAMS, Weight


def prepare(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Changes]:
    """Prepares the 8-bit weights of a model for the kernels of the device.

    Call it once, after a model is loaded for inference: see `jaxfp8.prepare`. The model is traced
    and not run, since only a layer knows the contracted axis of its weight. On a GPU only layers
    with activations in 8 bits change. Restore a checkpoint before you prepare.

    Args:
      model: a module with layers of `jaxfp8.linen`.
      variables: its variables, in 8 bits.
      *args, **kwargs: arguments of `model.apply`.

    Returns:
      The variables, with a `PreparedArray` for each suitable weight: the product sums over one
      axis, size and tiles are as `jaxfp8.prepare` needs them, and there is no metadata of sharding.
      Embeddings are not prepared. And a row for each 8-bit weight: the change, or the reason
      against it.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> x = jnp.ones((1, 8))
      >>> model = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC)
      >>> variables, _ = jaxfp8.linen.prepare(model, model.init(jax.random.key(0), x), x)
      >>> variables["params"]["kernel"], model.apply(variables, x).shape
      (PreparedArray(int8[8,64], contracting=-2), (1, 64))
    """
    check_call("jaxfp8.linen.prepare", model, variables, kwargs)
    with noted() as notes:
        jax.eval_shape(
            lambda held: applied(model, held, args, kwargs, constant=(PARAMS,))[0], variables
        )
    rows: list[Change] = []

    def converted(key: Any, value: Any) -> Any:
        names = names_of(key)
        weight = notes.weights.get(names)
        if weight is None or not prepared.is_held(value):
            return value
        reason = _why_not(weight, value)
        axis = weight.contracting[0] - len(weight.shape)
        after = value if reason else prepared.prepare(value, axis)
        path, recipe = "/".join(names[:-1]), weight.recipe.name
        made = change(path, notes.kind(names), value, after, recipe=recipe, reason=reason)
        rows.append(made if reason else dataclasses.replace(made, after="prepared"))
        return after

    params = jax.tree_util.tree_map_with_path(
        converted, variables[PARAMS], is_leaf=prepared.is_held
    )
    return {**variables, PARAMS: params}, Changes.of(rows)


def _why_not(weight: Weight, value: Any) -> str:
    """Why a weight is left as it is; "" if it is prepared."""
    if isinstance(value, prepared.PreparedArray):
        return "it is prepared already"
    if weight.why_not_prepared:
        return weight.why_not_prepared
    q = prepared.stored(value)
    if not all(hasattr(leaf, "dtype") for leaf in (q.qvalue, q.scale)):
        return "it has metadata of sharding"
    if value.shape[-len(weight.shape) :] != weight.shape:
        return f"layers of {weight.shape} are stacked along another axis than the first"
    axes, rank = weight.contracting, len(weight.shape)
    in_8_bits = weight.recipe.activation is not None
    return prepared.why_not_layer(value, axes, rank, meets_8_bits=in_8_bits)
