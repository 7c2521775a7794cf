"""The cases for the CPU: the standard table for its kernels, or any shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from jaxfp8._bench import _cpu_cases as cases
from jaxfp8._bench import _encoder, _peaks
from jaxfp8._bench._case import Case, apart, faster_than, share_of_peak
from jaxfp8._bench._cpu_cases import PREPARED, SAME, Shape
from jaxfp8._bench._measure import Contender
from jaxfp8._bench._problems import E4M3

Named = Iterator[tuple[str, Callable[[], Case]]]

_KINDS: dict[str, Callable[..., Case]] = {
    "w8a16 e4m3": cases.weight_only,
    "w8a16 int8": functools.partial(cases.weight_only, dtype=jnp.int8),
    "w8a32 e4m3": functools.partial(cases.weight_only, x_dtype=jnp.float32),
    "int8": cases.integers,
}


def memory(footprint: float) -> dict[str, Contender]:
    """Reads of so many bytes, by all threads."""
    return {"read": _peaks.reads(int(footprint), _peaks.threads())}


def table(side: int = 4096) -> Named:
    """The standard table, N = K = `side` unless a case's name says more."""
    yield from _peaks.cases()
    for m, times in {1: 80.0, 16: 7.0, 64: 2.8, 256: 1.5, 1024: 1.0}.items():
        goals = [faster_than(SAME, times), apart("jaxfp8", "jaxfp8 [N,K]", 0.15)]
        if m >= 256:
            goals.append(share_of_peak(0.85))
        yield _named("w8a16 e4m3", cases.weight_only, (m, side, side), goals=goals)
    long = (1, side * 7 // 2, side)
    cold: dict[str, Any] = {"goals": [share_of_peak(0.9)], "from_memory": True}
    yield _named("w8a16 e4m3 from memory", cases.weight_only, long, **cold)
    for m, times in {1: 60.0, 16: 1.8, 64: 1.0, 256: 1.1}.items():
        goals = [
            faster_than(SAME, times),
            # oneDNN's weight is packed beforehand, too.
            faster_than("oneDNN int8", 0.95, PREPARED),
            faster_than(PREPARED, 0.75),
            faster_than(PREPARED, 0.75, "jaxfp8 [N,K]"),
        ]
        yield _named("int8", cases.integers, (m, side, side), goals=goals)
    for m in (1, 256):
        yield _named("zero points int8", cases.zero_points, (m, side, side))
        yield _named("zero points w8a32 uint8", cases.affine_weight, (m, side, side))
    for m in (1, 256):
        yield _named("blocks e4m3", cases.blocks, (m, side, side))
    for name, dtype in (("int8", jnp.int8), ("e4m3", E4M3)):
        yield _named(f"dynamic {name}", cases.dynamic, (256, side, side), dtype)
    for name, make in (("w8a16 e4m3", cases.odd_weight_only), ("int8", cases.odd_integers)):
        for odd, even in _odd(side):
            yield _named(f"odd {name}", make, odd, even)
    for m, times in {1: 20.0, 256: 1.0}.items():
        goals = [faster_than(SAME, times, "jaxfp8 avx2")]
        yield _named("avx2 w8a16 e4m3", cases.avx2, (m, side, side), goals=goals)
    yield _encoder.NAME, _encoder.case


def shaped(shapes: Iterable[Shape]) -> Named:
    """Each kind of product for each M, N, K."""
    for shape in shapes:
        for name, make in _KINDS.items():
            yield _named(name, make, shape, goals=[faster_than(SAME, 1.0)])


def _odd(side: int) -> Iterator[tuple[Shape, Shape]]:
    """Sizes not a multiple of a vector, each with the nearest multiple."""
    words = side * 12 + 1105  # 50257, as in GPT-2, if side is 4096
    yield (17, side, side), (16, side, side)
    yield (16, words, side), (16, words // 64 * 64, side)
    yield (16, side, side + 4), (16, side, side)


def _named(
    name: str, make: Callable[..., Case], shape: Shape, *more: Any, **options: Any
) -> tuple[str, Callable[[], Case]]:
    name = f"{name} {'x'.join(map(str, shape))}"
    return name, functools.partial(make, name, shape, *more, **options)
