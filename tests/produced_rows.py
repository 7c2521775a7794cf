"""Rows that a norm, or an activation and a factor, produce and that are quantized: in float64."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jaxfp8._call.reference.produce_reference import Norm, ProduceSpec, RowScale
from jaxfp8._value.dtypes import finite_range, is_float8

FLOOR = 1e-12
_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x * np.sqrt(0.5))),
}

# Norms by name; their vectors are `vectors`.
NORMS = {
    "rms": Norm(epsilon=1e-5),
    "rms, gain": Norm(epsilon=1e-5, has_gain=True),
    "rms, rounded, gain": Norm(epsilon=1e-5, has_gain=True, rounded_first=True),
    "layer": Norm(epsilon=1e-5, centred=True),
    "layer, gain and shift": Norm(epsilon=1e-5, centred=True, has_gain=True, has_shift=True),
    "layer, rounded, shift": Norm(epsilon=1e-5, centred=True, has_shift=True, rounded_second=True),
    "layer, rounded": Norm(
        epsilon=1e-5,
        centred=True,
        has_gain=True,
        has_shift=True,
        rounded_first=True,
        rounded_second=True,
    ),
}


def spec(dtype: str, norm: Norm | None = None, **others) -> ProduceSpec:
    """With the scale `maximum(amax, FLOOR) / highest`."""
    zeros = float(np.float32(FLOOR) * (np.float32(1) / np.float32(finite_range(dtype)[1])))
    scale = RowScale(amax_floor=FLOOR, of_zeros=zeros)
    return ProduceSpec(dtype=np.dtype(dtype), rule=scale, norm=norm, **others)


def matrix(rows: int, columns: int, dtype=jnp.bfloat16, seed: int = 0) -> np.ndarray:
    """Rows of different size with a mean."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) + rng.normal(size=(rows, 1))
    return (x * np.exp2(rng.integers(-6, 6, size=(rows, 1)))).astype(np.dtype(dtype))


def vectors(norm: Norm, columns: int, dtype) -> list[np.ndarray]:
    """Gain and shift, where the norm has them."""
    rng = np.random.default_rng(1)
    both = (1 + rng.normal(size=columns) / 4, rng.normal(size=columns))
    wanted = (norm.has_gain, norm.has_shift)
    return [v.astype(np.dtype(dtype)) for v, has in zip(both, wanted, strict=True) if has]


def expected(x: np.ndarray, others: list[np.ndarray], spec: ProduceSpec) -> np.ndarray:
    """The rows that are quantized, rounded where the program rounds."""
    narrow = x.dtype
    y = x.astype(np.float64)
    wide = [v.astype(np.float64) for v in others]
    if spec.norm is None:
        y = _ACTIVATIONS[spec.activation](y).astype(narrow).astype(np.float64)
        return (y * wide[0] if spec.has_factor else y).astype(narrow)
    norm = spec.norm
    y = y - y.mean(-1, keepdims=True) if norm.centred else y
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + norm.epsilon)
    y = y.astype(narrow).astype(np.float64) if norm.rounded_first else y
    y = y * wide.pop(0) if norm.has_gain else y
    y = y.astype(narrow).astype(np.float64) if norm.rounded_second else y
    return (y + wide.pop(0) if norm.has_shift else y).astype(narrow)


def assert_rows(codes, scale, y: np.ndarray, spec: ProduceSpec, *, most: float = 2e-3) -> None:
    """Codes and scales are those of `y`, but for roundings of float32 that go the other way.

    Args:
      codes, scale: what was found.
      y: the exact rows.
      spec: what was computed.
      most: the share of codes that may be a neighbour; 0 where no rounding comes before.
    """
    codes, scale, wide = np.asarray(codes), np.asarray(scale), y.astype(np.float32)
    highest = np.float32(finite_range(spec.dtype)[1])
    exact = np.maximum(np.abs(wide).max(-1, keepdims=True), np.float32(FLOOR)) / highest
    np.testing.assert_allclose(scale, exact, rtol=2**-7 if most else 2**-22)
    steps = np.clip(wide / scale, -highest, highest)
    steps = steps if is_float8(spec.dtype) else np.round(steps)
    wanted = steps.astype(spec.dtype)
    differs = codes.view(np.uint8) != wanted.view(np.uint8)
    assert differs.mean() <= most
    found, near = codes[differs].astype(np.float32), steps[differs]
    step = np.maximum(np.abs(near) * 2**-2, 2**-8) if is_float8(spec.dtype) else 1.0
    last = np.broadcast_to(float(jnp.finfo(y.dtype).smallest_subnormal) / scale, y.shape)[differs]
    assert np.all(np.abs(found - near) <= step + last)
