"""Runs a model to observe its layers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax.core import DenyList
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT


def applied(
    model: nn.Module, variables: Any, args: Any, kwargs: Any, *, constant: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """The output of a model and the variables that it changed; the arguments stay as they are.

    The model may change caches and statistics, as in any forward pass, and make missing ones. It
    does not change scaling states.

    Args:
      model: the model.
      variables: its variables.
      args, kwargs: arguments of `model.apply`; a `mutable` among them is extended.
      constant: further collections that stay constant, besides scaling states.
    """
    given = {name: value for name, value in kwargs.items() if name != "mutable"}
    mutable = DenyList((OVERWRITE_WITH_GRADIENT, *constant))
    return model.apply(variables, *args, **given, mutable=mutable)
