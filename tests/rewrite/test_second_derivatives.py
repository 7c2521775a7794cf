"""Second derivatives through dequantized values whose gradient is cut or bent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8

KEYS = jax.random.split(jax.random.key(0), 4)
CODES = jax.random.randint(KEYS[0], (64, 32), -128, 128).astype(jnp.int8)
X = jax.random.normal(KEYS[1], (8, 64))
SCALE = jax.random.uniform(KEYS[2], (1, 32))
DIRECTION = jax.random.normal(KEYS[3], (8, 64))


def close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(b))))


def stopped(s):
    return lax.stop_gradient(CODES.astype(jnp.float32) * s)


@jax.custom_jvp
def bent(s):
    return CODES.astype(jnp.float32) * s


bent.defjvp(lambda p, d: (bent(*p), 0.5 * d[0] * CODES.astype(jnp.float32)))


@jax.custom_vjp
def bent_back(s):
    return CODES.astype(jnp.float32) * s


def _bent_back(_, cotangent):
    return (0.5 * jnp.sum(cotangent * CODES.astype(jnp.float32), 0, keepdims=True),)


bent_back.defvjp(lambda s: (bent_back(s), None), _bent_back)


def curvature(loss):
    """A Hessian-vector product, in the activations and in the scales."""
    along = lambda x, s: jnp.vdot(jax.grad(loss)(x, s), DIRECTION)  # noqa: E731
    return jax.grad(along, (0, 1))(X, SCALE)


@pytest.mark.parametrize("weight", [stopped, bent, bent_back], ids=lambda w: w.__name__)
class TestGradientsThatAreCut:
    def loss(self, weight):
        return lambda x, s: jnp.sum((x @ weight(s)) ** 2)

    def test_the_first_derivative_is_that_of_the_function(self, weight):
        loss = self.loss(weight)
        got = jax.grad(jaxfp8.rewrite(loss), (0, 1))(X, SCALE)
        close(got, jax.grad(loss, (0, 1))(X, SCALE))

    def test_the_second_one_through_the_scales_is_that_of_the_function(self, weight):
        loss = self.loss(weight)
        close(curvature(jaxfp8.rewrite(loss)), curvature(loss))
        close(jaxfp8.rewrite(lambda: curvature(loss))(), curvature(loss))


def test_second_derivatives_beside_rules_of_other_data_are_right():
    loss = lambda x, s: jnp.sum((jax.nn.relu(x) @ (CODES.astype(jnp.float32) * s)) ** 2)  # noqa: E731
    close(curvature(jaxfp8.rewrite(loss)), curvature(loss))
