"""The cases of single products: kinds of operands, sizes, and the ways to multiply them.

Tests compute every contender's result from these, so nothing wrong is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import QArray, Quantization, Recipe
from jaxfp8._bench import _peaks, _peers
from jaxfp8._bench._case import Case
from jaxfp8._bench._measure import (
    BEYOND_CACHES,
    MOST_COPIES,
    NO_TRITON,
    Contender,
    Missing,
    contender,
)
from jaxfp8._bench._ways import INT8, Way
from jaxfp8._call.ops.slower import FASTER
from jaxfp8._value.prepared import why_not

Shape = tuple[int, int, int]  # M, N, K
Contenders = dict[str, Contender | Missing]
BLOCK = 128
_NT = (((1,), (1,)), ((), ()))
SAME, PREPARED = "XLA, same expression", "jaxfp8 prepared"
# Largest wide weight of a peer in bytes. Several copies of it are needed.
_WIDEST = 1 << 30
# Small products per program of a GPU, enough to hide its dispatch; and the rows of one.
_MANY, _FEW_ROWS = 16, 256
# With more rows, products limit a GPU and not its memory.
_BY_MEMORY = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind(Way):
    """A way to multiply, and what it is timed beside."""

    has_bias: bool = False  # whether a bias in float32 is added
    rounds_in_call: bool = False  # whether the timed call quantizes `x`, too
    has_peers: bool = False  # whether wider products and oneDNN are timed on the CPU

    @property
    def limit(self) -> str:
        """The kind of products on a CPU, a key of peaks."""
        weight, activation = self.recipe.weight, self.recipe.activation
        if activation is not None and weight is not None and weight.dtype == jnp.int8:
            return "int8"
        return "f32" if self.x_dtype == jnp.float32 else "bf16"

    def operation(self, x: Any, w: Any, bias: Any, axis: int, **more: Any) -> jax.Array:
        """The product by the operations of this package; `axis` of `w` is summed over."""
        x = self.hold_x(x) if self.rounds_in_call else x
        return self.multiply(x, w, axis=axis, bias=bias, **more)

    def expression(self, x: Any, w: Any, bias: Any, axis: int) -> jax.Array:
        """The same as people write it in JAX; the last axis of `x` is summed over."""
        numbers = (((len(x.shape) - 1,), (axis,)), ((), ()))
        if self.rounds_in_call:
            x = QArray(*quantize_rows(x, w.qvalue.dtype))
        if _scales_follow_sums(x) and _scales_follow_sums(w):
            y = _sums(x.qvalue, w.qvalue, numbers) * x.scale * w.scale.reshape(1, -1)
        else:
            dtype = jnp.float32 if self.has_bias else self.x_dtype
            y = jax.lax.dot_general(widened(x, dtype), widened(w, dtype), numbers)
        return (y if bias is None else y + bias).astype(self.out_dtype)


def _scales_follow_sums(held: Any) -> bool:
    """Whether an operand has scales that its product multiplies into the sums."""
    is_affine = not isinstance(held, QArray) or held.zero_point is not None
    return not is_affine and 1 in held.scale.shape


def quantize_rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Codes [M, K] and scales [M, 1] of activations, in plain JAX."""
    x = x.astype(jnp.float32)
    top = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-12) / top
    steps = jnp.round(x / scale) if dtype == jnp.int8 else x / scale
    return jnp.clip(steps, -top, top).astype(dtype), scale


def _sums(x: jax.Array, w: jax.Array, numbers: Any) -> jax.Array:
    """The product of codes in float32: exact sums of int8, products of bfloat16 of FP8."""
    if w.dtype == jnp.int8:
        sums = jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32)


def widened(q: Any, dtype: Any) -> jax.Array:
    """Codes, less their zero points, times their scales; a float array as it is."""
    if not isinstance(q, QArray):
        return q
    values = q.qvalue.astype(dtype)
    if q.zero_point is not None:
        values = values - _spread(q.zero_point, q.shape).astype(dtype)
    return values * _spread(q.scale, q.shape).astype(dtype)


