"""Cases of whole steps: a decoder's layers in one program, in bfloat16 and in 8 bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _decoder
from jaxfp8._bench import _problems as problems
from jaxfp8._bench._case import Case, Goal, faster_than
from jaxfp8._bench._decoder import Dot, Layer, Sizes
from jaxfp8._bench._measure import Contender, Missing, attempt

KINDS = ("decode", "prefill")
ROWS = {"decode": (1, 16, 64), "prefill": (2048,)}
LAYERS, CACHE = 8, 1024
LAYOUTS = ("nk", "kn")  # checkpoints have the first
FLOAT, WEIGHT_ONLY, DYNAMIC = "XLA bf16", "jaxfp8 W8A16", "jaxfp8 FP8 dynamic"
# The error allowed against float64, as a share of the norm.
_ERRORS = {"W8A16": 0.05, "FP8": 0.15, "bf16": 0.05}
# Goals of a step of Llama-3-8B on an H100, by rows, as speed relative to bfloat16.
_TO_REACH: Mapping[str, Mapping[int, tuple[float | None, float | None]]] = {
    "decode": {1: (1.8, 1.5), 16: (1.6, 1.5), 64: (1.4, 1.5)},
    "prefill": {2048: (None, 1.5)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The requested step.

    Attributes:
      kind: "decode", a token for each of `rows` texts; or "prefill", a text of `rows` tokens.
      model: a key of `_decoder.MODELS`.
      rows: of each product.
      layers: of the decoder.
      cache: tokens in it, the new one among them; for "decode".
      layout: of the weights, [N, K] ("nk") or [K, N] ("kn").
      as_written: whether XLA's own programs for the 8-bit forms are timed, too.
    """

    kind: str
    model: str
    rows: int
    layers: int
    cache: int
    layout: str = LAYOUTS[0]
    as_written: bool = False

    @property
    def name(self) -> str:
        """The computation in words."""
        past = f", cache {self.cache}" if self.kind == "decode" else ""
        layout = "" if self.layout == LAYOUTS[0] else " [K,N]"
        return f"{self.kind} {self.model}{layout}, {self.layers} layers, M = {self.rows}{past}"

    @property
    def sizes(self) -> Sizes:
        """Of the decoder."""
        return _decoder.MODELS[self.model]


def _as_arrays(held: Any, is_nk: bool) -> Any:
    return jax.tree.map(jnp.transpose, held) if is_nk else held


