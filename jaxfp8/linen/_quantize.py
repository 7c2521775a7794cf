"""Quantises the variables of a model."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from jaxfp8._value.changes import Changes
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import is_held
from jaxfp8._value.qarray import QArray
from jaxfp8._value.shards import check_tiles_fit
from jaxfp8.linen._apply import applied, check_call
from jaxfp8.linen._changes import noted, parameters
from jaxfp8.linen._kernel import PARAMS

_OPERATION = "jaxfp8.linen.quantize"


def quantize(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Changes]:
    """Makes the variables of a model with 8-bit layers from those of its float twin.

    A layer of `jaxfp8.linen` has the name and the parameters of its Flax counterpart, so the
    variables of a float model fit once their weights are quantised. The model is traced, since only
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
