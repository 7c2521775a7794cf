"""Random programs out of the operations that stand around dots on 8-bit data.

A program is a list of steps drawn from a generator. Steps that do not fit the array at hand are
skipped, so every draw is a valid program; some are captured, some are not, all must stay right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rewrite.support import E4M3, E5M2, F32

Draw = np.random.Generator
Step = Callable[[Draw, Any], Any]


def _scale(draw: Draw, w: Any) -> Any:
    """A positive array that broadcasts to `w` and varies along some of its axes."""
    shape = tuple(size if draw.random() < 0.5 else 1 for size in w.shape)
    return jnp.asarray(draw.uniform(0.5, 2.0, size=shape), w.dtype)


def multiply(draw: Draw, w: Any) -> Any:
    scale = _scale(draw, w)
    return w * scale if draw.random() < 0.5 else scale * w


def divide(draw: Draw, w: Any) -> Any:
    return w / _scale(draw, w)


def literal(draw: Draw, w: Any) -> Any:
    return w * float(draw.choice([0.5, -2.0, 0.37]))


def product_of_scales(draw: Draw, w: Any) -> Any:
    return w * (_scale(draw, w) * _scale(draw, w))


def transpose(draw: Draw, w: Any) -> Any:
    return jnp.transpose(w, draw.permutation(w.ndim))


def split_axis(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    if w.shape[axis] % 2 or w.ndim > 3:
        return w
    return w.reshape(*w.shape[:axis], 2, w.shape[axis] // 2, *w.shape[axis + 1 :])


def merge_axes(draw: Draw, w: Any) -> Any:
    if w.ndim < 3:
        return w
    axis = int(draw.integers(w.ndim - 1))
    return w.reshape(*w.shape[:axis], -1, *w.shape[axis + 2 :])


def blocks(draw: Draw, w: Any) -> Any:
    tiles = [int(draw.choice([1, 2, 4, size])) for size in w.shape]
    counts = [-(-size // tile) for size, tile in zip(w.shape, tiles, strict=True)]
    scale = jnp.asarray(draw.uniform(0.5, 2.0, size=counts), w.dtype)
    for axis, tile in enumerate(tiles):
        scale = jnp.repeat(scale, tile, axis)
    return w * scale[tuple(slice(size) for size in w.shape)]


def cut(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    start = int(draw.integers(max(w.shape[axis] // 2, 1)))
    return lax.slice_in_dim(w, start, w.shape[axis], axis=axis)


def cut_dynamically(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    size = max(w.shape[axis] - 2, 1)
    return lax.dynamic_slice_in_dim(w, jnp.asarray(int(draw.integers(4))), size, axis)


def reverse(draw: Draw, w: Any) -> Any:
    return jnp.flip(w, int(draw.integers(w.ndim)))


def pad(draw: Draw, w: Any) -> Any:
    width = [(int(draw.integers(2)), int(draw.integers(3))) for _ in w.shape]
    return jnp.pad(w, width, constant_values=float(draw.choice([0.0, 0.0, 1.0])))


def mask(draw: Draw, w: Any) -> Any:
    keep = jnp.asarray(draw.random(w.shape) < 0.7)
    return jnp.where(keep, w, float(draw.choice([0.0, 0.0, 0.5])))


def choose(draw: Draw, w: Any) -> Any:
    shape = tuple(size if draw.random() < 0.3 else 1 for size in w.shape)
    return jnp.where(jnp.asarray(draw.random(shape) < 0.5), w, multiply(draw, w))


def take(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    return jnp.take(w, jnp.asarray(draw.integers(w.shape[axis], size=2)), axis=axis)


def stretched_scale(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    scale, size = jnp.asarray(draw.uniform(0.5, 2.0, size=w.shape[axis]), w.dtype), w.shape[axis]
    return w * jnp.expand_dims(
        scale[jnp.arange(size) // int(draw.choice([1, 2, 3]))],
        [a for a in range(w.ndim) if a != axis],
    )


def pick(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    rows = jnp.asarray(draw.integers(w.shape[axis], size=3))
    return jnp.take(w, rows, axis=axis, mode="clip")


def join(draw: Draw, w: Any) -> Any:
    axis = int(draw.integers(w.ndim))
    other = w * 0.5 if draw.random() < 0.5 else multiply(draw, w)
    return jnp.concatenate([w, other], axis)


def add_axis(draw: Draw, w: Any) -> Any:
    return jnp.expand_dims(w, int(draw.integers(w.ndim + 1))) if w.ndim < 4 else w


def drop_axes(draw: Draw, w: Any) -> Any:
    return jnp.squeeze(w) if max(w.shape) > 1 and w.ndim - w.shape.count(1) >= 2 else w


def shift(draw: Draw, w: Any) -> Any:
    return w - float(draw.integers(-3, 4)) if draw.random() < 0.3 else w


def negate(draw: Draw, w: Any) -> Any:
    return -w


def stretch(draw: Draw, w: Any) -> Any:
    return jnp.broadcast_to(w, (2, *w.shape)) if w.ndim < 3 else w


def behind_jit(draw: Draw, w: Any) -> Any:
    return jax.jit(lambda v: v * 2.0)(w)


SHAPING: list[Step] = [
    multiply, divide, literal, product_of_scales, transpose, split_axis, merge_axes, blocks, cut,
    cut_dynamically, reverse, pad, mask, pick, join, add_axis, drop_axes, shift, negate, stretch,
    behind_jit, choose, take, stretched_scale,
]  # fmt: skip


def bias(draw: Draw, y: Any) -> Any:
    shape = tuple(size if draw.random() < 0.5 else 1 for size in y.shape)
    return y + jnp.asarray(draw.normal(size=shape), y.dtype)


def residual(draw: Draw, y: Any) -> Any:
    other = jnp.asarray(draw.normal(size=y.shape), y.dtype)
    return y - other if draw.random() < 0.5 else other - y


def relu(draw: Draw, y: Any) -> Any:
    return jax.nn.relu(y)


def gelu(draw: Draw, y: Any) -> Any:
    return jax.nn.gelu(y, approximate=bool(draw.random() < 0.5))


def silu(draw: Draw, y: Any) -> Any:
    return jax.nn.silu(y)


def tanh(draw: Draw, y: Any) -> Any:
    return jnp.tanh(y)


def square(draw: Draw, y: Any) -> Any:
    return y * y


AFTER: list[Step] = [
    multiply, divide, literal, bias, bias, residual, relu, gelu, silu, tanh, square, transpose,
    split_axis, merge_axes, add_axis, negate, behind_jit, product_of_scales,
]  # fmt: skip


def _data(draw: Draw) -> Any:
    shape = tuple(int(draw.choice([1, 3, 4, 8, 12])) for _ in range(int(draw.integers(2, 4))))
    kind = draw.choice(4)
    if kind < 2:
        return jnp.asarray(draw.normal(size=shape), F32).astype((E4M3, E5M2)[kind])
    dtype = (jnp.int8, jnp.uint8)[kind - 2]
    return jnp.asarray(draw.integers(0, 100, size=shape), dtype)


def _dot(draw: Draw, w: Any, other: Any | None) -> Any:
    """A dot_general of `w` over random axes, on either side, with a float array or `other`."""
    axes = [int(a) for a in draw.permutation(w.ndim)]
    n = int(draw.integers(1, w.ndim + 1))
    contracting = axes[:n]
    batch = [a for a in axes[n:] if draw.random() < 0.3]
    if other is None:
        sizes = [w.shape[a] for a in batch + contracting] + [int(draw.choice([1, 5]))]
        x = jnp.asarray(draw.normal(size=sizes), F32)
        own = (list(range(len(batch), len(batch) + n)), list(range(len(batch))))
    else:
        x, batch, contracting, own = _match(w, other)
    if draw.random() < 0.5:
        numbers = ((own[0], contracting), (own[1], batch))
        return lax.dot_general(x, w, numbers)
    return lax.dot_general(w, x, ((contracting, own[0]), (batch, own[1])))


def _match(w: Any, other: Any) -> tuple[Any, list[int], list[int], tuple[list[int], list[int]]]:
    """Two 8-bit operands: one axis cut to a common size is contracted."""
    size = min(w.shape[0], other.shape[0])
    if w.shape[0] != size:
        other = jnp.pad(other, [(0, w.shape[0] - size)] + [(0, 0)] * (other.ndim - 1))
    return other[: w.shape[0]], [], [0], ([0], [])


def make(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program and its arguments; the program draws the same steps whenever it is traced."""
    first = np.random.default_rng(seed)
    qs = (_data(first), _data(first))

    def dequantized(draw: Draw, q: Any) -> Any:
        w = q.astype(F32)
        for _ in range(int(draw.integers(5))):
            w = SHAPING[int(draw.integers(len(SHAPING)))](draw, w)
        return w

    def fun(a: Any, b: Any) -> Any:
        draw = np.random.default_rng(seed + 1)
        w = dequantized(draw, a)
        other = dequantized(draw, b) if draw.random() < 0.3 else None
        outs = [_dot(draw, w, other)]
        for _ in range(int(draw.integers(6))):
            outs.append(AFTER[int(draw.integers(len(AFTER)))](draw, outs[-1]))
        extra = outs[int(draw.integers(len(outs)))] if draw.random() < 0.3 else None
        peak = jnp.max(jnp.abs(outs[-1])) if draw.random() < 0.3 else None
        return outs[-1], extra, peak

    return fun, qs
