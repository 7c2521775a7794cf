"""A sentence encoder of the sizes of all-MiniLM-L6-v2, whole, on random weights.

`examples/minilm_demo.py` has the real one. This case has short products and much other work between
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _peaks
from jaxfp8._bench import _problems as problems
from jaxfp8._bench._case import Case, faster_than
from jaxfp8._bench._measure import Contender, Missing
from jaxfp8._bench._rotate import one_at_a_time

NAME = "encoder MiniLM, 32 sentences"
LAYERS, WIDTH, HIDDEN, HEADS = 6, 384, 1536, 12
SENTENCES, TOKENS = 32, 16
_SIZES = {
    **dict.fromkeys(("query", "key", "value", "mixed"), (WIDTH, WIDTH)),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
# By recipe: the dtype of weights, and the error bound of embeddings against float64, as a share.
_RECIPES = {
    "W8A16": (jnp.float8_e4m3fn, 0.08),
    "FP8_DYNAMIC": (jnp.float8_e4m3fn, 0.12),
    "INT8": (jnp.int8, 0.05),
}
_FLOAT_ERROR = 1e-4

Layer = dict[str, Any]
Dot = Callable[[jax.Array, Any], jax.Array]


def case() -> Case:
    """Each recipe rewritten, against the same in float32 by XLA."""
    x, layers = _inputs()
    exact = functools.cache(functools.partial(_float64, x, layers))
    ours: dict[str, Contender | Missing] = {}
    theirs: dict[str, Contender | Missing] = {
        "XLA f32": one_at_a_time(
            functools.partial(encode, dot=jnp.matmul),
            [(x, layers)],
            exact=exact,
            error=_FLOAT_ERROR,
        )
    }
    for recipe, (dtype, error) in _RECIPES.items():
        forward = functools.partial(encode, dot=_DOTS[recipe])
        given = [(x, [_quantized(layer, dtype) for layer in layers])]
        rewritten = jaxfp8.rewrite(forward)
        ours[f"jaxfp8 {recipe}"] = one_at_a_time(rewritten, given, exact=exact, error=error)
        theirs[f"XLA {recipe}"] = one_at_a_time(forward, given, exact=exact, error=error)
    rows = SENTENCES * TOKENS
    weights = sum(k * n for k, n in _SIZES.values()) * LAYERS
    kind = _peaks.available("int8")  # the fastest products of all recipes
    return Case(
        name=NAME,
        contenders=ours | theirs,
        flops=2.0 * rows * weights,
        product=kind,
        peaks={kind: _peaks.products(kind, _peaks.threads())},
        goals=tuple(faster_than("XLA f32", 1.0, name) for name in ours),
    )


def encode(x: jax.Array, layers: list[Layer], *, dot: Dot) -> jax.Array:
    """Embeddings [B, 384] of embedded tokens [B, T, 384]; `dot` multiplies by a weight."""
    for layer in layers:
        x = _normed(x + _attention(x, layer, dot))
        x = _normed(x + dot(jax.nn.gelu(dot(x, layer["up"]), approximate=False), layer["down"]))
    return x.mean(1)


def _attention(x: jax.Array, layer: Layer, dot: Dot) -> jax.Array:
    shape = (*x.shape[:2], HEADS, -1)
    query, key, value = (dot(x, layer[name]).reshape(shape) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return dot(mixed.reshape(x.shape), layer["mixed"])


def _normed(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-12)


def _weight_only(x: jax.Array, w: Any) -> jax.Array:
    codes, scale = w
    wide = codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return jnp.dot(x.astype(jnp.bfloat16), wide, preferred_element_type=jnp.float32)


def _dynamic(x: jax.Array, w: Any) -> jax.Array:
    """8 bits on both sides, a scale for each token and each channel."""
    codes, scale = w
    x_codes, x_scale = problems.quantize_rows(x, codes.dtype)
    return problems.total(x_codes, codes) * x_scale * scale


_DOTS: dict[str, Dot] = {"W8A16": _weight_only, "FP8_DYNAMIC": _dynamic, "INT8": _dynamic}


def _inputs() -> tuple[jax.Array, list[Layer]]:
    weights = iter(range(1, 1000))
    layers = [
        {
            name: problems.normal(next(weights), *size) / np.sqrt(size[0])
            for name, size in _SIZES.items()
        }
        for _ in range(LAYERS)
    ]
    return problems.normal(0, SENTENCES, TOKENS, WIDTH), layers


def _quantized(layer: Layer, dtype: Any) -> Layer:
    arrays = {n: jaxfp8.quantize(w, dtype, channelwise_axes=(1,)) for n, w in layer.items()}
    return {name: (q.qvalue, q.scale) for name, q in arrays.items()}


def _float64(x: jax.Array, layers: list[Layer]) -> np.ndarray:
    """The embeddings in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, layers))
        return np.asarray(encode(*wide, dot=jnp.matmul))
