"""Views of dequantized values move scales as they move the 8-bit data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
import jaxfp8.testing

KEYS = jax.random.split(jax.random.key(0), 4)
CODES = jax.random.randint(KEYS[0], (64, 32), -128, 128).astype(jnp.int8)
X = jax.random.normal(KEYS[1], (8, 64))


def close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(("start", "negative"), [(-70, True), (-3, False), (-3, True), (60, True)])
def test_scales_are_sliced_where_the_codes_are(start, negative):
    rows = jax.random.uniform(KEYS[3], (64, 1))

    def f(i):
        wide = CODES.astype(jnp.float32) * rows
        part = lax.dynamic_slice(wide, (i, 0), (16, 32), allow_negative_indices=negative)
        return X[:, :16] @ part

    jaxfp8.testing.assert_rewritten(f, jnp.int32(start))
    close(jaxfp8.rewrite(f)(jnp.int32(start)), f(jnp.int32(start)))


@pytest.mark.parametrize("layer", [-7, -5, -1, 2, 9])
def test_a_layer_has_its_own_scales_whatever_the_index(layer):
    stack = jnp.stack([CODES, CODES + 1, CODES + 2, CODES + 3])
    scales = jax.random.uniform(KEYS[2], (4, 1, 32))

    def f(i):
        wide = stack.astype(jnp.float32) * scales
        return X @ lax.dynamic_index_in_dim(wide, i, keepdims=False)

    close(jaxfp8.rewrite(f)(jnp.int32(layer)), f(jnp.int32(layer)))


def test_picked_rows_stay_float32_where_float64_is_on():
    def model(i, x, q, scale):
        return x @ jnp.take(q.astype(jnp.float32) * scale, i, axis=0)

    with jax.enable_x64(True):
        q, scale = jnp.ones((32, 8), jnp.int8), jnp.ones((32, 1), jnp.float32)
        args = jnp.array([1, 5, 7]), jnp.ones((4, 3), jnp.float32), q, scale
        assert not jaxfp8.explain(model)(*args).missed
        assert jaxfp8.rewrite(model)(*args).dtype == jnp.float32
