"""Regions that JAX itself makes: their equations hold what its public functions do not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from rewrite.support import count

import jaxfp8

Q = (jnp.arange(64).reshape(8, 8) % 13 - 6).astype(jnp.int8)
S = jnp.linspace(0.02, 0.06, 8)[None]
X = 2 * jnp.sin(jnp.arange(32.0)).reshape(4, 8)


def product(x):
    return x @ (Q.astype(x.dtype) * S)


# A condition that differs from element to element of a batch is an array


def halves(row):
    return lax.while_loop(lambda row: row[0] > 0.1, product, row)


def while_of_a_batch(x):
    return jax.vmap(halves)(x)


def while_of_two_batches(x):
    return jax.vmap(jax.vmap(halves))(jnp.stack([x, x[::-1]]))


def as_many_turns_as_each_row_says(x):
    def turns(number, row):
        return lax.fori_loop(0, number, lambda _, row: jnp.tanh(product(row)), row)

    return jax.vmap(turns)(jnp.arange(4), x)


def while_that_hands_its_weight_on(x):
    def alone(row):
        state = row, Q.astype(row.dtype) * S
        return lax.while_loop(lambda state: state[0][0] > 0.1, step, state)[0]

    def step(state):
        row, weight = state
        return row @ weight, weight

    return jax.vmap(alone)(x)


def while_with_a_key(x):
    def step(state):
        row, key = state
        key, own = jax.random.split(key)
        return product(row) + 0.01 * jax.random.normal(own, row.shape), key

    def alone(row):
        state = row, jax.random.key(0)
        return lax.while_loop(lambda state: state[0][0] > 0.1, step, state)[0]

    return jax.vmap(alone)(x)


LOOPS = [
    while_of_a_batch,
    while_of_two_batches,
    as_many_turns_as_each_row_says,
    while_that_hands_its_weight_on,
    while_with_a_key,
]
loops = pytest.mark.parametrize("fun", LOOPS)


def close(got, exact):
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


@loops
def test_while_whose_condition_is_an_array_is_captured(fun):
    assert count(jaxfp8.rewrite(fun), X) == 1
    close(jaxfp8.rewrite(fun)(X), fun(X))


@loops
def test_while_whose_condition_is_an_array_has_its_derivative(fun):
    value, tangent = jax.jvp(jaxfp8.rewrite(fun), (X,), (jnp.cos(X),))
    exact = jax.jvp(fun, (X,), (jnp.cos(X),))
    close(value, exact[0])
    close(tangent, exact[1])


@loops
def test_vmap_of_a_while_whose_condition_is_an_array(fun):
    pair = jnp.stack([X, -X])
    close(jax.vmap(jaxfp8.rewrite(fun))(pair), jax.vmap(fun)(pair))


@pytest.mark.parametrize("axes", [0, None])
def test_dots_in_a_while_whose_condition_is_an_array_are_rounded(axes):
    def loop(row, w):
        return lax.while_loop(lambda row: row[0] > 0.1, lambda row: row @ w, row)

    w = Q.astype(X.dtype) * S
    ws = w if axes is None else jnp.stack([w] * 4)
    inside = jaxfp8.quantize_dots(jax.vmap(loop, (0, axes)), jaxfp8.FP8_W8A16)
    outside = jax.vmap(jaxfp8.quantize_dots(loop, jaxfp8.FP8_W8A16), (0, axes))
    close(inside(X, ws), outside(X, ws))
    assert len(inside.explain(X, ws).matched) == 1


# The platform chooses a branch when a program is lowered, and the others are not lowered


def double(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("named", ["tpu", "cpu"])
def test_branches_for_other_platforms_need_not_compile_on_this_one(named):
    def f(x):
        if named == "tpu":
            return lax.platform_dependent(x, tpu=lambda x: double(product(x)), default=product)
        return lax.platform_dependent(x, cpu=product, default=lambda x: double(product(x)))

    assert len(jaxfp8.explain(f)(X).matched) == 2
    close(jaxfp8.rewrite(f)(X), product(X))


# Keys of random numbers are arrays of a dtype of their own


def test_keys_are_moved_about_as_they_are():
    def f(x):
        keys = jnp.stack([jax.random.key(1), jax.random.key(2)])
        keys = jnp.where(x[0, :2, None] > 0, jnp.broadcast_to(keys, (2, 2)), keys[::-1])
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape))(keys[:, 0])
        return product(x + noise.sum(0))

    assert count(jaxfp8.rewrite(f), X) == 1
    close(jaxfp8.rewrite(f)(X), f(X))


def test_layers_of_a_scan_may_share_scales_in_pairs():
    stack, scales = jnp.stack([Q, Q.T, -Q, -Q.T]), jnp.stack([S, 2 * S])

    def f(x):
        weights = stack.astype(x.dtype) * jnp.repeat(scales, 2, axis=0)
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    close(jaxfp8.rewrite(f)(X), f(X))