def _as_qarray(held: Any, is_nk: bool) -> Any:
    q = jaxfp8.QArray(*held)
    return q.T if is_nk else q


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run the decoder.

    Attributes:
      dot: multiplies [..., K] by a weight [K, N].
      change: makes the function to compile.
      narrow: whether weights have 8 bits.
      weight: makes the weight for `dot` from an array or codes and scales; its second argument says
        whether it is [N, K].
    """

    dot: Dot
    change: Callable[[Any], Any] = lambda function: function
    narrow: bool = True
    weight: Callable[[Any, bool], Any] = _as_arrays


def _weight_only(x: jax.Array, w: Any) -> jax.Array:
    return problems.multiply(x, *w)


def _dynamic(x: jax.Array, w: Any) -> jax.Array:
    return problems.multiply_dynamic(x, *w)


def _by_operations(x: jax.Array, w: Any) -> jax.Array:
    """The same by operations of this package, without a rewrite."""
    axes = tuple(range(x.ndim - 1))
    codes = jaxfp8.quantize(x, problems.E4M3, channelwise_axes=axes)
    return jaxfp8.matmul(codes, w, preferred_element_type=x.dtype)


def forms(as_written: bool) -> dict[str, Form]:
    """All of them by name, ours first."""
    named = {
        WEIGHT_ONLY: Form(_weight_only, jaxfp8.rewrite),
        DYNAMIC: Form(_dynamic, jaxfp8.rewrite),
        f"{DYNAMIC}, operations": Form(_by_operations, weight=_as_qarray),
        FLOAT: Form(jnp.matmul, narrow=False),
    }
    if as_written:
        named["XLA W8A16"], named["XLA FP8 dynamic"] = Form(_weight_only), Form(_dynamic)
    return named


def cases(
    steps: Sequence[Step], peak: Callable[[float], Mapping[str, Contender]]
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """A case for each step; `peak` makes a contender to read or copy a number of bytes."""
    for one in steps:
        yield one.name, functools.partial(case, one, peak)


def case(one: Step, peak: Callable[[float], Mapping[str, Contender]]) -> Case:
    """A step in all forms, with a breakdown by kernel."""
    layers = _decoder.random_layers(one.sizes, one.layers)
    narrow = [_quantized(layer, one.layout) for layer in layers]
    wide = [_dequantized(layer) for layer in narrow]
    del layers
    made: dict[str, Contender | Missing] = {}
    moved: dict[str, float] = {}
    for name, form in forms(one.as_written).items():
        weights = narrow if form.narrow else wide
        made[name] = attempt(functools.partial(_contender, one, name, form, weights, narrow))
        moved[name] = float(_bytes(weights) + _bytes(_caches(one, shapes=True)))
    decode = one.kind == "decode"
    products = sum(k * n for k, n in one.sizes.weights.values()) * one.layers
    return Case(
        name=one.name,
        contenders=made,
        flops=0.0 if decode else 2.0 * one.rows * products,
        bytes=moved[WEIGHT_ONLY],
        moved=moved,
        peaks=peak(moved[WEIGHT_ONLY]) if decode else {},
        goals=tuple(_goals(one)) if jax.devices()[0].platform == "gpu" else (),
        against=FLOAT,
        profiled=True,
    )


def _goals(one: Step) -> Iterator[Goal]:
    if one.model != _decoder.DEFAULT or one.layers != LAYERS:
        return
    reach = _TO_REACH[one.kind].get(one.rows, (None, None))
    for name, least in zip((WEIGHT_ONLY, DYNAMIC), reach, strict=True):
        if least is not None:
            yield faster_than(FLOAT, least, name)


def _contender(
    one: Step, name: str, form: Form, weights: list[Layer], narrow: list[Layer]
) -> Contender:
    """A step with a cache of its own, updated in place."""

    def dot(x: jax.Array, w: Any) -> jax.Array:
        return form.dot(x, form.weight(w, one.layout == "nk"))

    forward = functools.partial(_decoder.step, sizes=one.sizes, dot=dot)
    x, position = _inputs(one)
    caches = _caches(one)
    jitted = jax.jit(form.change(forward), donate_argnums=3)
    program = jitted.lower(x, position, weights, caches).compile()

    def enqueue() -> jax.Array:
        nonlocal caches
        y, caches = program(x, position, weights, caches)
        return y

    error = next(error for kind, error in _ERRORS.items() if kind in name)
    exact = functools.partial(_float64, one, narrow)
    return Contender(enqueue, exact=exact, error=error, program=program.as_text)


def _inputs(one: Step) -> tuple[jax.Array, jax.Array]:
    """Tokens, and the position of the first."""
    if one.kind == "decode":
        return _decoder.random_tokens(one.sizes, one.rows, 1), jnp.int32(one.cache - 1)
    return _decoder.random_tokens(one.sizes, 1, one.rows), jnp.int32(0)


def _caches(one: Step, shapes: bool = False) -> Any:
    batch, length = (one.rows, one.cache) if one.kind == "decode" else (1, one.rows)
    make = functools.partial(_decoder.random_caches, one.sizes, one.layers, batch, length)
    return jax.eval_shape(make) if shapes else make()


def _quantized(layer: Layer, layout: str) -> Layer:
    """Codes and scales of the weights, a scale for each column."""

    def of(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jaxfp8.quantize(w, problems.E4M3, channelwise_axes=(1,))
        return (q.qvalue, q.scale) if layout == "kn" else (q.qvalue.T, q.scale.T)

    return {name: of(w) if w.ndim == 2 else w for name, w in layer.items()}


def _dequantized(layer: Layer) -> Layer:
    """The same weights in bfloat16."""

    def of(w: Any) -> jax.Array:
        codes, scale = w
        return (codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)

    return {name: of(w) if isinstance(w, tuple) else w for name, w in layer.items()}


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _float64(one: Step, narrow: list[Layer]) -> np.ndarray:
    """The result in float64."""
    x, position = _inputs(one)
    caches = _caches(one)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, narrow, caches))

        def dot(x: jax.Array, w: Any) -> jax.Array:
            codes, scale = w
            return x @ (codes * scale if one.layout == "kn" else (codes * scale).T)

        x, layers, caches = wide
        step = jax.jit(functools.partial(_decoder.step, sizes=one.sizes, dot=dot))
        return np.asarray(step(x, position, layers, caches)[0])
