"""The gradient of quantize_dots is straight-through, and custom rules are kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.float_programs import (
    STACK,
    W,
    X,
    Y,
    by_name,
    in_custom_jvp,
    in_custom_vjp,
    normal,
    rounded,
    scanned,
)

import jaxfp8


def straight_through(x, w, recipe):
    def round_(value, quantization, contracting):
        if quantization is None:
            return value
        return value + jax.lax.stop_gradient(rounded(value, quantization, contracting) - value)

    return round_(x, recipe.activation, (1,)) @ round_(w, recipe.weight, (0,))


@by_name(argvalues=[jaxfp8.FP8_W8A16, jaxfp8.FP8_BLOCK, jaxfp8.INT8_ASYMMETRIC])
def test_gradient_is_straight_through_at_the_rounded_operands(recipe):
    g = jaxfp8.quantize_dots(lambda x, w: jnp.tanh(x @ w), recipe)
    got = jax.grad(lambda x, w: g(x, w).sum(), (0, 1))(X, W)
    exact = jax.grad(lambda x, w: jnp.tanh(straight_through(x, w, recipe)).sum(), (0, 1))(X, W)
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_second_derivative_is_straight_through_too():
    def second(product):
        first = jax.grad(lambda w: (product(X, w) ** 3).sum())
        return jax.grad(lambda w: (first(w) ** 2).sum())(W)

    recipe = jaxfp8.FP8_DYNAMIC
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, recipe)
    exact = functools.partial(straight_through, recipe=recipe)
    got, want = second(g), second(exact)
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


def test_forward_mode_agrees_with_reverse_mode():
    g = jaxfp8.quantize_dots(scanned, jaxfp8.FP8_DYNAMIC)
    direction, cotangent = normal(*STACK.shape, seed=5), normal(6, 24, seed=6)
    _, tangent = jax.jvp(lambda s: g(Y, s), (STACK,), (direction,))
    _, pull = jax.vjp(lambda s: g(Y, s), STACK)
    np.testing.assert_allclose(
        jnp.vdot(tangent, cotangent), jnp.vdot(pull(cotangent)[0], direction), rtol=1e-4
    )


@pytest.mark.parametrize("region", [in_custom_jvp, in_custom_vjp])
def test_custom_rule_keeps_its_gradient(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    got = jax.grad(lambda x: g(x, STACK[:1]).sum())(Y)
    plain = jax.grad(lambda x: region(x, STACK[:1]).sum())(Y)  # 7 times that of a rule-less one
    np.testing.assert_allclose(got, plain, rtol=1e-5)


def test_products_of_the_backward_pass_are_on_8_bit_data():
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, jaxfp8.FP8_DYNAMIC)
    report = jaxfp8.explain(jax.grad(lambda x, w: g(x, w).sum(), (0, 1)))(X, W)
    assert report.scaled + len(report.matched) >= 2
