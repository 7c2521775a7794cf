"""The cases of FP8 weights that are multiplied in int8: whole products, and what parts cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxfp8
from jaxfp8._bench import _problems as problems
from jaxfp8._bench._case import Case
from jaxfp8._bench._gpu_operands import (
    copies,
    dequantised,
    in_bf16,
    normal,
    ours,
    transposed,
    weights,
)
from jaxfp8._bench._measure import over_copies
from jaxfp8._bench._problems import E4M3

_SIZES = (4096, 4096), (4096, 14336)  # N and K
_ROWS = 1, 16, 64, 512, 1024, 4096, 8192


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md."""
    for n, k in _SIZES:
        for m in _ROWS:
            yield f"imma {m}x{n}x{k}", functools.partial(product, m, n, k)
    for m in (16, 1024):
        yield f"probe {m}", functools.partial(probe, m)


def product(m: int, n: int, k: int) -> Case:
    """16-bit activations times an FP8 weight, in int8, and in the ways that need no int8."""
    count = copies(n * k)
    held = weights(n, k, count)
    xs = [normal(100 + i, m, k) for i in range(count)]
    pairs = list(zip(xs, held, strict=True))
    wide = list(zip(xs, map(dequantised, held), strict=True))
    ways: dict[str, tuple[Callable[..., Any], list[tuple]]] = {
        "jaxfp8 compute int8": (functools.partial(ours, compute="int8"), pairs),
        "jaxfp8 sm80_imma": (in_one_kernel, pairs),
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


def probe(m: int, n: int = 4096, k: int = 4096) -> Case:
    """`sm80_imma` with one of its parts more, or another, than in the first row."""
    count = copies(n * k)
    held = weights(n, k, count)
    values = [normal(100 + i, m, k) for i in range(count)]
    rows = functools.partial(jaxfp8.quantize, channelwise_axes=(0,))
    codes, fp8 = ([rows(x, dtype) for x in values] for dtype in (jnp.int8, E4M3))
    parts: dict[str, tuple[list[Any], list[jaxfp8.QArray], int]] = {
        "jaxfp8 int8 activations": (codes, held, 1),
        "jaxfp8 weights transposed": (codes, [*map(transposed, held)], 0),
        "jaxfp8 FP8 activations decoded": (fp8, held, 1),
        "jaxfp8 bf16 activations rounded": (values, held, 1),
    }
    contenders = {
        name: over_copies(functools.partial(in_one_kernel, axis=axis), list(zip(x, w, strict=True)))
        for name, (x, w, axis) in parts.items()
    }
    return Case(name=f"parts of sm80_imma M={m}", contenders=contenders, flops=2.0 * m * n * k)


def in_one_kernel(x: Any, w: jaxfp8.QArray, axis: int = 1) -> jax.Array:
    """The same product by `sm80_imma`, which no call gets that does not name it.

    `axis` is that of the weight which is summed over.
    """
    return problems.on_kernel("sm80_imma", x, w, axis)


def _decoded_first(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
    """The weight widened in memory, then a product of 16 bits."""
    return in_bf16(x, jax.lax.optimization_barrier(dequantised(w)))


def _peak_bytes(function: Callable[..., Any], operands: tuple) -> int:
    """What one product holds at a time: operands, result and scratch."""
    compiled = jax.jit(function).lower(*operands).compile()
    found = compiled.memory_analysis()
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(found, part) for part in parts)
