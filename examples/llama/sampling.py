"""The choice of the next token from its logits. Nothing is sorted.

Sorting a vocabulary of 128256 logits takes far longer than drawing from it. `top_k` and `top_p`
need only one number of the sorted vocabulary: the least logit that counts. A search finds it, a
few bits in each pass over the logits.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

# Bits of the least logit that a pass finds by platform: it compares each logit with 2 ** bits - 1
# edges. A CPU waits for comparisons: with one bit top_p of 128256 logits takes 4 ms, with four 23,
# and a sort 73. A GPU waits for launches, and four bits take the fewest passes.
BITS = {"cpu": 1, "gpu": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    A token counts if fewer than `top_k` tokens are likelier than it. Of those, it counts if the
    likelier ones together have a probability below `top_p`. Equal tokens count together.

    Attributes:
      temperature: 0 takes the likeliest.
      top_k: only the likeliest k count; 0 for all.
      top_p: only the likeliest that together have this probability count.

    Raises:
      ValueError: one of them is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; give 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give 1 or more, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give more than 0, and at most 1")


@functools.partial(jax.jit, static_argnames="how")
def sample(how: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
    """Token ids int32 [B] from logits [B, vocabulary] in any float type."""
    if how.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scaled = logits.astype(jnp.float32) / how.temperature
    return jax.random.categorical(key, counted(how, scaled)).astype(jnp.int32)


def counted(how: Sampling, logits: jax.Array) -> jax.Array:
    """Logits float32 [B, vocabulary], those of tokens that do not count as -inf."""
    if how.top_k:
        logits = _likeliest(logits, jnp.ones_like(logits), how.top_k)
    if how.top_p < 1:
        logits = _likeliest(logits, jax.nn.softmax(logits), how.top_p)
    return logits


def _likeliest(logits: jax.Array, weights: jax.Array, bound: float) -> jax.Array:
    """Logits whose likelier ones together weigh less than a bound, others as -inf.

    The least of them is the largest edge with `sum(weights[logits >= edge]) >= bound`. Its bits are
    found from the top, as those of an integer in the order of the floats.
    """
    equal = jnp.where(logits == 0, 0.0, logits)  # -0.0 is as likely as 0.0
    bits = jax.lax.bitcast_convert_type(equal, jnp.int32)
    sign = jnp.int32(-(2**31))
    ordered = jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) | sign), jnp.uint32)
    least = jnp.zeros((logits.shape[0], 1), jnp.uint32)
    digits = BITS.get(jax.default_backend(), BITS["gpu"])
    for shift in range(32 - digits, -1, -digits):
        edges = least + (jnp.arange(1, 2**digits, dtype=jnp.uint32) << shift)
        above = ordered[:, None] >= edges[:, :, None]
        weight = jnp.sum(jnp.where(above, weights[:, None], 0), -1)
        digit = jnp.sum(weight >= bound, -1, keepdims=True, dtype=jnp.uint32)
        least += digit << shift
    return jnp.where(ordered >= least, logits, -jnp.inf)
