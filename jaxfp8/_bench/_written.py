"""Products and small programs as people write them, drawn by a seed: what `rewrite` is held to."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import QArray, Quantization
from jaxfp8._bench import _decoder
from jaxfp8._bench._case import Case
from jaxfp8._bench._decoder import Sizes
from jaxfp8._bench._gpu_codes import bf16, rms_norm
from jaxfp8._bench._measure import Contender, Missing, contender
from jaxfp8._bench._products import KINDS, Kind, Shape, normal, quantize_rows, widened

REWRITTEN, WRITTEN = "jaxfp8 rewritten", "as written"
_PRODUCTS, _STACKED = 150, 8  # products drawn; matrices in a stack
_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# N and K of MiniLM, GPT-2, Llama of 1B, 8B and 70B, DeepSeek-V3; and rows.
_WEIGHTS = (
    *((384, 384), (1536, 384), (384, 1536), (768, 768), (3072, 768), (768, 3072)),
    *((2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (6144, 4096), (14336, 4096)),
    *((4096, 14336), (1024, 8192), (28672, 8192), (2112, 7168), (4096, 7168), (7168, 2048)),
)
_ROWS = (1, 1, 2, 4, 8, 16, 16, 32, 48, 64, 100, 128, 256, 512, 1024, 2048, 4096, 8192)
# Forms of a scale, as K x N of what shares one.
_SCALES: dict[str, dict[str, Any]] = {
    "tensor": {"granularity": "tensor"},
    "channel": {},
    "128x128": {"granularity": (128, 128)},
    "groups of 128": {"granularity": (128, 1)},
    "groups of 64": {"granularity": (64, 1)},
    "groups of 32": {"granularity": (32, 1)},
    "mx": {"granularity": (32, 1), "scale_dtype": jnp.float8_e8m0fnu},
    "zero points": {"symmetric": False},
}
_DTYPES = {"e4m3": _E4M3, "e5m2": _E5M2, "int8": jnp.int8, "uint8": jnp.uint8}
_X = {name: jnp.bfloat16 for name in ("bf16", "codes", "rows")}
_X |= {"f16": jnp.float16, "f32": jnp.float32}
_EPILOGUES = ("", "", "bias", "bias gelu", "residual")
_KINDS = ("dense",) * 6 + ("batched", "experts")
# The largest product of a CPU, in operations and in values of weights, and of a GPU.
_LIMITS = {"cpu": (4e9, 3.5e7), "cuda": (3e12, 2.4e8)}
_MODELS = {
    "minilm": Sizes(384, 1536, heads=12, kv_heads=12, head=32),
    "gpt2": Sizes(768, 3072, heads=12, kv_heads=12, head=64),
    "llama 1b": Sizes(2048, 8192, heads=32, kv_heads=8, head=64),
}
_MX = (4096, 4096, 4096), (256, 4096, 14336), (16, 4096, 4096)
_CACHE, _LAYERS, _TOKENS = 256, 2, 256


class Drawn(NamedTuple):
    """A product of `rows` x `k` by `k` x `n`: how it is stored, and what follows."""

    kind: str
    rows: int
    n: int
    k: int
    dtype: str
    scales: str
    x: str
    is_transposed: bool
    epilogue: str

    @property
    def name(self) -> str:
        """The computation in words."""
        layout = "[N,K]" if self.is_transposed else "[K,N]"
        size = f"{self.rows}x{self.n}x{self.k}"
        words = self.kind, self.x, "x", self.dtype, f"by {self.scales}", layout, self.epilogue, size
        return " ".join(filter(None, words))


def cases(platform: str, seed: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Products, then programs."""
    for one in _drawn(platform, seed):
        yield one.name, functools.partial(_product, platform, one)
    yield from _programs(platform)


