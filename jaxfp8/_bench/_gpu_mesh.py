"""The cases for two GPUs or more: products and training steps on explicit and automatic axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8
from jaxfp8._bench._case import Case
from jaxfp8._bench._measure import Contender

_AXES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
_NN = (((1,), (0,)), ((), ()))
_MANY = 8  # products in one program if one is short beside its dispatch
_LARGE = 8192, 28672  # K and N of the weights
# The split of a training step: activations, first and second weight, hidden activations.
_SPLITS = {
    "data": (P("d", None), P(None, None), P(None, None)),
    "tensor": (P(None, None), P(None, "d"), P("d", None)),
}


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md; none on one device."""
    if jax.device_count() < 2:
        return
    for m in (16, 4096):
        yield f"mesh w8a16 {m}", functools.partial(columns, m)
    for split in _SPLITS:
        yield f"mesh train {split}", functools.partial(train, split)


def _mesh(axes: str) -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(_AXES[axes],))


def _draw(mesh: Mesh, spec: P, seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values, made on their devices."""
    make = lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32)  # noqa: E731
    placed = NamedSharding(mesh, spec)
    scale = 1 / np.sqrt(shape[0]) if seed else 1
    with jax.set_mesh(mesh):
        return jax.jit(lambda: (make() * scale).astype(dtype), out_shardings=placed)()


def _contender(mesh: Mesh, function: Any, *arguments: Any) -> Contender:
    compiled = jax.jit(function)

    def enqueue() -> Any:
        with jax.set_mesh(mesh):
            return compiled(*arguments)

    return Contender(enqueue)


def _with_each(mesh: Mesh, function: Any, x: jax.Array, weights: list[Any]) -> Contender:
    """One program of a product with each weight; its unit is one product."""
    many = _contender(mesh, lambda x, ws: [function(x, w) for w in ws], x, weights)
    return dataclasses.replace(many, units=len(weights))


def columns(m: int) -> Case:
    """W8A16 with the columns of the weight split."""
    (k, n), contenders = _LARGE, {}
    count = _MANY if m <= 128 else 2
    quantise = jax.jit(functools.partial(jaxfp8.quantize, channelwise_axes=(1,)))
    matmul = functools.partial(jaxfp8.matmul, preferred_element_type=jnp.bfloat16)
    for axes in _AXES:
        mesh = _mesh(axes)
        x = _draw(mesh, P(None, None), 0, m, k)
        wide = [_draw(mesh, P(None, "d"), 1 + i, k, n) for i in range(count)]
        with jax.set_mesh(mesh):
            held = [quantise(w) for w in wide]
        contenders[f"jaxfp8 {axes}"] = _with_each(mesh, matmul, x, held)
        contenders[f"xla bf16 {axes}"] = _with_each(mesh, jnp.matmul, x, wide)
    moved = n * k + 2.0 * m * (n + k)
    flops = 2.0 * m * n * k if m > 128 else 0.0
    return Case(name=f"columns split, M={m}", contenders=contenders, bytes=moved, flops=flops)


def train(split: str, tokens: int = 8192, hidden: int = 4096, wide: int = 14336) -> Case:
    """A training step of a perceptron block: value, gradients of the input and both weights."""
    contenders = {}
    for axes in _AXES:
        mesh = _mesh(axes)
        of_x, of_up, of_down = _SPLITS[split]
        x = _draw(mesh, of_x, 0, tokens, hidden)
        weights = _draw(mesh, of_up, 1, hidden, wide), _draw(mesh, of_down, 2, wide, hidden)
        for name, dot in (("jaxfp8 current", _fp8), ("xla bf16", jax.lax.dot_general)):
            step = functools.partial(_step, dot, of_x if axes == "explicit" else None)
            contenders[f"{name} {axes}"] = _contender(mesh, step, x, *weights)
    flops = 12.0 * tokens * hidden * wide
    return Case(name=f"train, {split} split", contenders=contenders, flops=flops)


def _fp8(x: jax.Array, w: jax.Array, numbers: Any, out_sharding: Any = None) -> jax.Array:
    recipe = jaxfp8.CurrentScaling()
    return jaxfp8.fp8_dot_general(x, w, numbers, recipe=recipe, out_sharding=out_sharding)


def _step(dot: Any, out: P | None, x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    """Gradients of the mean square of the output."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y = dot(jax.nn.gelu(dot(x, up, _NN)), down, _NN, out_sharding=out)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)
