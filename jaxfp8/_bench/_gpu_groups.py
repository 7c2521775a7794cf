"""The cases of products in groups: of rows, of rows up to a count, and of K."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench._case import Case
from jaxfp8._bench._measure import contender
from jaxfp8._bench._products import BLOCK, normal

_E4M3 = jnp.float8_e4m3fn
_SIZES: dict[str, tuple[int, ...]] = {
    "even": (1024,) * 8,
    "uneven": (1900, 17, 640, 1203, 0, 2221, 811, 1400),
    "64 experts": tuple(64 + i * 37 % 128 for i in range(64)),
}
_DECODE = tuple(1 + i * 37 % 8 for i in range(64))
_ZIPF = tuple(max(1, round(16384 / 4.744 / (1 + i))) for i in range(64))
_ODD = (1901, 17, 640, 1203, 0, 2220, 811, 1400)  # of K, in no multiples of a block
_OF_K = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())),
    lhs_ragged_dimensions=[1],
    rhs_group_dimensions=[],
)


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Groups of rows for two weights, and of K."""
    for n, k in ((4096, 7168), (7168, 2048)):
        for name, sizes in _SIZES.items():
            yield f"ragged {name} {n}x{k}", functools.partial(of_rows, sizes, n, k)
        yield f"ragged masked {n}x{k}", functools.partial(masked, (128,) * 8, 1024, n, k)
    for name, sizes in (("even", _SIZES["even"]), ("odd", _ODD)):
        yield f"ragged of K, {name}", functools.partial(of_k, sizes, 4096, 7168)
    for name, (sizes, n, k) in {
        "even": (_SIZES["even"], 4096, 7168),
        "decode": (_DECODE, 1536, 4096),
        "zipf": (_ZIPF, 1408, 2048),
    }.items():
        for dtype in (_E4M3, jnp.int8):
            yield (
                f"ragged w8a16 {name} {np.dtype(dtype).name}",
                functools.partial(weight_only, sizes, n, k, dtype),
            )


def of_rows(sizes: Sequence[int], n: int, k: int) -> Case:
    """Each group of rows times a weight of its own, with scales of 1 x 128 by 128 x 128."""
    x, w = _lines(sum(sizes), k), _weights(len(sizes), n, k)
    name = f"ragged, {len(sizes)} groups of {sum(sizes)} rows N={n} K={k}"
    return _case(name, x, w, sizes, jax.lax.ragged_dot, 2.0 * sum(sizes) * n * k)


def masked(sizes: Sequence[int], rows: int, n: int, k: int) -> Case:
    """Only the first rows of each group count; XLA multiplies all of them."""
    x, w = _lines(len(sizes), rows, k), _weights(len(sizes), n, k)
    name = f"ragged, {sum(sizes)} of {len(sizes)} x {rows} rows N={n} K={k}"
    return _case(name, x, w, sizes, lambda x, w, _: x @ w, 2.0 * sum(sizes) * n * k)


def of_k(sizes: Sequence[int], m: int, n: int) -> Case:
    """Groups of the contracted axis, as in gradients of weights, with scales of 1 x 128."""
    x, w = (_lines(lines, sum(sizes)) for lines in (m, n))
    theirs = functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_OF_K)
    name = f"ragged, {len(sizes)} groups of K={sum(sizes)} M={m} N={n}"
    return _case(name, x, w, sizes, theirs, 2.0 * m * n * sum(sizes))


def weight_only(sizes: Sequence[int], n: int, k: int, dtype: Any = _E4M3) -> Case:
    """Groups of 16-bit rows times 8-bit weights in both layouts, with a scale per column."""
    x = normal(1, sum(sizes), k).astype(jnp.bfloat16)
    w = jaxfp8.quantize(normal(2, len(sizes), n, k) / np.sqrt(k), dtype, channelwise_axes=(0, 1))
    held, bf16 = jnp.asarray(sizes, jnp.int32), jnp.bfloat16
    ours = functools.partial(jaxfp8.ragged_dot, preferred_element_type=bf16)
    k_first = jaxfp8.QArray(w.qvalue.mT, w.scale.mT)
    contenders = {
        "jaxfp8": contender("cuda", lambda x, w, sizes: ours(x, w.mT, sizes), x, w, held),
        "jaxfp8 [K,N]": contender("cuda", ours, x, k_first, held),
        "XLA bf16": contender(
            "cuda",
            lambda x, w, sizes: jax.lax.ragged_dot(x, w.mT, sizes),
            *(x, jaxfp8.dequantize(w, bf16), held),
        ),
    }
    rows, used = sum(sizes), sum(size > 0 for size in sizes)
    flops = 2.0 * rows * n * k if rows > 16 * len(sizes) else 0.0
    moved = used * n * k + 2.0 * rows * (n + k)
    name = f"W8A16 {np.dtype(dtype).name}, {len(sizes)} groups of {rows} rows N={n} K={k}"
    return Case(name=name, contenders=contenders, bytes=moved, flops=flops)


def _lines(*shape: int) -> jaxfp8.QArray:
    """Lines with a scale for every 128 of K."""
    leading, x = tuple(range(len(shape) - 1)), normal(1, *shape).astype(jnp.bfloat16)
    return jaxfp8.quantize(x, _E4M3, channelwise_axes=leading, tiled_axes={len(leading): BLOCK})


def _weights(groups: int, n: int, k: int) -> jaxfp8.QArray:
    """[G, N, K], a scale for every 128 x 128."""
    w = normal(2, groups, n, k) / np.sqrt(k)
    return jaxfp8.quantize(w, _E4M3, channelwise_axes=(0,), tiled_axes={1: BLOCK, 2: BLOCK})


def _case(
    name: str,
    x: jaxfp8.QArray,
    w: jaxfp8.QArray,
    sizes: Sequence[int],
    theirs: Callable[..., jax.Array],
    flops: float,
) -> Case:
    """Our product and XLA's in bfloat16; the sizes stay on the device."""
    held, bf16 = jnp.asarray(sizes, jnp.int32), jnp.bfloat16
    ours = functools.partial(jaxfp8.ragged_dot, precision="highest", preferred_element_type=bf16)
    wide = jaxfp8.dequantize(x, bf16), jaxfp8.dequantize(w, bf16)
    contenders = {
        "jaxfp8": contender("cuda", lambda x, w, sizes: ours(x, w.mT, sizes), x, w, held),
        "XLA bf16": contender("cuda", lambda x, w, sizes: theirs(x, w.mT, sizes), *wide, held),
    }
    return Case(name=name, contenders=contenders, flops=flops)