def _drawn(platform: str, seed: int) -> list[Drawn]:
    """Different products below the limits of a platform."""
    draw, found = random.Random(seed), dict[Drawn, None]()
    operations, values = _LIMITS[platform]
    while len(found) < _PRODUCTS:
        (n, k), rows, kind = draw.choice(_WEIGHTS), draw.choice(_ROWS), draw.choice(_KINDS)
        dtype = draw.choice([*_DTYPES])
        scales = "zero points" if dtype == "uint8" else draw.choice([*_SCALES])
        is_affine = scales == "zero points"
        x = draw.choice(["bf16", "bf16", "f16", "f32"] if is_affine else ["bf16", *_X])
        rest = draw.random() < 0.5, draw.choice(_EPILOGUES)
        copies = 1 if kind == "dense" else _STACKED
        if is_affine and "e" in dtype:
            continue
        if 2.0 * rows * n * k * copies <= operations and n * k * copies <= values:
            found[Drawn(kind, rows, n, k, dtype, scales, x, *rest)] = None
    return list(found)


def _product(platform: str, one: Drawn) -> Case:
    stacked = () if one.kind == "dense" else (_STACKED,)
    shape = (one.n, one.k) if one.is_transposed else (one.k, one.n)
    weight = Quantization(dtype=_DTYPES[one.dtype], **_SCALES[one.scales])
    axis, batch = len(stacked) + one.is_transposed, tuple(range(len(stacked)))
    held = weight.quantize(normal(0, *stacked, *shape) / np.sqrt(one.k), (axis,), batch)
    lines = (_STACKED * one.rows,) if one.kind == "experts" else (*stacked, one.rows)
    x: Any = normal(1, *lines, one.k)
    x = _codes(x, one.dtype) if one.x == "codes" else x.astype(_X[one.x])
    bias = normal(2, one.n) if "bias" in one.epilogue else None
    residual = normal(3, *lines, one.n).astype(jnp.bfloat16) if "res" in one.epilogue else None
    function = functools.partial(_multiplied, one)
    return _case(one.name, platform, function, x, held, bias, residual)


def _codes(x: jax.Array, dtype: str) -> QArray:
    """Activations in 8 bits with one scale."""
    return Quantization(dtype=_DTYPES[dtype], granularity="tensor").quantize(x, (x.ndim - 1,))


def _multiplied(one: Drawn, x: Any, w: QArray, bias: Any, residual: Any) -> jax.Array:
    """The product in plain JAX: codes widened and scaled, then a dot, then what follows it."""
    if one.x == "rows":
        x = QArray(*quantize_rows(x, w.qvalue.dtype))
    dtype = jnp.bfloat16 if isinstance(x, QArray) else x.dtype
    x, wide = widened(x, dtype), widened(w, dtype)
    if one.kind == "experts":
        wide, sizes = wide.mT if one.is_transposed else wide, jnp.full(_STACKED, one.rows)
        y = jax.lax.ragged_dot(x, wide, sizes)
    else:
        batch = tuple(range(x.ndim - 2))
        axes = (x.ndim - 1,), (len(batch) + one.is_transposed,)
        y = jax.lax.dot_general(x, wide, (axes, (batch, batch)))
    y = y if bias is None else y + bias.astype(y.dtype)
    y = jax.nn.gelu(y) if "gelu" in one.epilogue else y
    return y if residual is None else y + residual.astype(y.dtype)


