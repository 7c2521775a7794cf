"""Peak rates, measured in the same rounds as the contenders."""

from __future__ import annotations

import concurrent.futures
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._bench._measure import Contender
from jaxfp8._call.library import ffi

# Iterations of the loop of products: about 0.3 ms (2 ms with tiles), enough for other threads to
# take over a delayed one's share.
_ROUNDS = 100_000
_PIECES = 16
_MOST_READ = 256 << 20
_LEAST_READ = 2 << 20
_COPIED = 1 << 30  # bytes


def threads() -> int:
    """The threads of XLA's CPU pool, for all contenders."""
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")  # XLA obeys both
    return int(asked) if asked else len(os.sched_getaffinity(0))


def limits(product: str, footprint: int) -> dict[str, Contender]:
    """The limits of a case: products of its kind, and reads of as much memory as it reads."""
    return {product: products(product, threads()), "read": reads(footprint, threads())}


@functools.cache
def copy() -> Contender:
    """A copy from device to device of a GPU; its unit is one byte, read or written."""
    x = jnp.ones(_COPIED // 2, jnp.bfloat16)
    copied = jax.jit(jnp.copy)  # the driver's: 1.25x faster than a fused addition to bfloat16
    return Contender(lambda: copied(x), units=2.0 * x.nbytes)


def of_gpu(by_memory: bool = True) -> dict[str, Contender]:
    """The limit of a case that memory limits on a GPU: the rate of a copy."""
    return {"read": copy()} if by_memory else {}


@functools.cache
def available(kind: str) -> str:
    """A kind of product, or "f32" if the processor has no instruction for it."""
    return kind if ffi.peak_products(kind, 1) else "f32"


def products(kind: str, threads: int) -> Contender:
    """A loop of products in registers; its unit is one operation."""
    piece = ffi.peak_products(kind, _ROUNDS)

    def enqueue() -> None:
        list(
            _pool(threads).map(lambda _: ffi.peak_products(kind, _ROUNDS), range(_PIECES * threads))
        )

    return Contender(enqueue, units=piece * _PIECES * threads)


def reads(size: int, threads: int) -> Contender:
    """Reads of memory of some size, again and again; its unit is one byte.

    Each thread has a part of its own, so a part the size of its caches stays there.
    """
    size = min(max(size, _LEAST_READ), _MOST_READ)
    data = np.ones(size, np.uint8)
    part = size // threads // 256 * 256
    times = max(1, _MOST_READ // 4 // size)  # long beside the start of threads

    def read(thread: int) -> None:
        for _ in range(times):
            ffi.peak_read(data.ctypes.data + thread * part, part)

    def enqueue() -> None:
        list(_pool(threads).map(read, range(threads)))

    return Contender(enqueue, units=part * threads * times)


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads)
