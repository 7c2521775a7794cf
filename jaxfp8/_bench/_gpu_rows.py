"""The cases of rows from a norm or a gate, and of their codes: alone, before a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _decoder
from jaxfp8._bench import _problems as problems
from jaxfp8._bench._case import Case
from jaxfp8._bench._gpu_operands import copies, dequantised, in_bf16, normal, ours, weights
from jaxfp8._bench._measure import Contender, over_copies
from jaxfp8._bench._problems import E4M3
from jaxfp8._call.ops.produce_call import quantize_produced
from jaxfp8._call.reference.produce_reference import Norm, ProduceSpec, RowScale

_WIDTH, _HIDDEN = 4096, 14336  # of Llama-3-8B
_LAYERS = 8  # enough to hide the dispatch of a program
_SCALE = RowScale(amax_floor=1e-12, of_zeros=float(np.float32(1e-12) / np.float32(448)))
_RMS = Norm(epsilon=1e-5, has_gain=True, rounded_first=True)
_LAYER_NORM = Norm(epsilon=1e-5, centred=True, has_gain=True, has_shift=True)


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md."""
    for m in (8192, 2048):
        yield f"rows codes {m}", functools.partial(alone, "codes", m, _WIDTH)
        yield f"rows rmsnorm {m}", functools.partial(alone, "RMSNorm", m, _WIDTH)
        yield f"rows layernorm {m}", functools.partial(alone, "LayerNorm", m, _WIDTH)
        yield f"rows silu gate {m}", functools.partial(alone, "silu(a) b", m, _HIDDEN)
    for m in (1, 16, 64, 512, 2048, 8192):
        yield f"rows layer {m}", functools.partial(in_front_of_products, m)


def _layer_norm(x: jax.Array, gain: jax.Array, shift: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * inverse * gain + shift).astype(x.dtype)


# How rows are written, and the call for it.
_WAYS: dict[str, tuple[Callable[..., jax.Array], dict[str, Any]]] = {
    "codes": (lambda x: x, {}),
    "RMSNorm": (_decoder.normed, {"norm": _RMS}),
    "LayerNorm": (_layer_norm, {"norm": _LAYER_NORM}),
    "silu(a) b": (lambda a, b: jax.nn.silu(a) * b, {"activation": "silu", "has_factor": True}),
}


def alone(way: str, m: int, k: int) -> Case:
    """Rows and their FP8 codes with a scale for each, nothing else."""
    written, more = _WAYS[way]
    spec = ProduceSpec(dtype=np.dtype(E4M3), rule=_SCALE, **more)
    count = copies(3.0 * m * k)
    vectors = [1 + normal(7 + i, k) / 8 for i in range(spec.vectors)]
    rows = 1 + spec.has_factor
    operands = [(*(normal(10 * i + j, m, k) for j in range(rows)), *vectors) for i in range(count)]
    contenders = {
        "jaxfp8": over_copies(functools.partial(quantize_produced, spec=spec), operands),
        "xla": over_copies(lambda *xs: problems.quantize_rows(written(*xs), E4M3), operands),
    }
    return Case(
        name=f"{way}, FP8 codes {m} x {k}", contenders=contenders, bytes=(2.0 * rows + 1) * m * k
    )


def in_front_of_products(m: int) -> Case:
    """Layers of RMSNorm, codes, a product and a residual, with the norm by a call or by XLA."""
    count = copies(_WIDTH * _WIDTH, _LAYERS)
    held = weights(_WIDTH, _WIDTH, count)
    gain, x = 1 + normal(7, _WIDTH) / 8, normal(8, m, _WIDTH)

    spec = ProduceSpec(dtype=np.dtype(E4M3), rule=_SCALE, norm=_RMS)

    def in_one_call(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
        codes, scale, _ = quantize_produced(x, gain, spec=spec)
        return ours(jaxfp8.QArray(codes, scale), w)

    def by_xla(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
        codes, scale = problems.quantize_rows(_decoder.normed(x, gain), E4M3)
        return ours(jaxfp8.QArray(codes, scale), w)

    def wide(x: jax.Array, w: jax.Array) -> jax.Array:
        return in_bf16(_decoder.normed(x, gain), w)

    def timed(dot: Callable[..., jax.Array], ws: list) -> Contender:
        def layers(x: jax.Array, ws: list) -> jax.Array:
            for w in ws:
                x = x + dot(x, w)
            return x

        jitted = jax.jit(layers)
        return Contender(lambda: jitted(x, ws), units=len(ws))

    contenders = {
        "jaxfp8": timed(in_one_call, held),
        "norm and codes by xla": timed(by_xla, held),
        "xla bf16": timed(wide, list(map(dequantised, held))),
    }
    return Case(
        name=f"RMSNorm, codes, product {m} x {_WIDTH} x {_WIDTH}",
        contenders=contenders,
        flops=2.0 * m * _WIDTH * _WIDTH if m > 128 else 0.0,
        bytes=1.0 * _WIDTH * _WIDTH + 4.0 * m * _WIDTH,
    )
