"""Keys and values of the tokens so far: in bfloat16, or in FP8 with a scale per token and head.

Codes are kept as bytes: XLA widens a float8 array that it updates in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jaxfp8
from llama.config import Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """Vectors of one kind, keys or values: [B, G, T, D], with leading axes of layers perhaps.

    Attributes:
      data: floats, or codes of float8_e4m3fn as uint8.
      scale: float32 [B, G, T] of codes, else None.
    """

    data: jax.Array
    scale: jax.Array | None

    def write(self, x: jax.Array, slots: jax.Array) -> Stored:
        """With vectors [B, S, G, D] in slots [B, S]."""
        rows, scale = jnp.arange(x.shape[0])[:, None], self.scale
        if scale is not None:
            q = jaxfp8.quantize(x, channelwise_axes=(0, 1, 2))
            scale = scale.at[rows, :, slots].set(q.scale[..., 0])
            x = jax.lax.bitcast_convert_type(q.qvalue, jnp.uint8)
        data = self.data.at[rows, :, slots].set(x.astype(self.data.dtype))
        return Stored(data, scale)

    def read(self, span: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """The first `span` vectors without their scales, [B, G, span, D], and these, [B, G, span].

        Written as any program would: `jaxfp8.rewrite` makes products of it that read the codes.
        """
        data = self.data[:, :, :span]
        if self.scale is None:
            return data.astype(dtype), jnp.ones((), dtype)
        codes = jax.lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
        return codes.astype(dtype), self.scale[:, :, :span]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of a layer, or of a stack of layers."""

    keys: Stored
    values: Stored


def empty(config: Config, batch: int, length: int, kind: str, *stack: int) -> Cache:
    """A cache for texts of `length` tokens.

    Args:
      config: sizes.
      batch, length: number of texts, and of tokens of each.
      kind: "bf16", "f32" or "fp8".
      *stack: leading axes.
    """
    shape = (*stack, batch, config.kv_heads, length, config.head)

    def stored() -> Stored:
        if kind == "fp8":
            return Stored(jnp.zeros(shape, jnp.uint8), jnp.zeros(shape[:-1], jnp.float32))
        return Stored(jnp.zeros(shape, jnp.bfloat16 if kind == "bf16" else jnp.float32), None)

    return Cache(stored(), stored())
