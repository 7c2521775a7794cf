"""The parameters for an optimiser: the floats, not the 8-bit ones."""

from __future__ import annotations

from typing import Any

import jax

from jaxfp8._value.prepared import is_held
from jaxfp8.linen._kernel import INPUT_SCALE


def partition(params: Any) -> tuple[Any, Any]:
    """Splits parameters into two trees: floats, to be trained, and those in 8 bits.

    The codes of an 8-bit kernel have no gradient. An optimiser should change neither them nor their
    scales, nor the calibrated scale of an input. `combine` merges both trees.

    Args:
      params: parameters of a model with layers of `jaxfp8.linen`.

    Returns:
      Two trees structured as `params`, each with None in place of the other's arrays.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer, x = jaxfp8.linen.Dense(4), jnp.ones((2, 8))
      >>> params = layer.init(jax.random.key(0), x)["params"]
      >>> floats, held = jaxfp8.linen.partition(params)
      >>> def loss(floats):
      ...     return layer.apply({"params": jaxfp8.linen.combine(floats, held)}, x).sum()
      >>> jax.grad(loss)(floats)
      {'bias': Array([2., 2., 2., 2.], dtype=float32), 'kernel': None}
    """

    def floats(path: Any, leaf: Any) -> Any:
        return None if _is_held(path, leaf) else leaf

    def held(path: Any, leaf: Any) -> Any:
        return leaf if _is_held(path, leaf) else None

    return tuple(
        jax.tree_util.tree_map_with_path(part, params, is_leaf=is_held) for part in (floats, held)
    )  # type: ignore[return-value]


def combine(floats: Any, held: Any) -> Any:
    """Merges the two trees of `partition`.

    Args:
      floats, held: the two trees, the first perhaps changed since.

    Returns:
      One tree, with the arrays of both.
    """

    def either(one: Any, other: Any) -> Any:
        return other if one is None else one

    return jax.tree.map(either, floats, held, is_leaf=lambda x: x is None or is_held(x))


def _is_held(path: Any, leaf: Any) -> bool:
    return is_held(leaf) or any(getattr(key, "key", None) == INPUT_SCALE for key in path)
