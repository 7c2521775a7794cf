"""A model run for what its layers tell, not for its output."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax.core import DenyList
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT


def applied(
    model: nn.Module, variables: Any, args: Any, kwargs: Any, *, constant: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """What a model returns, and the variables that it changed; those that are given stay.

    It may change what a forward pass changes, such as caches and statistics, and make what is not
    there yet. Scaling states are not changed by one: they are what `init` made, or missing.

    Args:
      model: the model.
      variables: its variables.
      args, kwargs: what `model.apply` takes; a `mutable` among them says less than is needed here.
      constant: collections that it may not change either.
    """
    given = {name: value for name, value in kwargs.items() if name != "mutable"}
    mutable = DenyList((OVERWRITE_WITH_GRADIENT, *constant))
    return model.apply(variables, *args, **given, mutable=mutable)
