"""The cases for an NVIDIA GPU: the figures of docs/measurements.md, and any shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _gpu_encode, _gpu_imma, _gpu_mesh, _gpu_ragged, _gpu_rows
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
from jaxfp8._bench._measure import NO_TRITON, Contender, over_copies
from jaxfp8._bench._problems import E4M3, NT

# Values of the copy, 1 GiB of bfloat16.
_COPIED = 1 << 29


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md."""
    for name, make in _named():
        yield name, functools.partial(_beside_a_copy, make)


def shaped(shapes: Iterable[tuple[int, int, int]]) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Each kind of product for each M, N, K."""
    for m, n, k in shapes:
        kinds: dict[str, Callable[[], Case]] = {
            "w8a16 e4m3": functools.partial(weight_only, m, n, k, first=True),
            "w8a16 int8": functools.partial(weight_only, m, n, k, jnp.int8),
            "fp8": functools.partial(fp8, m, n, k, "row"),
            "dynamic e4m3": functools.partial(dynamic, m, n, k),
            "int8": functools.partial(int8, m, n, k),
        }
        for kind, make in kinds.items():
            yield f"{kind} {m}x{n}x{k}", functools.partial(_beside_a_copy, make)


def _beside_a_copy(make: Callable[[], Case]) -> Case:
    """A case, with the rate of a copy as its peak if memory limits it."""
    case = make()
    return case if case.flops else dataclasses.replace(case, peaks=memory(case.bytes))


def memory(footprint: float) -> dict[str, Contender]:
    """The rate of memory, for any footprint."""
    return {"read": _copy()}


@functools.cache
def _copy() -> Contender:
    """A copy from device to device; its unit is one byte, read or written."""
    x = normal(0, _COPIED, dtype=jnp.bfloat16)
    copy = jax.jit(jnp.copy)  # the driver's: 1.25x faster than a fused addition to bfloat16
    return Contender(lambda: copy(x), units=2.0 * x.nbytes)


# Small products per program, enough to hide its dispatch.
_MANY = 16


def _pattern(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """The usual expression, compiled by XLA."""
    return in_bf16(x, q.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16))


def copy_bandwidth() -> Case:
    """A device-to-device copy: bytes read plus bytes written."""
    copy = _copy()
    return Case(
        name="copy 1 GiB",
        contenders={"copy": dataclasses.replace(copy, units=1)},
        bytes=copy.units,
    )


def weight_only(m: int, n: int, k: int, dtype: Any = E4M3, first: bool = False) -> Case:
    """W8A16 against the bfloat16 product of XLA, and against XLA on the same expression."""
    count = copies(n * k, least=_MANY if m <= 256 else 2)
    ws = weights(n, k, count, dtype)
    xs = [normal(100 + i, m, k) for i in range(count)]
    contenders = {"jaxfp8": over_copies(ours, list(zip(xs, ws, strict=True)))}
    if first:
        pairs = list(zip(xs, map(transposed, ws), strict=True))
        matmul = functools.partial(jaxfp8.matmul, preferred_element_type=jnp.bfloat16)
        contenders["jaxfp8 [K,N]"] = over_copies(matmul, pairs)
    wide = [(x, dequantised(w)) for x, w in zip(xs, ws, strict=True)]
    contenders["xla bf16"] = over_copies(in_bf16, wide)
    same = [(x, w.qvalue, w.scale) for x, w in zip(xs, ws, strict=True)]
    contenders["xla same expression"] = over_copies(_pattern, same)
    name = f"W8A16 {np.dtype(dtype).name} M={m} N={n} K={k}"
    moved = n * k + 2.0 * m * (n + k)
    flops = 2.0 * m * n * k if m > 128 else 0.0
    return Case(name=name, contenders=contenders, bytes=moved, flops=flops)


def fp8(m: int, n: int, k: int, grain: str) -> Case:
    """FP8 x FP8 -> bfloat16."""
    count = copies(n * k + m * k + 2 * m * n)
    axes: dict[str, Any] = {"tensor": {}, "row": {"channelwise_axes": (0,)}}.get(grain, {})
    left = right = axes
    if grain == "block":
        left = {"channelwise_axes": (0,), "tiled_axes": {1: 128}}
        right = {"tiled_axes": {0: 128, 1: 128}}
    xs = [jaxfp8.quantize(normal(100 + i, m, k), E4M3, **left) for i in range(count)]
    ws = [jaxfp8.quantize(normal(i, n, k), E4M3, **right) for i in range(count)]
    pairs = list(zip(xs, ws, strict=True))
    contenders = {"jaxfp8": over_copies(ours, pairs)}
    if grain == "tensor":
        contenders["jaxfp8 promoted"] = over_copies(
            functools.partial(ours, precision="highest"), pairs
        )
        plain = [(x.qvalue, w.qvalue) for x, w in pairs]
        contenders["jaxfp8 without scales"] = over_copies(_no_scales, plain)
        contenders["xla same pattern"] = over_copies(_xla_fp8, pairs)
        contenders["xla fp8"] = over_copies(_xla_fp8, pairs, NO_TRITON)
        contenders |= _torch_scaled_mm(pairs)
    contenders["xla bf16"] = over_copies(
        in_bf16, [(dequantised(x), dequantised(w)) for x, w in pairs]
    )
    return Case(name=f"FP8 {grain} M={m} N={n} K={k}", contenders=contenders, flops=2.0 * m * n * k)


def _no_scales(x: jax.Array, w: jax.Array) -> jax.Array:
    one = jnp.float32(1)
    return ours(jaxfp8.QArray(x, one), jaxfp8.QArray(w, one))


def _xla_fp8(x: jaxfp8.QArray, w: jaxfp8.QArray) -> jax.Array:
    """The graph for XLA's own FP8 rewriter."""
    left = x.qvalue.astype(jnp.bfloat16) * x.scale.reshape(()).astype(jnp.bfloat16)
    right = w.qvalue.astype(jnp.bfloat16) * w.scale.reshape(()).astype(jnp.bfloat16)
    return in_bf16(left, right)


