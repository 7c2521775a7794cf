"""The problems of the cases: operands, the usual expressions, and the result in float64.

Tests compute every contender's result of a case from these, so nothing wrong is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import QArray
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._ops.operands import as_sides
from jaxfp8._value.spec import EpilogueSpec, ScaledDotSpec

E4M3 = jnp.float8_e4m3fn
NT = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """`x @ w + bias`, dequantised.

    Attributes:
      x: array or `QArray` [M, K].
      w: array or `QArray` [K, N].
      bias: [N], or None.
    """

    x: Any
    w: Any
    bias: Any = None

    def with_zero_points(self, change: Callable[[jax.Array], jax.Array | None]) -> Problem:
        """The same codes in the same memory, with zero points from `change`."""
        x, w = (dataclasses.replace(q, zero_point=change(q.zero_point)) for q in (self.x, self.w))
        return dataclasses.replace(self, x=x, w=w)

    def exact(self) -> np.ndarray:
        """The result in float64."""
        total = float64(self.x) @ float64(self.w)
        return total if self.bias is None else total + np.asarray(self.bias, np.float64)


def float64(q: jax.Array | QArray) -> np.ndarray:
    """The numbers behind the codes."""
    if not isinstance(q, QArray):
        return np.asarray(q, np.float64)
    values = np.asarray(q.qvalue, np.float64)
    if q.zero_point is not None:
        values = values - _spread(q.zero_point, values.shape)
    return values * _spread(q.scale, values.shape)


def _spread(shared: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """A value per tile as one per element; the last tile of an axis may be cut short."""
    values = np.asarray(shared, np.float64)
    for axis, size in enumerate(shape if values.ndim else ()):
        counts = {size: 1, 1: size}
        tile = counts.get(values.shape[axis], BLOCK)
        values = np.repeat(values, tile, axis=axis).take(range(size), axis=axis)
    return values


BLOCK = 128
_GRAINS: dict[str, dict[str, Any]] = {
    "channel": {"channelwise_axes": (1,)},
    "block": {"tiled_axes": {0: BLOCK, 1: BLOCK}},
}


def weight_only(
    m: int, n: int, k: int, dtype: Any = E4M3, x_dtype: Any = jnp.bfloat16, grain: str = "channel"
) -> Problem:
    """Float activations and an 8-bit weight."""
    w = jaxfp8.quantize(normal(1, k, n) / np.sqrt(k), dtype, **_GRAINS[grain])
    return Problem(x=normal(0, m, k).astype(x_dtype), w=w)


def integers(m: int, n: int, k: int, zero_points: bool = False) -> Problem:
    """int8 on both sides, a scale for x and one per channel of w, and a bias.

    Zero points have the dtype of the codes, as from `jaxfp8.quantize`.
    """
    rng = np.random.default_rng(0)

    def codes(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-127, 128, shape, dtype=np.int8))

    x_zero = jnp.full((1, 1), 3, jnp.int8) if zero_points else None
    w_zero = jnp.asarray(rng.integers(-9, 10, (1, n)), jnp.int8) if zero_points else None
    x = QArray(codes(m, k), jnp.full((1, 1), 0.01), x_zero)
    w = QArray(codes(k, n), jnp.asarray(rng.uniform(0.001, 0.01, (1, n)), jnp.float32), w_zero)
    return Problem(x=x, w=w, bias=normal(2, n))


def affine_weight(m: int, n: int, k: int) -> Problem:
    """float32 activations and a uint8 weight with a zero point per channel."""
    rng = np.random.default_rng(0)
    zero = jnp.asarray(rng.integers(96, 161, (1, n)), jnp.uint8)
    scale = jnp.asarray(rng.uniform(1e-4, 1e-3, (1, n)), jnp.float32)
    codes = jnp.asarray(rng.integers(0, 256, (k, n), dtype=np.uint8))
    return Problem(x=normal(1, m, k), w=QArray(codes, scale, zero))


def normal(seed: int, *shape: int) -> jax.Array:
    """Standard normal numbers in float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


