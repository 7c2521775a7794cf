"""The cases of FP8 weights that are multiplied in int8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxfp8
from jaxfp8._bench._case import Case
from jaxfp8._bench._gpu_operands import copies, dequantised, in_bf16, normal, ours, weights
from jaxfp8._bench._measure import over_copies
from jaxfp8._call.ops import int8_form

_SIZES = (4096, 4096), (4096, 14336)  # N and K
_ROWS = 1, 16, 64, 512, 1024, 4096, 8192


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md."""
    for n, k in _SIZES:
        for m in _ROWS:
            yield f"imma {m}x{n}x{k}", functools.partial(product, m, n, k)


def product(m: int, n: int, k: int) -> Case:
    """16-bit activations times an FP8 weight, in int8, and in ways without int8."""
    count = copies(n * k)
    held = weights(n, k, count)
    xs = [normal(100 + i, m, k) for i in range(count)]
    pairs = list(zip(xs, held, strict=True))
    wide = list(zip(xs, map(dequantised, held), strict=True))
    ways: dict[str, tuple[Callable[..., Any], list[tuple]]] = {
        "jaxfp8 compute int8": (functools.partial(ours, compute="int8"), pairs),
        "jaxfp8 rounded first": (rounded_first, pairs),
        "jaxfp8 W8A16": (ours, pairs),
        "decoded, then bf16": (_decoded_first, pairs),
        "bf16, weights resident": (in_bf16, wide),
    }
    return Case(
        name=f"FP8 in int8 M={m} N={n} K={k}",
        contenders={name: over_copies(f, operands) for name, (f, operands) in ways.items()},
        flops=2.0 * m * n * k if m > 128 else 0.0,
        bytes=n * k + 2.0 * m * (n + k),
        held={name: _peak_bytes(f, operands[0]) for name, (f, operands) in ways.items()},
    )


def rounded_first(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
    """The same product in three calls: both sides rounded, and a product of int8."""
    codes, scale = int8_form.rounded(w.qvalue, (1,))
    rows = jaxfp8.quantize(x, jnp.int8, channelwise_axes=(0,))
    return ours(rows, jaxfp8.QArray(codes, scale * w.scale))


def _decoded_first(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
    """The weight widened in memory, then a product of 16 bits."""
    return in_bf16(x, jax.lax.optimization_barrier(dequantised(w)))


def _peak_bytes(function: Callable[..., Any], operands: tuple) -> int:
    """Peak memory of one product: operands, result and scratch."""
    compiled = jax.jit(function).lower(*operands).compile()
    found = compiled.memory_analysis()
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(found, part) for part in parts)
