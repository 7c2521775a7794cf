"""The cases of layers on a GPU: outputs in FP8, a norm before a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench._case import Case
from jaxfp8._bench._gpu_codes import bf16, rms_norm
from jaxfp8._bench._measure import contender
from jaxfp8._bench._products import normal, quantize_rows

_E4M3 = jnp.float8_e4m3fn
_NT = (((1,), (1,)), ((), ()))
_TOKENS, _WIDTH, _HIDDEN = 8192, 4096, 14336  # of Llama-3-8B


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """An output, two layers in a row, and a norm in front of one."""
    yield "output", output
    yield "chain", chain
    for m in (1, 16, 64, 512, 2048, 8192):
        yield f"norm layer {m}", functools.partial(norm_layer, m)


def _ours(x: Any, w: Any, **more: Any) -> Any:
    return jaxfp8.dot_general(x, w, _NT, **{"preferred_element_type": jnp.bfloat16, **more})


def _in_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, _NT, preferred_element_type=jnp.bfloat16)


def _dequantized(*held: jaxfp8.QArray) -> tuple[jax.Array, ...]:
    return tuple(jaxfp8.dequantize(q, jnp.bfloat16) for q in held)


def output(side: int = 8192) -> Case:
    """An FP8 output from the call, against a bfloat16 one and a cast."""
    x, w = (jaxfp8.quantize(bf16(seed, side, side), _E4M3) for seed in (1, 2))
    scale = jnp.float32(2.0)

    def fused(x: Any, w: Any) -> Any:
        return _ours(x, w, preferred_element_type=_E4M3, out_scale=scale)

    def cast(x: Any, w: Any) -> Any:
        return jnp.clip(_ours(x, w).astype(jnp.float32) / scale, -448, 448).astype(_E4M3)

    contenders = {
        "jaxfp8, FP8 output": contender("cuda", fused, x, w),
        "jaxfp8, bf16 and a cast": contender("cuda", cast, x, w),
    }
    return Case(name=f"FP8 output {side}^3", contenders=contenders, flops=2.0 * side**3)


def chain(tokens: int = _TOKENS, width: int = _WIDTH, hidden: int = _HIDDEN) -> Case:
    """Two FP8 layers in a row: the second call reads the first one's output."""
    x, up, down = (
        jaxfp8.quantize(bf16(seed, n, k) / np.sqrt(k), _E4M3)
        for seed, (n, k) in enumerate(((tokens, width), (hidden, width), (width, hidden)))
    )
    scale = jnp.float32(4 / 448)
    asked: dict[str, Any] = {"activation": "relu", "return_amax": True}

    def chained(x: Any, up: Any, down: Any) -> Any:
        y, amax = _ours(x, up, **asked, preferred_element_type=_E4M3, out_scale=scale)
        return _ours(y, down), amax

    def with_a_pass(x: Any, up: Any, down: Any) -> Any:
        y, amax = _ours(x, up, **asked)
        return _ours(jaxfp8.quantize(y, _E4M3, scale=scale), down), amax

    def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        y = jax.nn.relu(_in_bf16(x, up))
        return _in_bf16(y, down), jnp.max(y)

    contenders = {
        "jaxfp8 chained": contender("cuda", chained, x, up, down),
        "jaxfp8, bf16 between": contender("cuda", with_a_pass, x, up, down),
        "XLA bf16": contender("cuda", plain, *_dequantized(x, up, down)),
    }
    name = f"FP8 chain {tokens} x {width} x {hidden}"
    return Case(name=name, contenders=contenders, flops=4.0 * tokens * width * hidden)


def norm_layer(m: int, width: int = _WIDTH) -> Case:
    """RMSNorm, FP8 codes with a scale for each row, a product and a residual, in plain JAX."""
    x, gain = bf16(8, m, width), 1 + bf16(7, width) / 8
    w = jaxfp8.quantize(normal(1, width, width) / np.sqrt(width), _E4M3, channelwise_axes=(0,))

    def layer(x: jax.Array, gain: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        rows, row_scale = quantize_rows(rms_norm(x, gain), _E4M3)
        sums = jax.lax.dot_general(
            rows.astype(x.dtype), codes.astype(x.dtype), _NT, preferred_element_type=jnp.float32
        )
        return x + (sums * row_scale * scale).astype(x.dtype)

    def wide(x: jax.Array, gain: jax.Array, w: jax.Array) -> jax.Array:
        return x + _in_bf16(rms_norm(x, gain), w)

    given = x, gain, w.qvalue, w.scale.reshape(1, -1)
    contenders = {
        "jaxfp8": contender("cuda", jaxfp8.rewrite(layer), *given, least=8),
        "XLA, same expression": contender("cuda", layer, *given, least=8),
        "XLA bf16": contender("cuda", wide, x, gain, *_dequantized(w), least=8),
    }
    return Case(
        name=f"RMSNorm, codes, product {m} x {width} x {width}",
        contenders=contenders,
        flops=2.0 * m * width * width if m > 128 else 0.0,
        bytes=1.0 * width * width + 4.0 * m * width,
    )
