"""The model: pre-norm transformer blocks under a scan, each rematerialised, tied embeddings.

Only `dense` and `embed` know how products are computed. For training `dense` makes Flax's own
layers, with or without FP8; for serving it makes layers of `jaxfp8.linen` with 8-bit weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from gpt.text import VOCABULARY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model.

    Attributes:
      layers, width, heads: of the transformer.
      length: longest text it sees.
      vocabulary: number of tokens.
      dense: makes a dense layer from its number of features and its name.
      embed: makes the table of tokens from its sizes and its name.
      attention: `implementation` of `jax.nn.dot_product_attention` for whole texts.
      dtype: dtype of what flows between the layers.
      remat: whether blocks are recomputed in the backward pass.
      policy: what is saved nevertheless, as `jax.checkpoint` takes it.
      place: says where on a mesh what flows between the layers lies.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    vocabulary: int = VOCABULARY
    dense: Callable[..., nn.Module] = nn.Dense
    embed: Callable[..., nn.Module] = nn.Embed
    attention: Literal["xla", "cudnn"] = "xla"
    dtype: Any = jnp.bfloat16
    remat: bool = True
    policy: Callable[..., Any] | None = None
    place: Callable[[jax.Array], jax.Array] = lambda x: x


SIZES = {
    "small": Config(),
    "124m": Config(layers=12, width=768, heads=12, length=1024, vocabulary=50304),
}


class Attention(nn.Module):
    """Causal self-attention; with `decode`, one token at a time with a cache."""

    config: Config
    decode: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, width] to the same."""
        config, (batch, length, width) = self.config, x.shape
        qkv = config.dense(3 * width, name="qkv")(x)
        query, key, value = jnp.split(qkv.reshape(batch, length, 3 * config.heads, -1), 3, 2)
        mask = None
        if self.decode:
            key, value, mask = self._cached(key, value)
        mixed = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=not self.decode,
            implementation="xla" if self.decode else config.attention,
        )
        return config.dense(width, name="out")(mixed.reshape(x.shape))

    def _cached(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        """Keys and values of all tokens so far, and which of the places are taken."""
        shape = (key.shape[0], self.config.length, *key.shape[2:])
        keys = self.variable("cache", "keys", jnp.zeros, shape, key.dtype)
        values = self.variable("cache", "values", jnp.zeros, shape, key.dtype)
        place = self.variable("cache", "place", jnp.zeros, (), jnp.int32)
        at = place.value
        keys.value = jax.lax.dynamic_update_slice(keys.value, key, (0, at, 0, 0))
        values.value = jax.lax.dynamic_update_slice(values.value, value, (0, at, 0, 0))
        place.value = at + key.shape[1]
        here = at + jnp.arange(key.shape[1])
        seen = jnp.arange(shape[1]) <= here[:, None]
        return keys.value, values.value, seen[None, None]


class Block(nn.Module):
    """Attention and a feed-forward network of four times the width."""

    config: Config
    decode: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """[B, T, width] to the same, as a scan has it."""
        config = self.config
        norm = lambda name: nn.LayerNorm(dtype=config.dtype, name=name)  # noqa: E731
        x = x + Attention(config, self.decode, name="attention")(norm("norm1")(x))
        hidden = config.dense(4 * config.width, name="up")(norm("norm2")(x))
        return config.place(x + config.dense(config.width, name="down")(nn.gelu(hidden))), None


class GPT(nn.Module):
    """Logits of the next token after every token of a text."""

    config: Config
    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """Tokens int [B, T], the first of them at place `start`; float32 [B, T, vocabulary]."""
        config = self.config
        table = config.embed(config.vocabulary, config.width, name="tokens")
        initial = nn.initializers.normal(0.02)
        places = self.param("places", initial, (config.length, config.width))
        here = jax.lax.dynamic_slice_in_dim(places, start, tokens.shape[1])
        x = config.place(table(tokens).astype(config.dtype) + here.astype(config.dtype))
        remat = functools.partial(nn.remat, prevent_cse=False, policy=config.policy)
        block = remat(Block) if config.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0, "_overwrite_with_gradient": 0, "cache": 0},
            split_rngs={"params": True},
            length=config.layers,
        )
        x, _ = layers(config, self.decode, name="layers")(x, None)
        x = nn.LayerNorm(dtype=config.dtype, name="norm")(x)
        return table.attend(x).astype(jnp.float32)
