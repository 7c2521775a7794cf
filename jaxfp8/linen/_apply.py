"""Runs a model to observe its layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax.core import DenyList
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxfp8._value.errors import message, shown

# Arguments of `jaxfp8.nnx.quantize`. In linen the layers have the recipe.
_OF_LAYERS = ("recipe", "where")


def applied(
    model: nn.Module, variables: Any, args: Any, kwargs: Any, *, constant: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """The output of a model and its changed variables; the arguments stay as they are.

    The model may change caches and statistics, as in any forward pass, and make missing ones. It
    does not change scaling states.

    Args:
      model: the model.
      variables: its variables.
      args, kwargs: arguments of `model.apply`; a `mutable` among them is extended.
      constant: further constant collections, besides scaling states.
    """
    given = {name: value for name, value in kwargs.items() if name != "mutable"}
    mutable = DenyList((OVERWRITE_WITH_GRADIENT, *constant))
    return model.apply(variables, *args, **given, mutable=mutable)


def check_call(operation: str, model: Any, variables: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses all but a model of linen with its variables, and arguments of nnx's functions."""
    if not isinstance(model, nn.Module):
        got, needs = f"is of type {type(model).__name__}", "a module of linen is needed"
        remedy = f"for nnx, see `{operation.replace('linen', 'nnx')}`"
        raise TypeError(message(operation, "`model`", got, needs, remedy))
    if not isinstance(variables, Mapping) or "params" not in variables:
        got, needs = f"is {shown(variables)}", "a mapping with the collection 'params' is needed"
        remedy = "pass what `model.init` gives, or the first result of `quantize` and `prepare`"
        raise TypeError(message(operation, "`variables`", got, needs, remedy))
    for name in _OF_LAYERS:
        if name in kwargs and not _takes(model, kwargs.get("method"), name):
            got, needs = "is given", "the model does not take it, and each layer has its own recipe"
            remedy = "make the layers with it: `jaxfp8.linen.Dense(features, recipe=recipe)`"
            raise TypeError(message(operation, f"`{name}`", got, needs, remedy))


def _takes(model: nn.Module, method: Any, name: str) -> bool:
    """Whether a method of a model, by default the call, has an argument of that name."""
    if method is None or isinstance(method, str):
        method = getattr(type(model), method or "__call__")
    known = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in known)