# The usual expressions.


def multiply(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """A weight [K, N], widened and scaled before the product."""
    return x @ (q.astype(x.dtype) * scale.astype(x.dtype))


def multiply_nk(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """The same for a weight that is kept as [N, K]."""
    return jax.lax.dot_general(x, q.astype(x.dtype) * scale.astype(x.dtype), NT)


def multiply_blocks(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """A weight [K, N] with a scale per block."""
    rows = jnp.repeat(scale, BLOCK, 0)[: q.shape[0]]
    wide = jnp.repeat(rows, BLOCK, 1)[:, : q.shape[1]]
    return x @ (q.astype(x.dtype) * wide.astype(x.dtype))


def multiply_affine_weight(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array
) -> jax.Array:
    """A weight [K, N] with zero points, widened before the product."""
    return x @ _wide(QArray(q, scale, zero))


def multiply_affine_weight_nk(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array
) -> jax.Array:
    """The same for a weight that is kept as [N, K]."""
    return jax.lax.dot_general(x, _wide(QArray(q, scale, zero)), NT)


def multiply_blocks_nk(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """A weight [N, K] with a scale per block."""
    return multiply_blocks(x, q.T, scale.T)


def multiply_integers(
    x: jax.Array, q: jax.Array, x_scale: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """int8 on both sides, scaled after the sum."""
    total = jax.lax.dot(x, q, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * (x_scale * scale) + bias


def multiply_integers_nk(
    x: jax.Array, q: jax.Array, x_scale: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """The same for a weight that is kept as [N, K]."""
    return multiply_integers(x, q.T, x_scale, scale.T, bias)


def multiply_affine(x: QArray, w: QArray, bias: jax.Array) -> jax.Array:
    """int8 on both sides, with or without zero points, dequantised to float32."""
    return _wide(x) @ _wide(w) + bias


def _wide(q: QArray) -> jax.Array:
    values = q.qvalue.astype(jnp.float32)
    return (values if q.zero_point is None else values - q.zero_point) * q.scale


def quantize_rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Codes [M, K] and scales [M, 1] of activations, a scale for each token."""
    x = x.astype(jnp.float32)
    top = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-12) / top
    steps = jnp.round(x / scale) if dtype == jnp.int8 else x / scale
    return jnp.clip(steps, -top, top).astype(dtype), scale


def multiply_quantized(
    x: jax.Array, x_scale: jax.Array, q: jax.Array, scale: jax.Array
) -> jax.Array:
    """8 bits on both sides, a scale for each row and column after the sum; bfloat16."""
    return (total(x, q) * x_scale * scale).astype(jnp.bfloat16)


def on_kernel(kernel: str, x: Any, w: QArray, axis: int = 0) -> jax.Array:
    """The product with a weight by a kernel of that name; `axis` of the weight is summed over."""
    left, right = as_sides("python -m jaxfp8 bench", x, w)
    spec = ScaledDotSpec(
        lhs=left.spec((1,), ()),
        rhs=right.spec((axis,), ()),
        epilogue=EpilogueSpec(out_dtype="bfloat16"),
    )
    operands: dict[str, Any] = {**left.operands("lhs"), **right.operands("rhs")}
    return scaled_dot(spec, **operands, kernel=kernel)[0]


def total(x: jax.Array, q: jax.Array) -> jax.Array:
    """The product of codes in float32: exact sums for int8, products of bfloat16 for FP8."""
    if q.dtype == jnp.int8:
        sums = jnp.dot(x, q, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32)
    wide = (x.astype(jnp.bfloat16), q.astype(jnp.bfloat16))
    return jnp.dot(*wide, preferred_element_type=jnp.float32)


def multiply_dynamic(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """`multiply_quantized` on activations that it quantises per token."""
    return multiply_quantized(*quantize_rows(x, q.dtype), q, scale)
