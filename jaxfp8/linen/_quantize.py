"""Quantizes the variables of a model, and prepares them for the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxfp8._value import prepared
from jaxfp8._value.changes import Change, Changes, change
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import is_held
from jaxfp8._value.qarray import QArray
from jaxfp8._value.shards import check_tiles_fit
from jaxfp8.linen._changes import applied, check_call, names_of, noted, parameters
from jaxfp8.linen._kernel import PARAMS, Weight

_OPERATION = "jaxfp8.linen.quantize"


def quantize(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Changes]:
    """Makes the variables of a model with 8-bit layers from those of its float twin.

    A layer of `jaxfp8.linen` has the name and the parameters of its Flax counterpart, so the
    variables of a float model fit once their weights are quantized. The model is traced, since only
    a layer knows the contracted axes of its weight. A static recipe calibrates its scales on
    `args`; call again with other inputs to calibrate on these as well. Metadata of sharding is
    kept, and a scale shares it with its weight.

    Args:
      model: a module with layers of `jaxfp8.linen`.
      variables: variables of the same model with layers of Flax; 8-bit weights stay as they are,
        and dictionaries of a restored checkpoint become `QArray`s again.
      *args, **kwargs: arguments of `model.apply`: inputs like those in use, `rngs`. The forward
        pass may change or make caches and statistics, but these changes are dropped.

    Returns:
      The variables in 8 bits, structured as `variables`, their other collections unchanged; and a
      row for each weight, with the reason if it stays wide. Print the latter.

    Raises:
      TypeError: `model` is no module of linen; a recipe is given, though the layers have theirs.
      ValueError: the parameters are not those of `model`, or it has no 8-bit layer; a tile does not
        divide the shards of a weight.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8.linen
      >>> x = jnp.ones((1, 8))
      >>> variables = nn.Dense(4).init(jax.random.key(0), x)
      >>> model = jaxfp8.linen.Dense(4, recipe=jaxfp8.FP8_DYNAMIC)
      >>> variables, changes = jaxfp8.linen.quantize(model, variables, x)
      >>> variables["params"]["kernel"], changes.bytes_saved
      (QArray(float8_e4m3fn[8,4], scale=float32[1,4]), 80)
    """

    @jax.jit
    def converted(variables: Any) -> Any:
        return applied(model, variables, args, kwargs)[1][PARAMS]

    check_call(_OPERATION, model, variables, kwargs)
    with noted() as notes:
        quantized = converted(variables)
    if not any(is_held(leaf) for _, leaf in parameters(quantized)):
        got, needs = "has no layer of `jaxfp8.linen` for 8-bit weights", "it has to hold one"
        remedy = (
            "give the model that will be used, not the float one its variables come from; a recipe "
            "that holds weights in floats takes those variables as they are"
        )
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    _check_shards(quantized, variables[PARAMS])
    return {**variables, PARAMS: quantized}, notes.changes(variables[PARAMS], quantized)


def _check_shards(quantized: Any, variables: Any) -> None:
    """Refuses tiles cut by the shards of a float weight."""
    floats = dict(parameters(variables))
    for path, q in parameters(quantized):
        value = floats.get(path)
        if isinstance(q, QArray) and not isinstance(value, QArray):
            sharding, tiles = getattr(value, "sharding", None), dict(enumerate(q.tile_sizes))
            check_tiles_fit(_OPERATION, "/".join(path), q.shape, sharding, tiles)


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
