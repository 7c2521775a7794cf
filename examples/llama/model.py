"""The decoder in nnx. Modules are called what Hugging Face calls them, so that tensors find them.

The layers are Flax's. `jaxfp8.nnx.load` makes 8-bit ones of those whose tensors are in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llama.attention import attend, heads, rms_norm, route
from llama.cache import Cache
from llama.config import Config


class Norm(nnx.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, rngs=rngs)

        self.config = config
        size, bias = config.head, config.qkv_bias
        self.q_proj = linear(config.width, config.heads * size, bias)
        self.k_proj = linear(config.width, config.kv_heads * size, bias)
        self.v_proj = linear(config.width, config.kv_heads * size, bias)
        self.o_proj = linear(config.heads * size, config.width, config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(size, config.eps), Norm(size, config.eps)

    def __call__(
        self, x: jax.Array, cache: Cache, positions: jax.Array, span: int
    ) -> tuple[jax.Array, Cache]:
        config = self.config
        query, key = heads(self.q_proj(x), config.head), heads(self.k_proj(x), config.head)
        value = heads(self.v_proj(x), config.head)
        if config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed, cache = attend(config, query, key, value, cache, positions, span)
        return self.o_proj(mixed), cache


class SwiGLU(nnx.Module):
    """The feed-forward network."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.gate_proj = linear(config.width, config.hidden)
        self.up_proj = linear(config.width, config.hidden)
        self.down_proj = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """Feed-forward networks of which each token sees a few.

    All experts are computed for all tokens, and most weighed with 0: right, and simple. At decode
    a batch that uses most experts reads all of their weights anyway.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        def einsum(equation: str, inputs: int, outputs: int) -> nnx.Einsum:
            shape = (config.experts, inputs, outputs)
            return nnx.Einsum(equation, shape, dtype=dtype, rngs=rngs)

        self.config = config
        self.gate = nnx.Linear(config.width, config.experts, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate_proj = einsum("bsd,edf->bsef", config.width, config.hidden)
        self.up_proj = einsum("bsd,edf->bsef", config.width, config.hidden)
        self.down_proj = einsum("bsef,efd->bsed", config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = route(self.config, self.gate(x)).astype(x.dtype)
        y = self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))
        return jnp.einsum("bse,bsed->bsd", weights, y)


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        self.input_layernorm = Norm(config.width, config.eps)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = Norm(config.width, config.eps)
        self.mlp = (Experts if config.experts else SwiGLU)(config, dtype, rngs)

    def __call__(
        self, x: jax.Array, cache: Cache, positions: jax.Array, span: int
    ) -> tuple[jax.Array, Cache]:
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, positions, span)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Trunk(nnx.Module):
    """The table of tokens and the layers."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.layers)])
        self.norm = Norm(config.width, config.eps)


class Decoder(nnx.Module):
    """Logits of the next token after new tokens of texts.

    Args:
      config: sizes.
      dtype: of what flows between layers.
      rngs: for random weights; a model to load is made under `nnx.eval_shape`.
    """

    def __init__(self, config: Config, dtype: Any = jnp.bfloat16, *, rngs: nnx.Rngs) -> None:
        self.config, self.dtype = config, dtype
        self.model = Trunk(config, dtype, rngs)
        if not config.tied:
            # A table, as that of tokens: in floats too, it is then multiplied by as it lies.
            self.lm_head = nnx.Embed(config.vocabulary, config.width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array,
        caches: Sequence[Cache],
        last: jax.Array,
        *,
        span: int,
    ) -> tuple[jax.Array, list[Cache]]:
        """Runs new tokens through the decoder.

        Args:
          ids, positions: of the new tokens and in their texts, int32 [B, S].
          caches: of the layers.
          last: of which new token the logits are wanted, [B].
          span: how many slots of the caches may be taken.

        Returns:
          Logits float32 [B, vocabulary], and the caches.
        """
        x, written = self.model.embed_tokens(ids), []
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x, cache = layer(x, cache, positions, span)
            written.append(cache)
        x = self.model.norm(jnp.take_along_axis(x, last[:, None, None], 1)[:, 0])
        head = self.model.embed_tokens if self.config.tied else self.lm_head
        return head.attend(x).astype(jnp.float32), written
