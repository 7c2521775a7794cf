"""A layer of the decoder. `model` holds its weights in nnx, `functional` in a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llama.attention import attend, heads
from llama.cache import Cache
from llama.config import Config
from llama.rope import rotate

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
    make = _usual if config.latent is None else _latent
    query, key, value = make(config, y, linear, norm, positions)
    mixed, cache = attend(config, query, key, value, cache, positions, span)
    if config.latent is not None:
        mixed = heads(mixed, config.head)[..., : config.latent.value]
        mixed = mixed.reshape(*x.shape[:-1], -1)
    x = x + linear("self_attn.o_proj", mixed)
    y = norm("post_attention_layernorm", x)
    return x + (_swiglu(y, linear) if experts is None else experts(y)), cache


Heads = tuple[jax.Array, jax.Array, jax.Array]


def _usual(config: Config, x: jax.Array, linear: Apply, norm: Apply, positions: jax.Array) -> Heads:
    """Queries, keys and values [B, S, heads, D] of tokens."""
    query, key, value = (heads(linear(f"self_attn.{n}_proj", x), config.head) for n in "qkv")
    if config.qk_norm:
        query, key = norm("self_attn.q_norm", query), norm("self_attn.k_norm", key)
    return rotate(query, positions, config.rope), rotate(key, positions, config.rope), value


def _latent(
    config: Config, x: jax.Array, linear: Apply, norm: Apply, positions: jax.Array
) -> Heads:
    """The same of DeepSeek-V3; values are padded to the size of keys."""
    latent = config.latent
    assert latent is not None
    if latent.q_rank is None:
        query = linear("self_attn.q_proj", x)
    else:
        low = norm("self_attn.q_a_layernorm", linear("self_attn.q_a_proj", x))
        query = linear("self_attn.q_b_proj", low)
    query = heads(query, config.head)
    low, turned = jnp.split(linear("self_attn.kv_a_proj_with_mqa", x), [latent.kv_rank], -1)
    both = linear("self_attn.kv_b_proj", norm("self_attn.kv_a_layernorm", low))
    key, value = jnp.split(heads(both, latent.plain + latent.value), [latent.plain], -1)

    def rotated(x: jax.Array) -> jax.Array:  # a pair is two neighbours in these files
        pairs = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return rotate(pairs, positions, config.rope)

    shared = rotated(turned[:, :, None])
    shared = jnp.broadcast_to(shared, (*key.shape[:-1], latent.rotated))
    plain, turned = jnp.split(query, [latent.plain], -1)
    query = jnp.concatenate([plain, rotated(turned)], -1)
    room = [(0, 0)] * 3 + [(0, config.head - latent.value)]
    return query, jnp.concatenate([key, shared], -1), jnp.pad(value, room)


def _swiglu(x: jax.Array, linear: Apply) -> jax.Array:
    hidden = jax.nn.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
    return linear("mlp.down_proj", hidden)
