"""The choice of the next token from its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: 0 takes the likeliest.
      top_k: only the likeliest k count; 0 for all.
      top_p: only the likeliest that together have this probability count.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def sample(how: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
    """Token ids int32 [B] from logits [B, vocabulary]."""
    if how.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / how.temperature
    if how.top_k:
        least = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.top_p < 1:
        logits = jnp.where(_outside(logits, how.top_p), -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _outside(logits: jax.Array, top_p: float) -> jax.Array:
    """Which tokens come after those that together have a probability."""
    ordered = jnp.sort(logits, -1, descending=True)
    share = jax.nn.softmax(ordered)
    before = jnp.cumsum(share, -1) - share  # of the likelier ones: the likeliest always counts
    number = jnp.sum(before < top_p, -1, keepdims=True)
    return logits < jnp.take_along_axis(ordered, number - 1, -1)
