"""The decoder in nnx. Modules are called what Hugging Face calls them, so that tensors find them.

The layers are Flax's. `jaxfp8.nnx.load` makes 8-bit ones of those whose tensors are in 8 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfp8.nnx
from llama import decoder
from llama.attention import rms_norm
from llama.cache import Cache
from llama.config import Config, Latent


class Norm(nnx.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Layer(nnx.Module):
    """The weights of a layer under their names; `llama.decoder.layer` says what it computes."""

    def __init__(self, config: Config, number: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, rngs=rngs)

        self.config = config
        width, hidden, size, bias = config.width, config.hidden, config.head, config.qkv_bias
        self.input_layernorm = Norm(width, config.eps)
        self.self_attn = nnx.Dict(
            _latent(config, config.latent, linear)
            if config.latent is not None
            else {
                "q_proj": linear(width, config.heads * size, bias),
                "k_proj": linear(width, config.kv_heads * size, bias),
                "v_proj": linear(width, config.kv_heads * size, bias),
                "o_proj": linear(config.heads * size, width, config.out_bias),
            }
        )
        if config.qk_norm:
            self.self_attn["q_norm"] = Norm(size, config.eps)
            self.self_attn["k_norm"] = Norm(size, config.eps)
        self.post_attention_layernorm = Norm(width, config.eps)
        mixture = config.experts(number)
        self.mlp: nnx.Module
        if mixture is not None:
            settings = {**mixture.settings, "dtype": dtype, "rngs": rngs}
            self.mlp = jaxfp8.nnx.MoE(width, mixture.hidden, **settings)
        else:
            self.mlp = nnx.Dict(
                gate_proj=linear(width, hidden),
                up_proj=linear(width, hidden),
                down_proj=linear(hidden, width),
            )

    def __call__(
        self, x: jax.Array, cache: Cache, positions: jax.Array, span: int
    ) -> tuple[jax.Array, Cache]:
        def apply(name: str, x: jax.Array) -> jax.Array:
            return operator.attrgetter(name)(self)(x)

        experts = self.mlp if isinstance(self.mlp, jaxfp8.nnx.MoE) else None
        return decoder.layer(self.config, x, apply, apply, experts, cache, positions, span)


def _latent(config: Config, latent: Latent, linear: Callable[..., Any]) -> dict[str, Any]:
    """The layers of DeepSeek-V3's attention."""
    width, queries = config.width, config.heads * config.head
    made = {
        "kv_a_proj_with_mqa": linear(width, latent.kv_rank + latent.rotated),
        "kv_a_layernorm": Norm(latent.kv_rank, config.eps),
        "kv_b_proj": linear(latent.kv_rank, config.heads * (latent.plain + latent.value)),
        "o_proj": linear(config.heads * latent.value, width),
    }
    if latent.q_rank is None:
        return made | {"q_proj": linear(width, queries)}
    return made | {
        "q_a_proj": linear(width, latent.q_rank),
        "q_a_layernorm": Norm(latent.q_rank, config.eps),
        "q_b_proj": linear(latent.q_rank, queries),
    }


class Trunk(nnx.Module):
    """The table of tokens and the layers."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, dtype, rngs) for i in range(config.layers)])
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
