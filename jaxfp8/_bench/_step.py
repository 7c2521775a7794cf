"""Cases of whole steps: a decoder's layers in one program, in 8 bits and in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfp8
from jaxfp8._bench import _decoder, _peaks
from jaxfp8._bench._case import Case
from jaxfp8._bench._decoder import Sizes
from jaxfp8._bench._gpu_codes import bf16
from jaxfp8._bench._measure import Contender, Missing, attempt
from jaxfp8._bench._products import KINDS, Kind, values
from jaxfp8._bench._ways import FLOATS

# Texts of a token each for "decode", tokens of one text for the others.
ROWS = {"decode": (1, 16, 64), "prefill": (2048,), "train": (2048,), "remat": (2048,)}
LAYERS, CACHE, MODEL = 8, 1024, "llama3-8b"
_BF16, _TOKENS = "XLA bf16", 1000  # the seed of tokens
_FORMS = {
    "jaxfp8 W8A16": KINDS["w8a16 e4m3"],
    "jaxfp8 FP8 dynamic": KINDS["dynamic e4m3"],
    _BF16: Kind(name="bf16", recipe=FLOATS, x_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16),
}
_DELAYED = jaxfp8.DelayedScaling()
_RECIPES: dict[str, jaxfp8.DelayedScaling | jaxfp8.CurrentScaling] = {
    "delayed": _DELAYED,
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="channel"),
    "block": jaxfp8.CurrentScaling(granularity="block"),
}
DOTS: dict[str, Callable[..., jax.Array]] = {
    **{
        f"jaxfp8 {name}": functools.partial(jaxfp8.fp8_dot_general, recipe=recipe)
        for name, recipe in _RECIPES.items()
    },
    _BF16: jax.lax.dot_general,
}
# A name, a function of input, weights and a state, and these two. It returns the next state, too.
_Form = tuple[str, Callable[..., Any], Any, Any]


class Step(NamedTuple):
    """A key of `ROWS`, one of `MODELS`, rows of each product, layers, tokens in decode's cache."""

    kind: str
    model: str
    rows: int
    layers: int
    cache: int
    platform: str

    @property
    def name(self) -> str:
        """The computation in words."""
        past = f", cache {self.cache}" if self.kind == "decode" else ""
        return f"{self.kind} {self.model}, {self.layers} layers, M = {self.rows}{past}"


def case(one: Step) -> Case:
    """A step in all forms."""
    sizes, in_training = _decoder.MODELS[one.model], one.kind in ("train", "remat")
    by_memory, on_cpu = one.kind == "decode", one.platform == "cpu"
    shape = (one.rows, 1) if by_memory else (1, one.rows)
    given = bf16(_TOKENS, *shape, sizes.width), jnp.int32(one.cache - 1 if by_memory else 0)
    made: dict[str, Contender | Missing] = {}
    moved: dict[str, float] = {}
    for name, step, weights, state in (_training if in_training else inference)(one, sizes):
        moved[name] = float(sum(leaf.nbytes for leaf in jax.tree.leaves((weights, state))))
        made[name] = attempt(functools.partial(contender, step, given, weights, state))
    products = sum(n * k for n, k in sizes.weights.values()) * one.layers
    flops = (6.0 if in_training else 2.0) * one.rows * products
    least, product = min(moved.values()), _peaks.available("bf16") if on_cpu else ""
    return Case(
        name=one.name,
        contenders=made,
        flops=0.0 if by_memory and not on_cpu else flops,
        bytes=least,
        moved=moved,
        temporary={n: c.temporary for n, c in made.items() if isinstance(c, Contender)},
        product=product,
        peaks=_peaks.limits(product, int(least)) if on_cpu else _peaks.of_gpu(by_memory),
    )


def contender(step: Callable[..., Any], given: Any, weights: Any, state: Any) -> Contender:
    """A step whose state is updated in place."""
    program = jax.jit(step, donate_argnums=2).lower(given, weights, state).compile()
    return compiled(program, given, weights, state)