def _programs(platform: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    for model, sizes in _MODELS.items():
        for kind in ("w8a16 e4m3", "w8a16 int8", "dynamic e4m3", "dynamic int8"):
            for rows, cache in ((1, _CACHE), (16, _CACHE), (_TOKENS, 0)):
                name = f"{model} {kind}, {rows} {'texts' if cache else 'tokens'}"
                make = functools.partial(_decoding, platform, name, sizes, KINDS[kind], rows, cache)
                yield name, make
        for recipe in (jaxfp8.DelayedScaling(), jaxfp8.CurrentScaling()):
            name = f"{model} trained, {type(recipe).__name__}"
            yield name, functools.partial(_training, platform, name, sizes, recipe)
    for shape in _MX if platform != "cpu" else ():  # older JAX has it for GPUs alone
        name = f"scaled_matmul {'x'.join(map(str, shape))}"
        yield name, functools.partial(_mx, platform, name, shape)


def _decoding(platform: str, name: str, sizes: Sizes, kind: Kind, rows: int, cache: int) -> Case:
    """Layers of a decoder: a token for each text, or all tokens of one."""
    layers = _decoder.random_layers(sizes, _LAYERS, functools.partial(kind.hold_w, axis=1))
    batch, length = (rows, cache) if cache else (1, rows)
    stored = batch, sizes.kv_heads, length, sizes.head
    caches = [(bf16(0, *stored), bf16(1, *stored)) for _ in layers]
    given = bf16(2, batch, 1 if cache else rows, sizes.width), jnp.int32(max(cache - 1, 0))
    dot = functools.partial(kind.expression, bias=None, axis=1)
    step = functools.partial(_decoder.forward, sizes=sizes, dot=dot)
    return _case(name, platform, step, given, layers, caches, is_program=True)


def _training(platform: str, name: str, sizes: Sizes, recipe: Any) -> Case:
    """A norm, two products with an activation between, and the gradients of both weights."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        (up, down), numbers = weights, (((1,), (0,)), ((), ()))
        dot = functools.partial(jaxfp8.fp8_dot_general, dimension_numbers=numbers, recipe=recipe)
        y = rms_norm(x, jnp.ones(sizes.width, x.dtype))
        y = x + dot(jax.nn.gelu(dot(y, up, state=states[0])), down, state=states[1])
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    is_delayed = isinstance(recipe, jaxfp8.DelayedScaling)
    states = [jaxfp8.ScalingState.init(recipe) if is_delayed else None for _ in range(2)]
    weights = [bf16(0, sizes.width, sizes.hidden), bf16(1, sizes.hidden, sizes.width)]
    weights = [w / np.sqrt(w.shape[0]).astype(w.dtype) for w in weights]
    x = bf16(2, 4 * _TOKENS, sizes.width)
    return _case(name, platform, jax.grad(loss), weights, x, is_program=True)


def _mx(platform: str, name: str, shape: Shape) -> Case:
    """A product of blocks of 32, as JAX has it."""
    (m, n, k), mx = shape, Quantization(**_SCALES["mx"])
    x, w = (mx.quantize(normal(i, size, k), (1,)) for i, size in enumerate((m, n)))
    operands = (array[None] for array in (x.qvalue, w.qvalue, x.scale, w.scale))
    return _case(name, platform, jax.nn.scaled_matmul, *operands)


def _case(
    name: str, platform: str, function: Callable[..., Any], *operands: Any, is_program: bool = False
) -> Case:
    """A function rewritten, and as written; programs are called one after the other."""
    made: dict[str, Contender | Missing] = {}
    for label, one in ((REWRITTEN, jaxfp8.rewrite(function)), (WRITTEN, function)):
        if is_program and platform != "cpu":
            jitted = jax.jit(one)
            made[label] = Contender(functools.partial(jitted, *operands))
        else:
            made[label] = contender(platform, one, *operands)
    sites = jaxfp8.explain(function)(*operands).sites
    return Case(name=name, contenders=made, note=_note(sites, platform))


def _note(sites: Sequence[Any], platform: str) -> str:
    """How many dots became calls, by which kernels, and why the first other one did not."""
    if not sites:
        return "no dot of its own"
    calls = sum(site.rewritten or site.already for site in sites)
    kernels = sorted({site.kernels.get(platform, "") for site in sites} - {""})
    why = [site.reason for site in sites if site.reason][:1]
    return ": ".join([f"{calls} of {len(sites)} dots", ", ".join(kernels), *why])
