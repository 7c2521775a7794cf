"""The cases for the CPU: contenders for one product each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxfp8
from jaxfp8._bench import _peaks, _peers
from jaxfp8._bench import _problems as problems
from jaxfp8._bench._case import Case, Goal, apart, faster_than, no_slower_than, part_of_the_whole
from jaxfp8._bench._measure import Contender, Missing
from jaxfp8._bench._problems import E4M3, Problem
from jaxfp8._bench._rotate import one_at_a_time
from jaxfp8._call.library import ffi
from jaxfp8._value.prepared import why_not

Shape = tuple[int, int, int]  # M, N, K
Contenders = dict[str, Contender | Missing]
Function = Callable[..., Any]

SAME = "XLA, same expression"
PREPARED = "jaxfp8 prepared"
# Error bounds as shares of the norm: results rounded to bfloat16, of bfloat16 terms, in float32.
_ROUNDED, _NARROW, _FLOAT = 4e-3, 1.5e-2, 1e-5
# So many bytes of operands together are larger than any cache.
_FROM_MEMORY = 256 << 20
_MOST_COPIES = 24
# Largest wide weight of a peer in bytes. Several copies of it are needed.
_WIDEST = 1 << 30


def _alone(*operands: Any) -> list[tuple]:
    """One set of operands; it may stay in caches from call to call."""
    return [operands]


def weight_only(
    name: str,
    shape: Shape,
    dtype: Any = E4M3,
    x_dtype: Any = jnp.bfloat16,
    goals: Sequence[Goal] = (),
    from_memory: bool = False,
) -> Case:
    """Float activations, an 8-bit weight with a scale per channel, in both layouts."""
    problem = problems.weight_only(*shape, dtype, x_dtype)
    x, w = problem.x, problem.w
    copies = _copied if from_memory else _alone
    given, nk = copies(x, w.qvalue, w.scale), copies(x, w.qvalue.T, w.scale.T)
    float32 = x_dtype == jnp.float32
    rounded, narrow = (_FLOAT, _FLOAT) if float32 else (_ROUNDED, _NARROW)
    contenders = {
        "jaxfp8": _ours(problems.multiply, given, problem, rounded),
        "jaxfp8 [N,K]": _ours(problems.multiply_nk, nk, problem, rounded),
        PREPARED: _prepared(problem, rounded, copies),
        SAME: _xla(problems.multiply, given, problem, narrow),
        f"{SAME} [N,K]": _xla(problems.multiply_nk, nk, problem, narrow),
        **_wide(problem, copies),
    }
    bytes_each = x.dtype.itemsize
    product = "f32" if float32 else "bf16"
    return _case(name, shape, contenders, product, bytes_each, bytes_each, goals, len(given))


def integers(name: str, shape: Shape, goals: Sequence[Goal] = ()) -> Case:
    """int8 on both sides with scales and bias, in float32, in both layouts."""
    problem = problems.integers(*shape)
    x, w, bias = problem.x, problem.w, problem.bias
    given, codes = _alone(x.qvalue, w.qvalue, x.scale, w.scale, bias), (x.qvalue, w.qvalue)
    nk = _alone(x.qvalue, w.qvalue.T, x.scale, w.scale.T, bias)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_integers, given, problem, _FLOAT),
        "jaxfp8 [N,K]": _ours(problems.multiply_integers_nk, nk, problem, _FLOAT),
        PREPARED: _prepared(problem, _FLOAT),
        SAME: _xla(problems.multiply_integers, given, problem, _FLOAT),
        "XLA int8 -> int32": _xla(_int32, [codes], Problem(x=x.qvalue, w=w.qvalue), 0.0),
        "oneDNN int8": _peers.linear_int8(
            [(x.qvalue, w.qvalue.T)],
            float(x.scale[0, 0]),
            w.scale[0],
            bias,
            exact=problem.exact,
            error=_FLOAT,
        ),
        **_wide(Problem(x=_dequantized(x), w=w)),
    }
    return _case(name, shape, contenders, "int8", 1, 4, goals)


def zero_points(name: str, shape: Shape) -> Case:
    """int8 with zero points on both sides, against the same without.

    int32 zero points are checked when the program runs, see docs/rewrite.md.
    """
    both = problems.integers(*shape, zero_points=True)
    none = both.with_zero_points(lambda zero: None)
    wide = both.with_zero_points(lambda zero: zero.astype(jnp.int32))
    given, plain, looked_at = (_alone(p.x, p.w, p.bias) for p in (both, none, wide))
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_affine, given, both, _FLOAT),
        "jaxfp8 without": _ours(problems.multiply_affine, plain, none, _FLOAT),
        "jaxfp8 int32": _ours(problems.multiply_affine, looked_at, wide, _FLOAT),
        SAME: _xla(problems.multiply_affine, given, both, _FLOAT),
    }
    goals = (no_slower_than("jaxfp8 without", 0.05), faster_than(SAME, 1.0))
    return _case(name, shape, contenders, "int8", 1, 4, goals)


def affine_weight(name: str, shape: Shape) -> Case:
    """float32 activations, a uint8 weight with a zero point per channel, in both layouts."""
    problem = problems.affine_weight(*shape)
    x, w = problem.x, problem.w
    given = _alone(x, w.qvalue, w.scale, w.zero_point)
    nk = _alone(x, w.qvalue.T, w.scale.T, w.zero_point.T)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_affine_weight, given, problem, _FLOAT),
        "jaxfp8 [N,K]": _ours(problems.multiply_affine_weight_nk, nk, problem, _FLOAT),
        SAME: _xla(problems.multiply_affine_weight, given, problem, _FLOAT),
    }
    goals = (faster_than(SAME, 1.0), apart("jaxfp8", "jaxfp8 [N,K]", 0.15))
    return _case(name, shape, contenders, "f32", 4, 4, goals)


def blocks(name: str, shape: Shape) -> Case:
    """An e4m3 weight with a scale per block of 128 x 128, against one per channel."""
    block, channel = (problems.weight_only(*shape, grain=grain) for grain in ("block", "channel"))
    given, plain = (_alone(p.x, p.w.qvalue, p.w.scale) for p in (block, channel))
    nk = _alone(block.x, block.w.qvalue.T, block.w.scale.T)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_blocks, given, block, _ROUNDED),
        "jaxfp8 [N,K]": _ours(problems.multiply_blocks_nk, nk, block, _ROUNDED),
        "jaxfp8 per channel": _ours(problems.multiply, plain, channel, _ROUNDED),
        PREPARED: _prepared(block, _ROUNDED),
        SAME: _xla(problems.multiply_blocks, given, block, _NARROW),
    }
    goals = (no_slower_than("jaxfp8 per channel", 0.15), faster_than(SAME, 1.0))
    return _case(name, shape, contenders, "bf16", 2, 2, goals)


def dynamic(name: str, shape: Shape, dtype: Any) -> Case:
    """bfloat16 activations quantised per token in the call, against quantised ahead."""
    wide = problems.weight_only(*shape, dtype)
    codes, scale = jax.jit(problems.quantize_rows, static_argnums=1)(wide.x, dtype)
    w, problem = wide.w, Problem(x=jaxfp8.QArray(codes, scale), w=wide.w)
    given, ahead = _alone(wide.x, w.qvalue, w.scale), _alone(codes, scale, w.qvalue, w.scale)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_dynamic, given, problem, _ROUNDED),
        "jaxfp8 quantised ahead": _ours(problems.multiply_quantized, ahead, problem, _ROUNDED),
        SAME: _xla(problems.multiply_dynamic, given, problem, _NARROW),
    }
    goals = (part_of_the_whole("jaxfp8 quantised ahead", 0.03), faster_than(SAME, 1.0))
    product = "int8" if dtype == jnp.int8 else "bf16"
    return _case(name, shape, contenders, product, 2, 2, goals)


def odd_weight_only(name: str, shape: Shape, even: Shape) -> Case:
    """Sizes not a multiple of a vector, against the nearest multiple, per operation."""
    odd, aligned = problems.weight_only(*shape), problems.weight_only(*even)
    given, beside = (_alone(p.x, p.w.qvalue, p.w.scale) for p in (odd, aligned))
    share = _size(even) / _size(shape)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply, given, odd, _ROUNDED),
        _per_flop(even): _ours(problems.multiply, beside, aligned, _ROUNDED, units=share),
        SAME: _xla(problems.multiply, given, odd, _NARROW),
    }
    goals = (no_slower_than(_per_flop(even), 0.15), faster_than(SAME, 1.0))
    return _case(name, shape, contenders, "bf16", 2, 2, goals)


def odd_integers(name: str, shape: Shape, even: Shape) -> Case:
    """The same for int8 on both sides."""
    odd, aligned = problems.integers(*shape), problems.integers(*even)
    given, beside = (
        _alone(p.x.qvalue, p.w.qvalue, p.x.scale, p.w.scale, p.bias) for p in (odd, aligned)
    )
    share = _size(even) / _size(shape)
    contenders: Contenders = {
        "jaxfp8": _ours(problems.multiply_integers, given, odd, _FLOAT),
        _per_flop(even): _ours(problems.multiply_integers, beside, aligned, _FLOAT, units=share),
        SAME: _xla(problems.multiply_integers, given, odd, _FLOAT),
    }
    goals = (no_slower_than(_per_flop(even), 0.15), faster_than(SAME, 1.0))
    return _case(name, shape, contenders, "int8", 1, 4, goals)


def avx2(name: str, shape: Shape, goals: Sequence[Goal] = ()) -> Case:
    """A weight-only product on the kernel for AVX2, even if there is a better one."""
    problem = problems.weight_only(*shape)
    given = _alone(problem.x, problem.w.qvalue, problem.w.scale)
    contenders: Contenders = {
        "jaxfp8 avx2": _on_kernel("avx2_f32", given, problem),
        SAME: _xla(problems.multiply, given, problem, _NARROW),
    }
    return _case(name, shape, contenders, "avx2", 2, 2, goals)


def _on_kernel(kernel: str, copies: list[tuple], problem: Problem) -> Contender | Missing:
    """A weight-only product [M, K] x [K, N] on a given kernel."""
    if kernel not in ffi.available_kernels():
        return Missing(f"`{kernel}` does not run on this processor")

    def forced(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
        return problems.on_kernel(kernel, x, jaxfp8.QArray(q, scale))

    return one_at_a_time(forced, copies, exact=problem.exact, error=_ROUNDED)


def _case(
    name: str,
    shape: Shape,
    contenders: Contenders,
    product: str,
    x_bytes: int,
    out_bytes: int,
    goals: Sequence[Goal],
    copies: int = 1,
) -> Case:
    """A product of activations and 8-bit weights, with its limit."""
    m, n, k = shape
    moved = n * k + x_bytes * m * k + out_bytes * m * n
    kind = _peaks.available(product)
    return Case(
        name=name,
        contenders=contenders,
        flops=2.0 * _size(shape),
        bytes=float(moved),
        product=kind,
        peaks=_peaks.limits(kind, moved * copies),
        goals=tuple(goals),
    )


def _size(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def _per_flop(even: Shape) -> str:
    return f"jaxfp8 {'x'.join(map(str, even))}, per FLOP"


def _ours(
    function: Function, copies: list[tuple], problem: Problem, error: float, **more: Any
) -> Contender:
    """An expression rewritten; an error if the rewrite captures nothing."""
    rewritten = jaxfp8.rewrite(function, strict=True)
    return one_at_a_time(rewritten, copies, exact=problem.exact, error=error, **more)


def _prepared(
    problem: Problem, error: float, copies: Callable[..., list[tuple]] = _alone
) -> Contender | Missing:
    """The product with a prepared weight."""
    reason = why_not(problem.w, -2)
    if reason:
        return Missing(reason)
    given = copies(problem.x, jaxfp8.prepare(problem.w), problem.bias)
    return one_at_a_time(_multiply_prepared, given, exact=problem.exact, error=error)


def _multiply_prepared(x: Any, w: jaxfp8.PreparedArray, bias: Any) -> jax.Array:
    return jaxfp8.matmul(x, w, bias=bias)


def _xla(function: Function, copies: list[tuple], problem: Problem, error: float) -> Contender:
    """The same expression without the rewrite."""
    return one_at_a_time(function, copies, exact=problem.exact, error=error)


def _copied(x: jax.Array, w: Any, *more: Any) -> list[tuple]:
    """Enough sets of operands to have weights read from memory."""
    count = min(_MOST_COPIES, max(2, -(-_FROM_MEMORY // w.nbytes)))
    return [(x, jax.tree.map(jnp.copy, w), *more) for _ in range(count)]


def _wide(problem: Problem, copies: Callable[..., list[tuple]] = _alone) -> Contenders:
    """The bare product of the dequantised operands, in wider types."""
    found: Contenders = {}
    for name, dtype, error in (("f32", jnp.float32, _FLOAT), ("bf16", jnp.bfloat16, _NARROW)):
        size = problem.w.size * jnp.dtype(dtype).itemsize
        if size > _WIDEST:
            too_wide = Missing(f"left out: a weight of {size / 1e9:.1f} GB in {name}")
            found |= {f"XLA {name}": too_wide, f"oneDNN {name}": too_wide}
            continue
        x, w = problem.x.astype(dtype), _dequantized(problem.w).astype(dtype)
        more = {"exact": problem.exact, "error": error}
        found[f"XLA {name}"] = one_at_a_time(jnp.matmul, copies(x, w), **more)
        found[f"oneDNN {name}"] = _peers.linear(copies(x, w.T), **more)
    return found


def _int32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot(x, w, preferred_element_type=jnp.int32)


def _dequantized(q: jaxfp8.QArray) -> jax.Array:
    return jaxfp8.dequantize(q, jnp.float32)
