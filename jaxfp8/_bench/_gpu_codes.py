"""The cases of quantization on a GPU: alone, behind a norm or a gate, and in two layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _peaks
from jaxfp8._bench._case import Case
from jaxfp8._bench._measure import contender
from jaxfp8._bench._products import normal, quantize_rows
from jaxfp8._call.ops.produce_call import quantize_produced
from jaxfp8._call.ops.quantize_call import encode, quantize_p
from jaxfp8._call.reference.produce_reference import Norm, NormForm, ProduceSpec, RowScale
from jaxfp8._call.reference.quantize_reference import QuantizeSpec, quantized

Way = tuple[Callable[..., Any], tuple]  # a function and its operands
_E4M3 = np.dtype(jnp.float8_e4m3fn)
_WIDTH, _HIDDEN = 4096, 14336  # of Llama-3-8B
_GRAINS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {"channelwise_axes": (0,)},
    "1x128": {"channelwise_axes": (0,), "tiled_axes": {1: 128}},
    "128x128": {"tiled_axes": {0: 128, 1: 128}},
}


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Quantization by granularity, of rows with a scale each, and for training."""
    for grain in _GRAINS:
        yield f"quantize {grain}", functools.partial(by_grain, grain)
    for m in (8192, 2048):
        for name in _ROWS:
            yield f"rows {name} {m}", functools.partial(rows, name, m)
    for name in _TRAINING:
        yield f"encode {name} 8192", functools.partial(training, name, 8192)


def by_grain(grain: str, side: int = 8192) -> Case:
    """bfloat16 to FP8."""
    x = bf16(0, side, side)
    ours = functools.partial(jaxfp8.quantize, dtype=_E4M3, **_GRAINS[grain])
    plain = functools.partial(_quantize_by_xla, grain)
    return _case(f"quantize {grain} {side}^2", ours, plain, (x,), 3.0 * side * side)


def _quantize_by_xla(grain: str, x: jax.Array) -> Any:
    rows, columns = x.shape
    tile = {"tensor": x.shape, "channel": (1, columns), "1x128": (1, 128)}.get(grain, (128, 128))
    blocks = x.reshape(rows // tile[0], tile[0], columns // tile[1], tile[1]).astype(jnp.float32)
    scale = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True) / 448
    return jnp.clip(blocks / scale, -448, 448).astype(_E4M3).reshape(x.shape), scale


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm, rounded before the gain as in Llama."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain


def _layer_norm(x: jax.Array, gain: jax.Array, shift: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * inverse * gain + shift).astype(x.dtype)


def _gate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.silu(a) * b


# How rows are written, the number of rows and vectors that they are made of, and the call for it.
_RMS = Norm(epsilon=1e-5, has_gain=True, rounded_first=True)
_LAYER = Norm(epsilon=1e-5, centred=True, has_gain=True, has_shift=True)
_ROWS: dict[str, tuple[Callable[..., jax.Array], int, dict[str, Any]]] = {
    "codes": (lambda x: x, _WIDTH, {}),
    "rmsnorm": (rms_norm, _WIDTH, {"norm": _RMS}),
    "layernorm": (_layer_norm, _WIDTH, {"norm": _LAYER}),
    "silu gate": (_gate, _HIDDEN, {"activation": "silu", "has_factor": True}),
}
_SCALE = RowScale(amax_floor=1e-12, of_zeros=float(np.float32(1e-12) / np.float32(448)))


def rows(name: str, m: int) -> Case:
    """Rows and their FP8 codes with a scale for each, nothing else."""
    written, k, more = _ROWS[name]
    spec = ProduceSpec(dtype=_E4M3, rule=_SCALE, **more)
    count = 1 + spec.has_factor
    operands = *(bf16(i, m, k) for i in range(count)), *(_gain(i, k) for i in range(spec.vectors))
    ours = functools.partial(quantize_produced, spec=spec)
    theirs = lambda *xs: quantize_rows(written(*xs), _E4M3)  # noqa: E731
    return _case(f"{name}, FP8 codes {m} x {k}", ours, theirs, operands, (2.0 * count + 1) * m * k)


