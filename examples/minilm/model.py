"""The encoder all-MiniLM-L6-v2 in plain JAX, in float32 or in one of three 8-bit recipes.

Nothing here knows of `jaxfp8`: the 8-bit recipes are written as they are in ordinary JAX code,
which widens an 8-bit weight and multiplies it by its scale before the product.

A linear layer is a dictionary: `kernel` [in, out], `bias` [out], and where the kernel is 8-bit
also its `scale` [1, out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LAYERS = 6
HEADS = 12
LAYER_NORM_EPS = 1e-12

Params = dict[str, Any]
Codes = list[jax.Array]
Apply = Callable[[Any, jax.Array], jax.Array]  # applies a layer to an input


def encode(
    params: Params, ids: jax.Array, mask: jax.Array, *, recipe: str
) -> tuple[jax.Array, Codes]:
    """Unit-length embeddings of a batch of sentences.

    Args:
      params: the weights, as `quantize.load_params` and `quantize.quantize` give them.
      ids: token ids, int32 [B, T].
      mask: true at tokens and false at padding, bool [B, T].
      recipe: a key of `DOTS`.

    Returns:
      The embeddings, float32 [B, 384]; and the 8-bit activations [B, T, in] of each linear layer
      in the order of use, so that a check can follow their rounding (none if they stay wide).
    """
    codes: Codes = []
    dot = functools.partial(DOTS[recipe], codes=codes)

    def linear(layer: Params, x: jax.Array) -> jax.Array:
        return dot(layer, x) + layer["bias"]

    return encoder(params, ids, mask, linear, layer_norm), codes


def encoder(params: Any, ids: jax.Array, mask: jax.Array, linear: Apply, norm: Apply) -> jax.Array:
    """The same with linear layers and norms that two functions apply, such as those of Flax."""
    x = embed(params["embeddings"], ids, norm)
    for layer in params["layers"]:
        x = norm(layer["attention_norm"], x + attention(layer, x, mask, linear))
        x = norm(layer["output_norm"], x + feed_forward(layer, x, linear))
    return pool(x, mask)


def embed(tables: Any, ids: jax.Array, norm: Apply) -> jax.Array:
    """Sum of the word, position and (first) type embeddings, normalised."""
    words, positions = tables["word"][ids], tables["position"][: ids.shape[1]]
    return norm(tables["norm"], words + positions + tables["type"][0])


def attention(layer: Any, x: jax.Array, mask: jax.Array, linear: Apply) -> jax.Array:
    """Multi-head attention over the tokens that `mask` lets through."""
    query, key, value = (heads(linear(layer[n], x)) for n in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return linear(layer["attention_output"], mixed.reshape(x.shape))


def heads(x: jax.Array) -> jax.Array:
    """[B, T, 384] as [B, T, heads, 32]."""
    return x.reshape(*x.shape[:2], HEADS, -1)


def feed_forward(layer: Any, x: jax.Array, linear: Apply) -> jax.Array:
    """Two linear layers round a GELU."""
    hidden = jax.nn.gelu(linear(layer["intermediate"], x), approximate=False)
    return linear(layer["output"], hidden)


def layer_norm(norm: Params, x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the last axis, then scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + LAYER_NORM_EPS) * norm["scale"] + norm["bias"]


def pool(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the tokens, at unit length."""
    weights = mask[:, :, None].astype(x.dtype)
    mean = (x * weights).sum(1) / weights.sum(1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def dot_f32(layer: Params, x: jax.Array, codes: Codes) -> jax.Array:
    """Weights and activations in float32."""
    return x @ layer["kernel"]


def dot_w8a16(layer: Params, x: jax.Array, codes: Codes) -> jax.Array:
    """FP8 weights, bfloat16 activations."""
    kernel = layer["kernel"].astype(jnp.bfloat16) * layer["scale"]
    return jnp.dot(x.astype(jnp.bfloat16), kernel, preferred_element_type=jnp.float32)


def dot_fp8_dynamic(layer: Params, x: jax.Array, codes: Codes) -> jax.Array:
    """FP8 weights, and FP8 activations with a scale for each token; both scale the sum."""
    scale = row_max(x) / 448
    x_q = jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn)
    codes.append(x_q)
    kernel = layer["kernel"].astype(jnp.bfloat16)
    total = jnp.dot(x_q.astype(jnp.bfloat16), kernel, preferred_element_type=jnp.float32)
    return total * scale * layer["scale"]


def dot_int8(layer: Params, x: jax.Array, codes: Codes) -> jax.Array:
    """int8 weights, and int8 activations with a scale for each token; the sum is exact."""
    scale = row_max(x) / 127
    x_q = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
    codes.append(x_q)
    total = jnp.dot(x_q, layer["kernel"], preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * scale * layer["scale"]


def row_max(x: jax.Array) -> jax.Array:
    """The largest absolute value of each row; not 0, for a scale divides by it."""
    return jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-12)


DOTS: dict[str, Callable[..., jax.Array]] = {
    "f32": dot_f32,
    "FP8_W8A16": dot_w8a16,
    "FP8_DYNAMIC": dot_fp8_dynamic,
    "INT8_DYNAMIC": dot_int8,
}
