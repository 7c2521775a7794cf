"""Iterating over a stack of weights, which JAX 0.12 traces as `unstack`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8


@pytest.mark.parametrize(
    ("axis", "tiles"), [(0, {}), (0, {0: 1, 1: 16}), (1, {2: 8}), (2, {0: 16, 2: 1})]
)
def test_each_index_of_a_stack_is_captured(axis, tiles):
    stack = jnp.moveaxis(jax.random.normal(jax.random.key(0), (4, 32, 24)), 0, axis)
    x = jax.random.normal(jax.random.key(1), (5, 32))
    q = jaxfp8.quantize(stack, jnp.int8, tiled_axes=tiles)

    def f(x, q):
        return [x @ w for w in jnp.unstack(jaxfp8.dequantize(q), axis=axis)]

    got = jaxfp8.rewrite(f, strict=True)(x, q)
    assert len(jaxfp8.explain(f)(x, q).matched) == 4
    for y, exact in zip(got, f(x, q), strict=True):
        np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)