def _spec(scales: int = 1, **more: Any) -> ProduceSpec:
    bf16 = np.dtype(jnp.bfloat16)
    return ProduceSpec(dtype=_E4M3, row_dtype=bf16, scales=scales, transpose_from=1, **more)


def _normed(x: jax.Array, gain: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    spec = _spec(norm=NormForm(has_gain=True, rounded_first=True), scales=len(scales))
    return quantize_produced(x, inverse, gain, *scales, spec=spec)


def _encoded(y: jax.Array, *scales: jax.Array) -> list[Any]:
    """By one call for each scale, as `DelayedScaling` does it."""
    calls = [encode(y, _E4M3, scale.reshape(()), 1) for scale in scales]
    return [(call.codes, call.transposed, call.amax) for call in calls]


def _norm_case(count: int, m: int) -> tuple[Any, Any, tuple, float]:
    theirs = lambda x, gain, *scales: _encoded(rms_norm(x, gain), *scales)  # noqa: E731
    operands = bf16(0, m, _WIDTH), _gain(0, _WIDTH), *_scales(count)
    return _normed, theirs, operands, (2.0 + 2 * count) * m * _WIDTH


def _gate_case(m: int) -> tuple[Any, Any, tuple, float]:
    ours = functools.partial(quantize_produced, spec=_spec(activation="silu", has_factor=True))
    theirs = lambda a, b, scale: _encoded(_gate(a, b), scale)  # noqa: E731
    operands = bf16(0, m, _HIDDEN), bf16(1, m, _HIDDEN), *_scales(1)
    return ours, theirs, operands, 6.0 * m * _HIDDEN


def _weight_case(m: int) -> tuple[Any, Any, tuple, float]:
    """A master weight in float32; FP8 training rounds it to bfloat16 first."""
    ours = functools.partial(quantize_produced, spec=_spec())
    theirs = lambda w, scale: _encoded(w.astype(jnp.bfloat16), scale)  # noqa: E731
    return ours, theirs, (normal(0, m, _WIDTH), *_scales(1)), 6.0 * m * _WIDTH


def _blocks_case(m: int) -> tuple[Any, Any, tuple, float]:
    """By the tensor's own amaxes: blocks along rows, and along columns for the other product."""
    spec = QuantizeSpec(
        dtype=_E4M3,
        tiles=(1, 128),
        power_of_two=True,
        transpose_from=1,
        transposed_tiles=(128, 1),
    )
    ours = functools.partial(quantize_p.bind, spec=spec, split=False)
    theirs = functools.partial(quantized, spec=spec)
    return ours, theirs, (bf16(0, m, _WIDTH),), 4.0 * m * _WIDTH


_TRAINING: dict[str, Callable[[int], tuple[Any, Any, tuple, float]]] = {
    "rmsnorm x1": functools.partial(_norm_case, 1),
    "rmsnorm x3": functools.partial(_norm_case, 3),
    "silu gate": _gate_case,
    "float32 weight": _weight_case,
    "blocks": _blocks_case,
}


def training(name: str, m: int) -> Case:
    """Codes in both layouts: for given scales, with the operation in front, or of blocks."""
    return _case(f"{name}, FP8 codes in both layouts, M = {m}", *_TRAINING[name](m))


def _case(name: str, ours: Any, theirs: Any, operands: tuple, nbytes: float) -> Case:
    contenders = {
        "jaxfp8": contender("cuda", ours, *operands),
        "XLA": contender("cuda", theirs, *operands),
    }
    return Case(name=name, contenders=contenders, bytes=nbytes, peaks=_peaks.of_gpu())


def bf16(seed: int, *shape: int) -> jax.Array:
    """Standard normal numbers in bfloat16."""
    return normal(seed, *shape).astype(jnp.bfloat16)


def _gain(seed: int, size: int) -> jax.Array:
    return 1 + bf16(7 + seed, size) / 8


def _scales(count: int) -> list[jax.Array]:
    return [jnp.full((1, 1), 0.01 + i / 1000, jnp.float32) for i in range(count)]
