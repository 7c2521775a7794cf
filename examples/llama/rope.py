"""Rotary positions, stretched for long contexts as Llama 3 and YaRN do it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from llama.config import Rope


def frequencies(rope: Rope, head: int) -> tuple[np.ndarray, float]:
    """Radians per token of each pair, float64 [head / 2], and a factor of rotated vectors."""
    plain = rope.theta ** (-np.arange(0, head, 2) / head)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        scale = 0.1 * math.log(rope.factor) + 1 if rope.attention is None else rope.attention
        return _yarn(rope, plain, head), scale
    return plain, 1.0


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Slow pairs are stretched, fast ones are not, and between them there is a ramp."""
    turns = rope.original * plain / (2 * np.pi)
    kept = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, plain: np.ndarray, head: int) -> np.ndarray:
    """The same, with the ramp along the pairs instead of along their turns."""

    def pair(turns: float) -> float:
        return head * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = max(math.floor(pair(rope.high)), 0), min(math.ceil(pair(rope.low)), head - 1)
    ramp = np.clip((np.arange(head // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (ramp / rope.factor + 1 - ramp)


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Heads [B, S, H, D] turned by their positions [B, S]; the halves of D are the pairs."""
    turns, scale = frequencies(rope, x.shape[-1])
    angle = positions[..., None, None].astype(jnp.float32) * jnp.asarray(turns, jnp.float32)
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
