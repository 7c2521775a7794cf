"""A layer of the decoder. `model` holds its weights in nnx, `functional` in a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax

from llama.attention import attend, heads
from llama.cache import Cache
from llama.config import Config

# Multiplies by the weight of a name, or normalises by it. Names are those of Hugging Face within a
# layer.
Apply = Callable[[str, jax.Array], jax.Array]


def layer(
    config: Config,
    x: jax.Array,
    linear: Apply,
    norm: Apply,
    experts: Callable[[jax.Array], jax.Array] | None,
    cache: Cache,
    positions: jax.Array,
    span: int,
) -> tuple[jax.Array, Cache]:
    """Attention and feed-forward, each normalised before and added to its input.

    Args:
      config: sizes.
      x: tokens [B, S, width].
      linear, norm: apply the layer of a name to an input.
      experts: applies the mixture of experts; None for a dense layer.
      cache, positions, span: as for `llama.attention.attend`.

    Returns:
      Tokens [B, S, width], and the cache with the new ones.
    """
    y = norm("input_layernorm", x)
    query, key, value = (heads(linear(f"self_attn.{n}_proj", y), config.head) for n in "qkv")
    if config.qk_norm:
        query, key = norm("self_attn.q_norm", query), norm("self_attn.k_norm", key)
    mixed, cache = attend(config, query, key, value, cache, positions, span)
    x = x + linear("self_attn.o_proj", mixed)
    y = norm("post_attention_layernorm", x)
    return x + (_swiglu(y, linear) if experts is None else experts(y)), cache


def _swiglu(x: jax.Array, linear: Apply) -> jax.Array:
    hidden = jax.nn.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
    return linear("mlp.down_proj", hidden)
