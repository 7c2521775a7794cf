"""Random programs whose dequantized weights cross the borders of regions, and are used twice.

A program multiplies activations by weights out of a pool. Steps change a weight (a view, a mask, a
rule of its own), multiply by one, or open a region (a loop, a branch, a jit, ...) that takes the
pool, does steps of its own, and gives a weight back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rewrite.support import E4M3, F32

Draw = np.random.Generator
ROWS, SIZE, WEIGHTS = 4, 8, 3


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of (activations, scales, codes), and what JAX can do with it.

    Attributes:
      has_reverse: whether it has a reverse-mode derivative: not through a while loop.
      has_forward: whether it has a forward-mode derivative: not through a `custom_vjp`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    has_reverse: bool
    has_forward: bool


@jax.custom_jvp
def bent_product(h: Any, w: Any) -> Any:
    """A product whose tangent in the weight is halved."""
    return jnp.tanh(h @ w)


@bent_product.defjvp
def _bent_product_jvp(primals: Any, tangents: Any) -> Any:
    (h, w), (dh, dw) = primals, tangents
    y = bent_product(h, w)
    return y, (1 - y * y) * (dh @ w + 0.5 * (h @ dw))


@jax.custom_jvp
def bent_weight(w: Any) -> Any:
    """A weight whose tangent is halved."""
    return 1.0 * w


bent_weight.defjvp(lambda p, t: (bent_weight(*p), 0.5 * t[0]))


@jax.custom_vjp
def bent_back(h: Any, w: Any) -> Any:
    """A product whose cotangent for the weight is halved."""
    return jnp.tanh(h @ w)


def _bent_back_forward(h: Any, w: Any) -> Any:
    y = bent_back(h, w)
    return y, (h, w, y)


def _bent_back_backward(kept: Any, ct: Any) -> Any:
    h, w, y = kept
    ct = ct * (1 - y * y)
    return ct @ w.T, 0.5 * (h.T @ ct)


bent_back.defvjp(_bent_back_forward, _bent_back_backward)

VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda w: w.T,
    "negate": lambda w: -w,
    "flip": lambda w: w[::-1],
    "roll": lambda w: jnp.roll(w, 3, 1),
    "mask": lambda w: jnp.where((jnp.arange(SIZE) % 3 > 0)[:, None], w, 0.0),
    "permute": lambda w: w[jnp.array([3, 1, 0, 2, 7, 6, 4, 5])],
    "join": lambda w: jnp.concatenate([w[:, 5:], w[:, :5]], 1),
    "reshape": lambda w: w.reshape(2, 4, SIZE).transpose(1, 0, 2).reshape(SIZE, SIZE),
}
RULES: dict[str, Callable[[Any], Any]] = {
    "stop_gradient": lax.stop_gradient,
    "bent weight": bent_weight,
    "straight through": lambda w: w + lax.stop_gradient(jnp.round(w * 8) / 8 - w),
}
Inner = Callable[..., tuple[Any, Any]]  # from activations and weights to activations and a weight


def _jit(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    return jax.jit(inner)(h, *pool)


def _remat(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    return jax.checkpoint(inner)(h, *pool)


def _cond(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    other = lambda h, *pool: (jnp.cos(h), pool[0])  # noqa: E731
    return lax.cond(jnp.sum(h) > -1.0, inner, other, h, *pool)


def _scan(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    def body(h: Any, w: Any) -> tuple[Any, Any]:
        return inner(h, w, *pool[1:])

    h, stacked = lax.scan(body, h, jnp.stack(pool[:2]))
    return h, stacked[1]


def _map(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    outs, stacked = lax.map(lambda w: inner(h, w), jnp.stack(pool[:2]))
    return outs[0] + 0.5 * outs[1], stacked[0]


def _fori(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    h = lax.fori_loop(0, 2, lambda i, h: inner(h, *pool)[0], h)
    return h, pool[0]


def _while(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    step = lambda c: (c[0] + 1, inner(c[1], *pool)[0])  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, step, (0, h))[1], pool[0]


def _vmap(inner: Inner, h: Any, pool: list[Any]) -> tuple[Any, Any]:
    outs, weights = jax.vmap(lambda row: inner(row[None], *pool))(h)
    return outs[:, 0], weights[1]


REGIONS: dict[str, Callable[[Inner, Any, list[Any]], tuple[Any, Any]]] = {
    "jit": _jit,
    "remat": _remat,
    "cond": _cond,
    "scan": _scan,
    "map": _map,
    "fori": _fori,
    "vmap": _vmap,
    "while": _while,
}


def in_region(region: str, view: str) -> Callable[..., Any]:
    """A function whose weight leaves a region through a view."""

    def fun(x: Any, s: Any, q: Any) -> Any:
        pool = [q[i].astype(x.dtype) * s[i] for i in range(WEIGHTS)]
        h, w = REGIONS[region](lambda h, w, *_: (h, VIEWS[view](w)), x, pool)
        return jnp.sum(jnp.tanh(h @ w) ** 2)

    return fun


def arguments(draw: Draw) -> tuple[Any, ...]:
    """Activations, scales and codes."""
    x = jnp.asarray(draw.normal(size=(ROWS, SIZE)), F32)
    s = jnp.asarray(draw.uniform(0.02, 0.06, size=(WEIGHTS, 1, SIZE)), F32)
    codes = draw.integers(-9, 10, size=(WEIGHTS, SIZE, SIZE))
    return x, s, jnp.asarray(codes, jnp.int8).astype((jnp.int8, E4M3)[int(draw.integers(2))])


class _Steps:
    """The steps of one program, drawn as they are traced."""

    def __init__(self, seed: int, excluded: Sequence[str]) -> None:
        self.draw, self.excluded = np.random.default_rng(seed), excluded

    def pick(self, names: Sequence[str]) -> str:
        names = [name for name in names if name not in self.excluded]
        return names[int(self.draw.integers(len(names)))]

    def do(self, h: Any, pool: list[Any], depth: int) -> tuple[Any, list[Any]]:
        for _ in range(int(self.draw.integers(2, 4))):
            h, pool = self.step(h, list(pool), depth)
        return h, pool

    def step(self, h: Any, pool: list[Any], depth: int) -> tuple[Any, list[Any]]:
        kinds = ["view", "multiply", "multiply", "twice", "rule", "bent product", "bent back"]
        kind = self.pick(kinds + ["region"] * 4 * (depth > 0))
        i = int(self.draw.integers(len(pool)))
        w = pool[i]
        if kind == "view":
            pool[i] = VIEWS[self.pick(list(VIEWS))](w)
        elif kind == "rule":
            pool[i] = RULES[self.pick(list(RULES))](w)
        elif kind == "multiply":
            h = jnp.tanh(h @ w)
        elif kind == "twice":
            h = jnp.tanh(h @ w) + h @ w.T
        elif kind == "bent product":
            h = bent_product(h, w)
        elif kind == "bent back":
            h = bent_back(h, w)
        else:
            region = REGIONS[self.pick(list(REGIONS))]
            h, pool[i] = region(self.inner(depth - 1), h, [w, *pool[:i], *pool[i + 1 :]])
        return h, pool

    def inner(self, depth: int) -> Inner:
        seed = int(self.draw.integers(2**32))

        def inner(h: Any, *pool: Any) -> tuple[Any, Any]:
            steps = _Steps(seed, self.excluded)  # a region may be traced more than once
            h, changed = steps.do(h, list(pool), depth)
            return h, changed[0]

        return inner


def make(seed: int) -> Program:
    """A program and its arguments; it draws the same steps whenever it is traced."""
    draw = np.random.default_rng(seed)
    # One kind of derivative each: a program that has none would show little.
    excluded = (["while"], ["while", "bent back"], ["bent back"])[int(draw.integers(3))]
    args = arguments(draw)

    def fun(x: Any, s: Any, q: Any) -> Any:
        pool = [q[i].astype(x.dtype) * s[i] for i in range(WEIGHTS)]
        h, pool = _Steps(seed + 1, excluded).do(x, pool, 2)
        return jnp.sum(jnp.tanh(h @ pool[0] + h @ pool[-1]) ** 2)

    return Program(fun, args, "while" in excluded, "bent back" in excluded)
