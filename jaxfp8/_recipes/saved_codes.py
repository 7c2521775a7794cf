"""What `jax.checkpoint` saves of FP8 training: codes have a name, and a policy for it."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "jaxfp8_codes"
_saves = jax.checkpoint_policies.save_only_these_names(_NAME)


def named_codes(x: jax.Array) -> jax.Array:
    """`x`, under the name of codes. FP8 comes as bytes, since JAX rounds the floats it saves."""
    return checkpoint_name(x, _NAME)


def codes_saveable(primitive: Any, *types: Any, **params: Any) -> Any:
    """A policy for `jax.checkpoint`: save the codes of FP8 training, and compute the rest again.

    Codes are those of activations and weights in `fp8_dot_general`, `fp8_ragged_dot` and the
    layers, with their scales and amaxes. So each tensor is encoded once a step. A product is
    computed again, from the saved codes, if its output is needed again. The name of the codes is
    `"jaxfp8_codes"`, for the policies of JAX that take names.

    Args:
      primitive, types, params: what JAX tells a policy of an equation.

    Returns:
      Whether to save the results of the equation.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> def layer(w, x):
      ...     numbers, recipe = (((1,), (0,)), ((), ())), jaxfp8.CurrentScaling()
      ...     return jnp.tanh(jaxfp8.fp8_dot_general(x, w, numbers, recipe=recipe))
      >>> saving = jax.checkpoint(layer, policy=jaxfp8.codes_saveable)
      >>> w, x = jnp.full((32, 16), 0.01), jnp.ones((8, 32))
      >>> want, got = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (layer, saving))
      >>> bool(jnp.allclose(want, got))
      True
    """
    return _saves(primitive, *types, **params)