def _torch_scaled_mm(pairs: list) -> dict[str, Contender]:
    """PyTorch's FP8 product on the same bits, if PyTorch is installed."""
    try:
        import torch  # noqa: PLC0415 (an optional peer)
    except ImportError:
        return {}

    def tensor(x: jax.Array) -> Any:
        codes = torch.from_numpy(np.asarray(x).view(np.uint8).copy()).cuda()
        return codes.view(torch.float8_e4m3fn)

    operands = [
        (
            tensor(x.qvalue),
            tensor(w.qvalue).t(),
            torch.tensor(float(x.scale.reshape(()))).cuda(),
            torch.tensor(float(w.scale.reshape(()))).cuda(),
        )
        for x, w in pairs
    ]

    def enqueue() -> None:
        for a, b, scale_a, scale_b in operands:
            torch._scaled_mm(
                a,
                b,
                scale_a=scale_a,
                scale_b=scale_b,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

    wait = lambda _: torch.cuda.synchronize()  # noqa: E731
    return {"torch._scaled_mm": Contender(enqueue, wait, len(operands))}


def dynamic(m: int, n: int, k: int) -> Case:
    """bfloat16 activations quantised per token, times an FP8 weight."""
    count = copies(n * k + 2 * m * k + 2 * m * n)
    ws = weights(n, k, count)
    xs = [normal(100 + i, m, k) for i in range(count)]

    def quantised_first(x: jax.Array, w: jaxfp8.QArray) -> Any:
        return ours(jaxfp8.quantize(x, E4M3, channelwise_axes=(0,)), w)

    def xla(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
        own = jnp.max(jnp.abs(x), axis=1, keepdims=True).astype(jnp.float32) / 448
        codes = jnp.clip(x.astype(jnp.float32) / own, -448, 448).astype(E4M3)
        wide = codes.astype(jnp.bfloat16) * own.astype(jnp.bfloat16)
        return _pattern(wide, q, scale)

    pairs = list(zip(xs, ws, strict=True))
    contenders = {
        "jaxfp8": over_copies(quantised_first, pairs),
        "xla same expression": over_copies(xla, [(x, w.qvalue, w.scale) for x, w in pairs]),
        "xla bf16": over_copies(in_bf16, [(x, dequantised(w)) for x, w in pairs]),
    }
    return Case(name=f"FP8 dynamic M={m} N={n} K={k}", contenders=contenders, flops=2.0 * m * n * k)


def int8(m: int, n: int, k: int) -> Case:
    """int8 x int8 -> bfloat16 with scales, zero points and bias, against the bare int32 product."""
    rng = np.random.default_rng(0)
    codes = [
        tuple(jnp.asarray(rng.integers(-128, 128, s, dtype=np.int8)) for s in ((m, k), (n, k)))
        for _ in range(2)
    ]
    zero = jnp.full((1, 1), 3, jnp.int8)
    bias = normal(5, n, dtype=jnp.float32)

    def whole(x: jax.Array, w: jax.Array) -> Any:
        left = jaxfp8.QArray(x, jnp.full((m, 1), 0.01), zero)
        right = jaxfp8.QArray(w, jnp.full((n, 1), 0.01), zero)
        return ours(left, right, bias=bias)

    def bare(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.dot_general(x, w, NT, preferred_element_type=jnp.int32)

    contenders = {"jaxfp8 whole": over_copies(whole, codes), "xla int32": over_copies(bare, codes)}
    return Case(name=f"INT8 M={m} N={n} K={k}", contenders=contenders, flops=2.0 * m * n * k)


_GRAINS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "token": {"channelwise_axes": (0,)},
    "1x128": {"channelwise_axes": (0,), "tiled_axes": {1: 128}},
    "128x128": {"tiled_axes": {0: 128, 1: 128}},
}


def quantize(grain: str, side: int = 8192) -> Case:
    """bfloat16 -> FP8."""
    axes = _GRAINS[grain]
    xs = [(normal(i, side, side),) for i in range(4)]
    ours = functools.partial(jaxfp8.quantize, dtype=E4M3, **axes)
    plain = functools.partial(_quantize_by_xla, grain)
    contenders = {"jaxfp8": over_copies(ours, xs), "xla": over_copies(plain, xs)}
    return Case(name=f"quantize {grain} {side}^2", contenders=contenders, bytes=3.0 * side * side)


def _quantize_by_xla(grain: str, x: jax.Array) -> Any:
    rows, columns = x.shape
    tile = {"tensor": x.shape, "token": (1, columns), "1x128": (1, 128), "128x128": (128, 128)}[
        grain
    ]
    blocks = x.reshape(rows // tile[0], tile[0], columns // tile[1], tile[1]).astype(jnp.float32)
    scale = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True) / 448
    return jnp.clip(blocks / scale, -448, 448).astype(E4M3).reshape(x.shape), scale


def outputs(m: int = 8192, n: int = 8192, k: int = 8192) -> Case:
    """An FP8 output from the call, against a bfloat16 one and a cast."""
    x = jaxfp8.quantize(normal(1, m, k), E4M3)
    w = jaxfp8.quantize(normal(2, n, k), E4M3)
    scale = jnp.float32(2.0)

    def fused(x: Any, w: Any) -> Any:
        return jaxfp8.dot_general(x, w, NT, preferred_element_type=E4M3, out_scale=scale)

    def cast(x: Any, w: Any) -> Any:
        return jnp.clip(ours(x, w).astype(jnp.float32) / scale, -448, 448).astype(E4M3)

    contenders = {
        "FP8 output": over_copies(fused, [(x, w)]),
        "bf16 + cast": over_copies(cast, [(x, w)]),
    }
    return Case(name=f"FP8 output {m}^3", contenders=contenders, flops=2.0 * m * n * k)


def chain(tokens: int = 8192, hidden: int = 4096, wide: int = 14336) -> Case:
    """Two FP8 layers in a row: the second call reads the first one's output."""
    x = jaxfp8.quantize(normal(1, tokens, hidden), E4M3)
    up, down = (
        jaxfp8.quantize(normal(2 + i, n, k) / np.sqrt(k), E4M3)
        for i, (n, k) in enumerate(((wide, hidden), (hidden, wide)))
    )
    scale = jnp.float32(4 / 448)
    asked: dict[str, Any] = {"activation": "relu", "return_amax": True}

    def chained(x: Any, up: Any, down: Any) -> Any:
        y, amax = jaxfp8.dot_general(
            x, up, NT, preferred_element_type=E4M3, out_scale=scale, **asked
        )
        return ours(y, down), amax

    def with_a_pass(x: Any, up: Any, down: Any) -> Any:
        y, amax = ours(x, up, **asked)
        return ours(jaxfp8.quantize(y, E4M3, scale=scale), down), amax

    def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        y = jax.nn.relu(in_bf16(x, up))
        return in_bf16(y, down), jnp.max(y)

    contenders = {
        "jaxfp8 chained": over_copies(chained, [(x, up, down)]),
        "jaxfp8, bf16 between": over_copies(with_a_pass, [(x, up, down)]),
        "xla bf16": over_copies(plain, [tuple(map(dequantised, (x, up, down)))]),
    }
    flops = 4.0 * tokens * hidden * wide
    return Case(name=f"FP8 chain {tokens} x {hidden} x {wide}", contenders=contenders, flops=flops)


def train(tokens: int, hidden: int, wide: int) -> Case:
    """A training step of a perceptron block."""
    from jaxfp8._bench import _train  # noqa: PLC0415 (it needs Flax, an extra)

    contenders = _train.contenders(tokens, hidden, wide)
    flops = 12.0 * tokens * hidden * wide
    return Case(name=f"train {tokens} x {hidden} x {wide}", contenders=contenders, flops=flops)


def _named() -> Iterator[tuple[str, Callable[[], Case]]]:
    yield "copy", copy_bandwidth
    for m in (1, 4, 16, 64, 128, 256, 1024, 4096):
        for n, k in ((14336, 4096), (28672, 8192)):
            both = m in (1, 16, 64)
            yield f"w8a16 {m} {n}", functools.partial(weight_only, m, n, k, E4M3, both)
    yield "w8a16 int8 1", functools.partial(weight_only, 1, 14336, 4096, jnp.int8)
    for m, n, k in ((8192, 8192, 8192), (4096, 12288, 4096)):
        yield f"fp8 tensor {m}x{n}", functools.partial(fp8, m, n, k, "tensor")
        yield f"fp8 row {m}x{n}", functools.partial(fp8, m, n, k, "row")
    for n, k in ((7168, 16384), (4096, 7168), (24576, 1536), (7168, 2048), (2112, 7168)):
        yield f"fp8 block {n}x{k}", functools.partial(fp8, 4096, n, k, "block")
        yield f"fp8 tensor {n}x{k}", functools.partial(fp8, 4096, n, k, "tensor")
    for m in (512, 8192):
        yield f"dynamic {m}", functools.partial(dynamic, m, 8192, 8192)
    yield "int8", functools.partial(int8, 4096, 8192, 8192)
    for grain in ("tensor", "token", "1x128", "128x128"):
        yield f"quantize {grain}", functools.partial(quantize, grain)
    yield "output", outputs
    yield "chain", chain
    for wide in (4096, 14336):
        yield f"train {wide}", functools.partial(train, 8192, 4096, wide)
    yield from _gpu_rows.table()
    yield from _gpu_encode.table()
    yield from _gpu_imma.table()
    yield from _gpu_ragged.table()
    yield from _gpu_mesh.table()
