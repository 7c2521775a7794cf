"""A layer of the decoder. `model` holds its weights in nnx, `functional` in a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llama.attention import attend, heads, route
from llama.cache import Cache
from llama.config import Config

# Multiplies by the weight of a name, or normalises by it. Names are those of Hugging Face within a
# layer. The equation is that of weights of experts, which are stored as [experts, N, K].
Apply = Callable[..., jax.Array]


def layer(
    config: Config,
    x: jax.Array,
    linear: Apply,
    norm: Apply,
    cache: Cache,
    positions: jax.Array,
    span: int,
) -> tuple[jax.Array, Cache]:
    """Attention and feed-forward, each normalised before and added to its input.

    Args:
      config: sizes.
      x: tokens [B, S, width].
      linear, norm: apply the layer of a name to an input.
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
    return x + (_experts(config, y, linear) if config.experts else _swiglu(y, linear)), cache


def _swiglu(x: jax.Array, linear: Apply) -> jax.Array:
    hidden = jax.nn.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
    return linear("mlp.down_proj", hidden)


def _experts(config: Config, x: jax.Array, linear: Apply) -> jax.Array:
    """Feed-forward networks of which each token sees a few.

    All experts are computed for all tokens, and most weighed with 0: right, and simple. At decode
    a batch that uses most experts reads all of their weights anyway.
    """
    weights = route(config, linear("mlp.gate", x)).astype(x.dtype)
    gate, up = (linear(f"mlp.{n}_proj", x, "bsk,enk->bsen") for n in ("gate", "up"))
    y = linear("mlp.down_proj", jax.nn.silu(gate) * up, "bsek,enk->bsen")
    return jnp.einsum("bse,bsed->bsd", weights, y)