def compiled(program: Any, given: Any, weights: Any, state: Any) -> Contender:
    """A compiled step; a call overwrites the state of the one before."""

    def enqueue() -> Any:
        nonlocal state
        y, state = program(given, weights, state)
        return y

    temporary = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
    return Contender(enqueue, program=str(program.as_text()), temporary=temporary)


def inference(one: Step, sizes: Sizes) -> Iterator[_Form]:
    """Products as people write them, on weights [N, K]; each form has a cache of its own."""
    hold = functools.partial(KINDS["w8a16 e4m3"].hold_w, axis=1)
    narrow = _decoder.random_layers(sizes, one.layers, hold)
    batch, length = (one.rows, one.cache) if one.kind == "decode" else (1, one.rows)
    shape = batch, sizes.kv_heads, length, sizes.head
    for name, kind in _FORMS.items():
        caches = [(bf16(0, *shape), bf16(1, *shape)) for _ in narrow]
        dot = functools.partial(kind.expression, bias=None, axis=1)
        step = functools.partial(_decoder.forward, sizes=sizes, dot=dot)
        if name == _BF16:
            wide = [{n: values(w).astype(jnp.bfloat16) for n, w in own.items()} for own in narrow]
            yield name, step, wide, caches
        else:
            yield name, jaxfp8.rewrite(step), narrow, caches


def _training(one: Step, sizes: Sizes) -> Iterator[_Form]:
    """Gradients of float32 weights; the state has the scales of all products."""
    weights = _decoder.random_layers(sizes, one.layers, lambda w: w)
    for name, dot in DOTS.items():
        make = jaxfp8.ScalingState.init if "delayed" in name else lambda recipe: None
        scales = [{n: make(_DELAYED) for n in sizes.weights} for _ in weights]
        run: Callable[..., jax.Array] = unrolled
        held: tuple[Any, Any] = weights, scales
        if one.kind == "remat":
            policy = None if name == _BF16 else jaxfp8.codes_saveable
            run = functools.partial(scanned, functools.partial(jax.checkpoint, policy=policy))
            stack = functools.partial(jax.tree.map, lambda *layers: jnp.stack(layers))
            held = stack(*weights), stack(*scales)
        step = functools.partial(gradients, run, sizes, dot)
        yield name, (step if name == _BF16 else jaxfp8.rewrite(step)), *held


def _trained(dot: Callable[..., jax.Array], x: jax.Array, held: Any) -> jax.Array:
    """The product with a weight, given with the scales of the product or None."""
    w, scales = held
    return dot(x, w.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), scales)


def gradients(
    run: Any,
    sizes: Sizes,
    product: Callable[..., jax.Array],
    given: Any,
    weights: Any,
    scales: Any,
    placed: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> Any:
    """Gradients of the mean square; the gradient of scales is the next ones.

    `run` goes through the layers: `unrolled`, or `scanned`. `placed` shards what leaves a layer.
    """
    dot = functools.partial(_trained, product)

    def layer(x: jax.Array, held: Any) -> tuple[jax.Array, None]:
        w, states = held
        pairs = w | {name: (w[name], state) for name, state in states.items()}
        y, _ = _decoder.forward((x, given[1]), [pairs], [None], sizes=sizes, dot=dot)
        return placed(y), None

    def loss(weights: Any, scales: Any) -> jax.Array:
        y = run(layer, given[0], (weights, scales))
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss, (0, 1))(weights, scales)


def unrolled(layer: Callable[..., Any], x: jax.Array, held: Any) -> jax.Array:
    """A layer after the other, each compiled."""
    for own in zip(*held, strict=True):
        x, _ = layer(x, own)
    return x


def scanned(remat: Any, layer: Callable[..., Any], x: jax.Array, held: Any) -> jax.Array:
    """Stacked layers under a scan, each rematerialised."""
    y, _ = jax.lax.scan(remat(layer), x, held)
    return y
