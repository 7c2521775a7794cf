"""What both forms of the decoder share: normalisation, attention over a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llama.cache import Cache
from llama.config import Config


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight` along the last axis, in float32 and rounded once before the weight."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def heads(x: jax.Array, size: int) -> jax.Array:
    """The last axis as heads of a size."""
    return x.reshape(*x.shape[:-1], -1, size)


def attend(
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    positions: jax.Array,
    span: int,
) -> tuple[jax.Array, Cache]:
    """Causal attention of new tokens on all tokens so far, themselves included.

    Args:
      config: sizes.
      query: [B, S, heads, D], rotated.
      key, value: [B, S, kv_heads, D], keys rotated.
      cache: of the layer.
      positions: of the new tokens in their texts, [B, S]: their slots in the cache.
      span: how many slots of the cache may be taken.

    Returns:
      Mixed values [B, S, heads * D], and the cache with the new tokens.
    """
    cache = Cache(cache.keys.write(key, positions), cache.values.write(value, positions))
    batch, length, dtype = *query.shape[:2], query.dtype
    if span == length:  # a whole text at once: nothing is read back from the cache
        return _whole(config, query, key, value).reshape(batch, length, -1), cache
    grouped = query.reshape(batch, length, config.kv_heads, -1, config.head)
    # Codes stay codes in both products. The scale of a key belongs to a column of the scores; that
    # of a value lies along the sum, and is multiplied into the weights before it.
    keys, of_keys = cache.keys.read(span, dtype)
    values, of_values = cache.values.read(span, dtype)
    scores = jnp.einsum("bsghd,bgtd->bgsht", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores * (config.sharpness * config.head**-0.5) * _spread(of_keys)
    scores = jnp.where(mask(positions, span, config.window)[:, None, :, None], scores, -jnp.inf)
    weights = (jax.nn.softmax(scores) * _spread(of_values)).astype(dtype)
    mixed = jnp.einsum("bgsht,bgtd->bsghd", weights, values)
    return mixed.reshape(batch, length, -1), cache


def _whole(config: Config, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of tokens 0 to S - 1 among themselves; on one GPU by cuDNN's kernel."""
    one_gpu = jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty
    fused = one_gpu and query.dtype.itemsize == 2 and config.window is None
    fused &= config.latent is None
    return jax.nn.dot_product_attention(
        query,
        key.astype(query.dtype),
        value.astype(query.dtype),
        is_causal=True,
        scale=config.sharpness * config.head**-0.5,
        local_window_size=None if config.window is None else (config.window - 1, 0),
        implementation="cudnn" if fused else "xla",
    )


def _spread(scale: jax.Array) -> jax.Array:
    """Scales [B, G, T] for scores [B, G, S, H, T]."""
    return scale[:, :, None, None] if scale.ndim else scale


def mask(positions: jax.Array, span: int, window: int | None) -> jax.Array:
    """Which slots each new token sees, bool [B, S, span]."""
    slots, here = jnp.arange(span), positions[..., None]
    seen = slots <= here
    return seen if window is None else seen & (slots > here - window)
