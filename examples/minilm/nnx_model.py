"""The same encoder as a model of Flax nnx, which `jaxfp8.nnx.quantize` makes 8-bit in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minilm import model
from minilm.model import Params
from minilm.quantise import LINEAR


class Layer(nnx.Module):
    """A transformer layer of post-norm attention and feed-forward."""

    query: nnx.Linear
    key: nnx.Linear
    value: nnx.Linear
    attention_output: nnx.Linear
    intermediate: nnx.Linear
    output: nnx.Linear

    def __init__(self, params: Params) -> None:
        self.attention_norm = _norm(params["attention_norm"])
        self.output_norm = _norm(params["output_norm"])
        for name in LINEAR:
            setattr(self, name, _linear(params[name]))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """[B, T, 384] to the same, of the tokens that `mask` lets through."""
        x = self.attention_norm(x + self.attention(x, mask))
        hidden = nnx.gelu(self.intermediate(x), approximate=False)
        return self.output_norm(x + self.output(hidden))

    def attention(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Multi-head attention."""
        query, key, value = (model.heads(f(x)) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
        scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return self.attention_output(mixed.reshape(x.shape))


class Encoder(nnx.Module):
    """Unit-length embeddings of a batch of sentences."""

    def __init__(self, params: Params) -> None:
        tables = params["embeddings"]
        self.words = _embed(tables["word"])
        self.positions = _embed(tables["position"])
        self.type = nnx.Param(tables["type"][0])
        self.norm = _norm(tables["norm"])
        self.layers = nnx.List([Layer(layer) for layer in params["layers"]])

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Token ids [B, T] and which of them are no padding; float32 [B, 384]."""
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1])) + self.type[...]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        return model.pool(x, mask)


def _linear(params: Params) -> nnx.Linear:
    zeros, rngs = nnx.initializers.zeros_init(), nnx.Rngs(0)
    layer: Any = nnx.Linear(*params["kernel"].shape, kernel_init=zeros, rngs=rngs)
    layer.kernel[...], layer.bias[...] = params["kernel"], params["bias"]
    return layer


def _embed(table: jax.Array) -> nnx.Embed:
    zeros = nnx.initializers.zeros_init()
    layer: Any = nnx.Embed(*table.shape, embedding_init=zeros, rngs=nnx.Rngs(0))
    layer.embedding[...] = table
    return layer


def _norm(params: Params) -> nnx.LayerNorm:
    size = params["scale"].size
    norm: Any = nnx.LayerNorm(size, epsilon=model.LAYER_NORM_EPS, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = params["scale"], params["bias"]
    return norm
