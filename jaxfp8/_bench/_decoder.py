"""A decoder of Llama's shape in plain functions, on random weights.

A layer is RMSNorm, attention with rotary positions and shared keys and values (GQA), RMSNorm and
SwiGLU, each with its residual. Embedding and head are left out. `dot` multiplies by a weight, so
one decoder serves floats and 8 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Dot = Callable[[jax.Array, Any], jax.Array]
Layer = dict[str, Any]  # "attention_norm", "mlp_norm": [width]; others: weights by name
Cache = tuple[jax.Array, jax.Array]  # keys and values, [B, kv_heads, S, head]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
      layers: of the whole model.
      width, hidden: of activations between layers, and inside the perceptron.
      heads, kv_heads, head: number of heads of queries, of keys and values, and their size.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """K and N of the weights of a layer."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        return {
            "query": (self.width, query),
            "key": (self.width, key),
            "value": (self.width, key),
            "out": (query, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }


DEFAULT = "llama3-8b"
MODELS = {
    "llama3-8b": Sizes(layers=32, width=4096, hidden=14336, heads=32, kv_heads=8, head=128),
    "llama3-70b": Sizes(layers=80, width=8192, hidden=28672, heads=64, kv_heads=8, head=128),
    "tiny": Sizes(layers=2, width=64, hidden=128, heads=4, kv_heads=2, head=16),
}
_EPS, _THETA = 1e-5, 500000.0


def step(
    x: jax.Array,
    position: jax.Array,
    layers: list[Layer],
    caches: list[Cache],
    *,
    sizes: Sizes,
    dot: Dot,
) -> tuple[jax.Array, list[Cache]]:
    """One step: tokens through all layers.

    Args:
      x: embedded tokens [B, T, width].
      position: of the first of them, int32.
      layers: weights.
      caches: keys and values before the step.
      sizes, dot: of the decoder, and its dot.

    Returns:
      The tokens after the last layer [B, T, width], and the caches with theirs.
    """
    after = []
    for layer, cache in zip(layers, caches, strict=True):
        mixed, cache = _attention(
            normed(x, layer["attention_norm"]), position, layer, cache, sizes, dot
        )
        x = x + mixed
        y = normed(x, layer["mlp_norm"])
        x = x + dot(jax.nn.silu(dot(y, layer["gate"])) * dot(y, layer["up"]), layer["down"])
        after.append(cache)
    return x, after


def _attention(
    x: jax.Array, position: jax.Array, layer: Layer, cache: Cache, sizes: Sizes, dot: Dot
) -> tuple[jax.Array, Cache]:
    """Attention over the cache, after the keys and values of `x` are written into it."""
    batch, tokens, _ = x.shape
    places = position + jnp.arange(tokens)

    def heads(name: str) -> jax.Array:
        split = dot(x, layer[name]).reshape(batch, tokens, -1, sizes.head)
        return split.swapaxes(1, 2)  # [B, heads, T, head]

    query, key = (_rotated(heads(name), places) for name in ("query", "key"))
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, 2)
        for old, new in zip(cache, (key, heads("value")), strict=True)
    )
    query = query.reshape(batch, sizes.kv_heads, -1, tokens, sizes.head)
    scores = jnp.einsum("bkgtd,bksd->bkgts", query, keys, preferred_element_type=_wide(x))
    seen = jnp.arange(keys.shape[2]) <= places[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores / np.sqrt(sizes.head), -jnp.inf))
    mixed = jnp.einsum("bkgts,bksd->bkgtd", shares.astype(x.dtype), values)
    mixed = mixed.reshape(batch, sizes.heads, tokens, sizes.head).swapaxes(1, 2)
    return dot(mixed.reshape(batch, tokens, -1), layer["out"]), (keys, values)


def _wide(x: jax.Array) -> Any:
    """The dtype for values too sensitive for bfloat16."""
    return jnp.promote_types(x.dtype, jnp.float32)


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm, in float32."""
    wide = x.astype(_wide(x))
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPS)
    return (wide * scale).astype(x.dtype) * weight


def _rotated(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rotary positions on [B, heads, T, head], in halves as Llama's checkpoints have them."""
    wide, half = _wide(x), x.shape[-1] // 2
    angles = places[:, None] * _THETA ** (-jnp.arange(half, dtype=wide) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def random_layers(sizes: Sizes, count: int) -> list[Layer]:
    """Weights [K, N] in bfloat16, made on the device."""
    keys = iter(jax.random.split(jax.random.key(0), count * len(sizes.weights)))
    norms = ("attention_norm", "mlp_norm")
    return [
        {name: jnp.ones(sizes.width, jnp.bfloat16) for name in norms}
        | {name: _normal(next(keys), size, size[0]) for name, size in sizes.weights.items()}
        for _ in range(count)
    ]


def random_caches(sizes: Sizes, count: int, batch: int, length: int) -> list[Cache]:
    """Keys and values of `length` tokens."""
    shape = (batch, sizes.kv_heads, length, sizes.head)
    keys = jax.random.split(jax.random.key(1), 2 * count)
    return [(_normal(one, shape), _normal(two, shape)) for one, two in keys.reshape(count, 2)]


def random_tokens(sizes: Sizes, batch: int, tokens: int) -> jax.Array:
    """Embedded tokens [B, T, width]."""
    return _normal(jax.random.key(2), (batch, tokens, sizes.width))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int = 1) -> jax.Array:
    return (jax.random.normal(key, shape) / np.sqrt(fan_in)).astype(jnp.bfloat16)
