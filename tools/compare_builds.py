"""Times of kernels in two builds of libjaxfp8_cpu.so, interleaved, through the C interface.

    .venv/bin/python tools/compare_builds.py OLD.so NEW.so --threads 2 \
        "bf16*e4m3 16x4096x4096 kn" "int8*int8 1x4096x4096 prepared cold" < more-cases

A case is two dtypes, sizes M x N x K, the layout of the weight ("kn", "nk" or "prepared"), and any
of

    blocks=B      scales for B x B of the weight, rather than one for each column
    zp            zero points on both sides of an int8 product, else on the weight
    kernel=NAME   a forced kernel rather than the library's choice
    cold          256 MiB of weights in rotation, so they come from memory

Rows are scaled one by one, scales are about 1e-3, and results are bfloat16. Prints the medians of
both, their ratio, and whether all results have the same bits. Threads are started anew for each
call.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench._measure import Contender, Missing, Timing, measure
from jaxfp8._call.library import abi
from jaxfp8._doctor._products import specs
from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import ScaledDotSpec, tile_counts

_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int8": "int8",
    "uint8": "uint8",
}
_COLD_BYTES = 256 << 20
_CACHE_LINE = 64
_LAYOUTS = {"kn", "nk", "prepared"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product to time."""

    spec: ScaledDotSpec
    kernel: str
    cold: bool


def parse(text: str) -> Case:
    """A case from a line such as "bf16*e4m3 16x4096x4096 kn"."""
    dtypes, sizes, layout, *more = text.split()
    rows, columns, depth = map(int, sizes.split("x"))
    options = dict(option.partition("=")[::2] for option in more)
    unknown = (options.keys() - {"blocks", "zp", "kernel", "cold"}) | ({layout} - _LAYOUTS)
    if unknown:
        raise ValueError(f"{text!r}: there is no {', '.join(sorted(unknown))}")
    left, right = (_DTYPES[name] for name in dtypes.split("*"))
    is_affine, turned = "zp" in options, layout == "nk"
    block = int(options["blocks"]) if "blocks" in options else None
    x = _held(left, (rows, depth), (1, depth), is_affine and _dtypes.is_int8(left))
    wide, deep = block or 1, block or depth
    shape, tiles = ((columns, depth), (wide, deep)) if turned else ((depth, columns), (deep, wide))
    w = _held(right, shape, tiles, is_affine)

    def product(x: Any, w: Any) -> Any:
        w = jaxfp8.prepare(w) if layout == "prepared" else w.T if turned else w
        return jaxfp8.matmul(x, w, preferred_element_type=jnp.bfloat16)

    (spec,) = specs(jax.make_jaxpr(product)(x, w).jaxpr)
    return Case(spec, options.get("kernel", ""), "cold" in options)


def _held(dtype: str, shape: tuple[int, int], tiles: tuple[int, int], is_affine: bool) -> Any:
    """The shapes of an operand: of an array, or of codes and their factors."""
    codes: Any = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    if not _dtypes.is_eight_bit(dtype):
        return codes
    counts = tile_counts(shape, tiles)
    scale: Any = jax.ShapeDtypeStruct(counts, jnp.float32)
    zero_point: Any = jax.ShapeDtypeStruct(counts, jnp.int32) if is_affine else None
    return jaxfp8.QArray(codes, scale, zero_point, tiles=tiles)


def _values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Finite values as stored."""
    if not _dtypes.is_eight_bit(dtype):
        return rng.normal(size=shape).astype(_dtypes.storage(dtype))
    codes = np.arange(256, dtype=np.uint8)
    if _dtypes.is_float8(dtype):
        codes = codes[np.isfinite(codes.view(np.dtype(dtype)).astype(np.float32))]
    return rng.choice(codes, shape).view(_dtypes.storage(dtype))


def _rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Makes the next of some calls whenever it is called, the first again after the last."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy aligned to a cache line, as XLA's arrays are."""
    room = np.empty(array.nbytes + _CACHE_LINE, np.uint8)
    start = -room.ctypes.data % _CACHE_LINE
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _operands(rng: np.random.Generator, spec: ScaledDotSpec) -> dict[str, np.ndarray]:
    operands: dict[str, np.ndarray] = {}
    for name in spec.operand_names():
        side = spec.lhs if name.startswith("lhs") else spec.rhs
        if name.endswith("_scale"):
            operands[name] = rng.uniform(0.5e-3, 2e-3, side.scale_shape).astype(np.float32)
        elif name.endswith("_zero_point"):
            operands[name] = rng.integers(0, 100, side.scale_shape, dtype=np.int32)
        else:
            operands[name] = _values(rng, side.dtype, side.shape)
    return {name: _aligned(array) for name, array in operands.items()}


def _calls(
    library: ctypes.CDLL, case: Case, weights: list[np.ndarray], operands: dict, threads: int
) -> tuple[list[Callable[[], np.ndarray]], np.ndarray]:
    """Calls on each of the weights, and their common output."""
    out = _aligned(np.zeros(case.spec.out_shape, _dtypes.storage("bfloat16")))
    given = ctypes.byref(abi.Spec.of(case.spec, case.kernel))

    def call_on(weight: np.ndarray) -> Callable[[], np.ndarray]:
        arrays = {**operands, "rhs": weight, "out": out}
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        buffers = ctypes.byref(abi.Buffers.of(**addresses))

        def call() -> np.ndarray:
            status, text = abi.call(library, "jaxfp8_cpu_scaled_dot", given, buffers, threads)
            if status:
                raise RuntimeError(text)
            return out

        return call

    return [call_on(weight) for weight in weights], out


def compare(libraries: list[ctypes.CDLL], case: Case, threads: int, rounds: int) -> str:
    """Both times, their ratio, and whether the bits are the same."""
    rng = np.random.default_rng(0)
    operands = _operands(rng, case.spec)
    copies = -(-_COLD_BYTES // operands["rhs"].nbytes) if case.cold else 1
    weights = [_aligned(operands["rhs"]) for _ in range(copies)]
    contenders: dict[str, Contender | Missing] = {}
    outputs = []
    for name, library in zip(("old", "new"), libraries, strict=True):
        calls, out = _calls(library, case, weights, operands, threads)
        contenders[name] = Contender(_rotating(calls), wait=lambda _: None)
        outputs.append(out)
    timings = measure(contenders, rounds)
    for timing in timings.values():
        if isinstance(timing, Missing):
            return timing.reason
    old, new = (t for t in timings.values() if isinstance(t, Timing))
    bits = [output.view(np.uint16) for output in outputs]
    same = "same bits" if np.array_equal(bits[0], bits[1]) else "other bits"
    return (
        f"{old.median * 1e6:9.1f} us {new.median * 1e6:9.1f} us  {new.median / old.median:5.2f}"
        f"  (spread {old.spread:.0%}, {new.spread:.0%})  {same}"
    )


def main() -> None:
    """Reads cases and prints a line for each."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("cases", nargs="*", help="further ones are read from standard input")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_intermixed_args()
    libraries = [ctypes.CDLL(path) for path in (arguments.old, arguments.new)]
    lines = [] if sys.stdin.isatty() else sys.stdin.read().splitlines()
    for text in filter(None, map(str.strip, [*arguments.cases, *lines])):
        result = compare(libraries, parse(text), arguments.threads, arguments.rounds)
        print(f"{text:44} {result}", flush=True)


if __name__ == "__main__":
    main()
