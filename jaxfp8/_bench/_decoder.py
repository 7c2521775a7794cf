"""A decoder of Llama's shape on random weights, without embedding and head.

`dot` multiplies by a weight, so one decoder serves floats and 8 bits, decoding and training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._bench._gpu_codes import rms_norm
from jaxfp8._bench._products import normal

Dot = Callable[[jax.Array, Any], jax.Array]
Layer = dict[str, Any]  # "attention_norm", "mlp_norm": [width]; others: weights by name
Cache = tuple[jax.Array, jax.Array]  # keys and values, [B, kv_heads, S, head]


class Sizes(NamedTuple):
    """Widths, of activations and inside the perceptron; numbers of heads and the size of one.

    Without heads a layer is a perceptron alone: norm, up, GELU, down.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """N and K of the weights of a layer."""
        if not self.heads:
            return {"up": (self.hidden, self.width), "down": (self.width, self.hidden)}
        width, query, key = self.width, self.heads * self.head, self.kv_heads * self.head
        first = {"query": query, "key": key, "value": key, "gate": self.hidden, "up": self.hidden}
        last = {"out": (width, query), "down": (width, self.hidden)}
        return {name: (n, width) for name, n in first.items()} | last


MODELS = {
    "block-8b": Sizes(4096, 14336, heads=0, kv_heads=0, head=0),
    "tiny-block": Sizes(64, 128, heads=0, kv_heads=0, head=0),
    "llama3-8b": Sizes(4096, 14336, heads=32, kv_heads=8, head=128),
    "llama3-70b": Sizes(8192, 28672, heads=64, kv_heads=8, head=128),
    "gpt-1.3b": Sizes(2048, 5504, heads=16, kv_heads=16, head=128),
    "tiny": Sizes(64, 128, heads=4, kv_heads=2, head=16),
    "tiny-8": Sizes(64, 128, heads=8, kv_heads=8, head=8),
}
_THETA = 500000.0


def forward(
    given: tuple[jax.Array, jax.Array],
    layers: Sequence[Layer],
    caches: Sequence[Cache | None],
    *,
    sizes: Sizes,
    dot: Dot,
) -> tuple[jax.Array, list[Cache]]:
    """Tokens [B, T, width] after the last layer, and the caches with theirs.

    Given are tokens and the position of the first. A cache of None is empty.
    """
    (x, position), after = given, []
    for layer, cache in zip(layers, caches, strict=True):
        if not sizes.heads:
            hidden = jax.nn.gelu(dot(rms_norm(x, layer["mlp_norm"]), layer["up"]))
            x = x + dot(hidden, layer["down"])
            continue
        y = rms_norm(x, layer["attention_norm"])
        mixed, cache = _attention(y, position, layer, cache, sizes, dot)
        x = x + mixed
        y = rms_norm(x, layer["mlp_norm"])
        x = x + dot(jax.nn.silu(dot(y, layer["gate"])) * dot(y, layer["up"]), layer["down"])
        after.append(cache)
    return x, after


def _attention(
    x: jax.Array, position: jax.Array, layer: Layer, cache: Cache | None, sizes: Sizes, dot: Dot
) -> tuple[jax.Array, Cache]:
    """Attention over the cache, after the keys and values of `x` are written into it."""
    batch, tokens, _ = x.shape
    places = position + jnp.arange(tokens)

    def heads(name: str) -> jax.Array:
        split = dot(x, layer[name]).reshape(batch, tokens, -1, sizes.head)
        return split.swapaxes(1, 2)  # [B, heads, T, head]

    query, keys = (_rotated(heads(name), places) for name in ("query", "key"))
    values = heads("value")
    if cache is not None:
        write = jax.lax.dynamic_update_slice_in_dim
        keys, values = write(cache[0], keys, position, 2), write(cache[1], values, position, 2)
    query = query.reshape(batch, sizes.kv_heads, -1, tokens, sizes.head)
    scores = jnp.einsum("bkgtd,bksd->bkgts", query, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[2]) <= places[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores / np.sqrt(sizes.head), -jnp.inf))
    mixed = jnp.einsum("bkgts,bksd->bkgtd", shares.astype(x.dtype), values)
    mixed = mixed.reshape(batch, sizes.heads, tokens, sizes.head).swapaxes(1, 2)
    return dot(mixed.reshape(batch, tokens, -1), layer["out"]), (keys, values)


def _rotated(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rotary positions on [B, heads, T, head], in halves as Llama's checkpoints have them."""
    half = x.shape[-1] // 2
    angles = places[:, None] * _THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def random_layers(sizes: Sizes, count: int, hold: Callable[[jax.Array], Any]) -> list[Layer]:
    """Layers with weights made by `hold` from float32 [N, K]; gains are 1."""
    seeds = itertools.count(2)
    norms = {name: jnp.ones(sizes.width, jnp.bfloat16) for name in ("attention_norm", "mlp_norm")}
    return [
        norms | {n: hold(normal(next(seeds), *s) / np.sqrt(s[1])) for n, s in sizes.weights.items()}
        for _ in range(count)
    ]
