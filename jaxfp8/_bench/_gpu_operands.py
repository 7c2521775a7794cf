"""Operands of the cases for an NVIDIA GPU, and products shared by several cases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench._problems import E4M3, NT

# More than the L2 cache of any device, so rotated operands are read from memory.
_BEYOND_CACHES = 256 << 20


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def copies(bytes_each: float, least: int = 2) -> int:
    """The number of operand sets to rotate through."""
    return int(min(24, max(least, _BEYOND_CACHES // max(bytes_each, 1))))


def weights(n: int, k: int, count: int, dtype: Any = E4M3) -> list[jaxfp8.QArray]:
    """[N, K], a scale per output channel."""
    return [
        jaxfp8.quantize(normal(i, n, k) / np.sqrt(k), dtype, channelwise_axes=(0,))
        for i in range(count)
    ]


def transposed(w: jaxfp8.QArray) -> jaxfp8.QArray:
    """A matrix in the other layout: [K, N], of [N, K]."""
    return jaxfp8.QArray(jnp.asarray(w.qvalue.T), jnp.asarray(w.scale.T))


def ours(x: Any, w: jaxfp8.QArray, **more: Any) -> Any:
    """The product with a weight [N, K]."""
    more = {"preferred_element_type": jnp.bfloat16, **more}
    return jaxfp8.dot_general(x, w, NT, **more)


def in_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of 16 bits, by XLA."""
    return jax.lax.dot_general(x, w, NT, preferred_element_type=jnp.bfloat16)


def dequantised(w: jaxfp8.QArray) -> jax.Array:
    """A weight in 16 bits."""
    return jaxfp8.dequantize(w, jnp.bfloat16)
