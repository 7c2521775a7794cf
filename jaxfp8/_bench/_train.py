"""One training step of a transformer's perceptron block, in bfloat16 and in FP8 of several makes.

A step is the value and the gradients of the input and of both kernels: six products. Kernels are
float32, activations bfloat16, as in Flax with `dtype=jnp.bfloat16`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8.linen
from jaxfp8._bench._measure import Contender

_OURS = jaxfp8.linen.Fp8DirectDotGeneralOp
_RECIPES: Mapping[str, Any] = {
    "jaxfp8 delayed": _OURS,
    "jaxfp8 current": functools.partial(_OURS, recipe=jaxfp8.CurrentScaling()),
    "jaxfp8 row": functools.partial(_OURS, recipe=jaxfp8.CurrentScaling(granularity="channel")),
    "flax fp8": nn.Fp8DirectDotGeneralOp,
    "bf16": None,
}
_LARGEST_ERROR = 0.15  # of a gradient, relative, against bfloat16
_STATE = "_overwrite_with_gradient"


class Block(nn.Module):
    """hidden -> wide -> hidden, with GELU between."""

    hidden: int
    wide: int
    product: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.product
        )
        return dense(self.hidden)(nn.gelu(dense(self.wide)(x)))


def step_of(block: Block) -> Callable[..., Any]:
    """The gradients of variables and input for a gradient of the output."""

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        y, pull_back = jax.vjp(block.apply, variables, x)
        return y, *pull_back(g)

    return step


def contenders(tokens: int, hidden: int, wide: int) -> dict[str, Contender]:
    """Steps on the same data; raises AssertionError if a gradient is far from bfloat16's."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = (jax.random.normal(k, (tokens, hidden)).astype(jnp.bfloat16) for k in keys[:2])
    kernels = Block(hidden, wide).init(keys[2], x[:1])
    ran = {
        name: _contender(Block(hidden, wide, cls), kernels, x, g) for name, cls in _RECIPES.items()
    }
    exact = ran["bf16"][1]
    for name, (_, gradients) in ran.items():
        error = _error(gradients, exact)
        assert error < _LARGEST_ERROR, f"{name}: gradients are off by {error:.3f}"
    return {name: contender for name, (contender, _) in ran.items()}


def _contender(block: Block, kernels: Any, x: jax.Array, g: jax.Array) -> tuple[Contender, Any]:
    """The step of a block, and the gradients it gives once its scales know the data."""
    step = jax.jit(step_of(block))
    variables = {**block.init(jax.random.key(0), x[:1]), **kernels}
    for _ in range(2):
        gradients = step(variables, x, g)[1]
        variables = {**kernels, **{name: gradients[name] for name in gradients if name == _STATE}}
    _, of_kernels, of_x = step(variables, x, g)
    return Contender(lambda: step(variables, x, g)), (of_kernels["params"], of_x)


def _error(a: Any, b: Any) -> float:
    """The largest relative error of a leaf, in L2."""

    def of_leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return max(float(e) for e in jax.tree.leaves(jax.tree.map(of_leaf, a, b)))