def _spread(shared: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per block as one per element; the last block of an axis may be cut short."""
    for axis, (count, size) in enumerate(zip(shared.shape, shape, strict=True)):
        if count not in (1, size):
            block = 1 << (-(-size // count) - 1).bit_length()  # blocks are powers of two
            whole = jnp.repeat(shared, block, axis)
            shared = jax.lax.slice_in_dim(whole, 0, size, axis=axis)
    return shared


_BF16: dict[str, Any] = {"x_dtype": jnp.bfloat16, "out_dtype": jnp.bfloat16}
_TENSOR = jaxfp8.FP8_STATIC.weight
_INT8_TENSOR = dataclasses.replace(INT8, granularity="tensor")
_AFFINE, _AFFINE_TENSOR = (dataclasses.replace(q, symmetric=False) for q in (INT8, _INT8_TENSOR))
_UINT8 = dataclasses.replace(_AFFINE, dtype=jnp.uint8)
_BLOCKS = jaxfp8.FP8_BLOCK


def _kind(name: str, weight: Any = None, activation: Any = None, **more: Any) -> Kind:
    recipe = Recipe(name=name, weight=weight or Quantization(), activation=activation)
    return Kind(name=name, recipe=recipe, **more)


_ALL = (
    _kind("w8a16 e4m3", **_BF16, has_peers=True),
    _kind("w8a16 int8", INT8, **_BF16, has_peers=True),
    _kind("w8a32 e4m3", has_peers=True),
    _kind("int8", INT8, _INT8_TENSOR, has_bias=True, has_peers=True),
    _kind("zero points int8", _AFFINE, _AFFINE_TENSOR, has_bias=True),
    _kind("zero points w8a32 uint8", _UINT8),
    _kind("blocks e4m3", _BLOCKS.weight, **_BF16),
    _kind("dynamic e4m3", None, Quantization(), **_BF16, rounds_in_call=True),
    _kind("dynamic int8", INT8, INT8, **_BF16, rounds_in_call=True),
    _kind("fp8 tensor", _TENSOR, _TENSOR, **_BF16),
    _kind("fp8 channel", None, Quantization(), **_BF16),
    _kind("fp8 block", _BLOCKS.weight, _BLOCKS.activation, **_BF16),
    Kind(name="imma", recipe=Recipe(name="FP8 in int8", compute="int8"), **_BF16),
)
KINDS = {kind.name: kind for kind in _ALL}


def product(name: str, shape: Shape, platform: str = "cpu", from_memory: bool = False) -> Case:
    """A product M x N x K of a kind.

    On a CPU `jaxfp8` is the rewritten expression on a weight [K, N], on a GPU the operation on a
    weight [N, K]. The other layout follows. An expression that `rewrite` leaves to XLA makes room
    for the operation: the kernel is timed all the same.
    """
    kind, on_cpu = KINDS[name], platform == "cpu"
    x, w, bias = _operands(kind, shape)
    codes: Any = kind.hold_x(x)
    w_nk: Any = kind.hold_w(w.T, 1)
    given: Any = x if kind.rounds_in_call else codes
    layouts: list[tuple[str, Any, int]] = [("[K,N]", kind.hold_w(w), 0), ("[N,K]", w_nk, 1)]
    if not on_cpu:
        layouts.reverse()
    _, held, axis = layouts[0]
    copies = _copies(shape, on_cpu, from_memory)
    time = functools.partial(contender, platform, least=copies)
    contenders: Contenders = {}
    for other, (layout, stored, summed) in enumerate(layouts):
        label = f" {layout}" if other else ""
        written = functools.partial(kind.expression, axis=summed)
        operation = functools.partial(kind.operation, axis=summed)
        rewrites = on_cpu and not _is_left_to_xla(written, given, stored, bias)
        ours = jaxfp8.rewrite(written, strict=True) if rewrites else operation
        contenders[f"jaxfp8{label}"] = time(ours, given, stored, bias)
        if kind.recipe.compute is None:
            contenders[f"{SAME}{label}"] = time(written, given, stored, bias)
    if kind.rounds_in_call:
        ahead = dataclasses.replace(kind, rounds_in_call=False).operation
        multiply = functools.partial(ahead, axis=axis)
        contenders["jaxfp8 quantized ahead"] = time(multiply, codes, held, bias)
    wide = values(codes), values(w_nk).T
    if on_cpu:
        contenders[PREPARED] = _prepared(kind, time, given, held, bias)
        contenders |= _wide_on_cpu(time, *wide) if kind.has_peers else {}
    else:
        contenders |= _on_gpu(kind, time, given, held, bias, wide)
    if kind.name == "int8":
        contenders |= _integers(time, given, w_nk, bias, on_cpu)
    m, n, k = shape
    x_bytes = (codes if kind.limit == "int8" else x).dtype.itemsize
    moved = n * k + x_bytes * m * k + jnp.dtype(kind.out_dtype).itemsize * m * n
    limit, by_memory = _peaks.available(kind.limit) if on_cpu else "", m <= _BY_MEMORY
    return Case(
        name=f"{name}{' from memory' if from_memory else ''} {'x'.join(map(str, shape))}",
        contenders=contenders,
        flops=0.0 if by_memory and not on_cpu else 2.0 * m * n * k,
        bytes=float(moved),
        product=limit,
        peaks=_peaks.limits(limit, moved * copies) if on_cpu else _peaks.of_gpu(by_memory),
        exact=functools.partial(_exact, *wide, bias),
    )


def _is_left_to_xla(written: Any, *operands: Any) -> bool:
    """Whether `rewrite` takes XLA's program to be faster here."""
    return any(site.reason.startswith(FASTER) for site in jaxfp8.explain(written)(*operands).missed)


def _exact(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> np.ndarray:
    """The product in float64."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return y if bias is None else y + np.asarray(bias, np.float64)


def _operands(kind: Kind, shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Floats [M, K] and [K, N], and a bias [N]."""
    m, n, k = shape
    x = normal(0, m, k).astype(kind.x_dtype)
    return x, normal(1, k, n) / np.sqrt(k), normal(2, n) if kind.has_bias else None


def normal(seed: int, *shape: int) -> jax.Array:
    """Standard normal numbers in float32, made on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def _copies(shape: Shape, on_cpu: bool, from_memory: bool) -> int:
    """The least number of copies of the operands."""
    m, n, k = shape
    if on_cpu:
        return min(MOST_COPIES, 1 + BEYOND_CACHES // (n * k)) if from_memory else 1
    return _MANY if m <= _FEW_ROWS else 2


def values(held: Any) -> jax.Array:
    """The numbers behind codes, in float32; a float array as it is."""
    return jaxfp8.dequantize(held, jnp.float32) if isinstance(held, QArray) else held


def _prepared(
    kind: Kind, time: Any, x: Any, w: QArray, bias: jax.Array | None
) -> Contender | Missing:
    """The product with a prepared weight."""
    if reason := why_not(w, -2):
        return Missing(reason, failed=False)
    return time(functools.partial(kind.operation, axis=0), x, jaxfp8.prepare(w), bias)


def _wide_on_cpu(time: Any, x: jax.Array, w: jax.Array) -> Contenders:
    """The bare product of the dequantized operands, in wider types."""
    peers: Contenders = {}
    for name, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16)):
        size = w.size * jnp.dtype(dtype).itemsize
        if size > _WIDEST:
            too_wide = Missing(f"left out: a weight of {size / 1e9:.1f} GB in {name}")
            peers |= {f"XLA {name}": too_wide, f"oneDNN {name}": too_wide}
            continue
        operands = x.astype(dtype), w.astype(dtype)
        peers[f"XLA {name}"] = time(jnp.matmul, *operands)
        peers[f"oneDNN {name}"] = _peers.linear(operands[0], operands[1].T)
    return peers


def _on_gpu(kind: Kind, time: Any, x: Any, w: QArray, bias: Any, wide: tuple) -> Contenders:
    """The product of 16 bits; of FP8 with a scale each, our exact sums and XLA's cuBLASLt, too."""
    peers = {"XLA bf16": time(_in_bf16, *(array.astype(jnp.bfloat16) for array in wide))}
    if kind.name == "fp8 tensor":
        promoted = functools.partial(kind.operation, axis=1, precision="highest")
        written = functools.partial(kind.expression, axis=1)
        peers["jaxfp8 promoted"] = time(promoted, x, w, bias)
        peers["XLA, without Triton"] = time(written, x, w, bias, options=NO_TRITON)
    return peers


def _integers(time: Any, x: QArray, w: QArray, bias: Any, on_cpu: bool) -> Contenders:
    """The bare product of the codes [M, K] and [N, K], and oneDNN's with scales and bias."""

    def bare(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, _NT, preferred_element_type=jnp.int32)

    peers: Contenders = {"XLA int8 -> int32": time(bare, x.qvalue, w.qvalue)}
    if on_cpu:
        scale = float(x.scale.reshape(()))
        peers["oneDNN int8"] = _peers.linear_int8(x.qvalue, w.qvalue, scale, w.scale[:, 0], bias)
    return peers


def _in_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.bfloat16)
