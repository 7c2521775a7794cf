"""The product of a recipe: its gradients are straight through, its errors clear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8

MATRIX = (((1,), (0,)), ((), ()))
RECIPES = (
    jaxfp8.FP8_W8A16,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_ASYMMETRIC,
    jaxfp8.FP8_AS_INT8,
)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_gradients_are_those_of_the_float_product_up_to_rounding(recipe):
    x, w, bias, g = normal(6, 64), normal(64, 24, seed=1), normal(24), normal(6, 24, seed=2)

    def loss(product, x, w, bias):
        return jnp.sum(product(x, w, bias) * g)

    def narrow(x, w, bias):
        return jaxfp8.recipe_dot_general(x, w, MATRIX, recipe, bias=bias)

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    got, want = (gradient(f, x, w, bias) for f in (narrow, lambda x, w, b: x @ w + b))
    assert all(off(a, b) < 0.05 for a, b in zip(got, want, strict=True))


def test_an_8_bit_weight_has_the_gradient_of_its_scale():
    x, w = normal(6, 64), jaxfp8.FP8_DYNAMIC.quantize_weight(normal(64, 24), (0,))

    def loss(scale):
        narrow = jaxfp8.QArray(w.qvalue, scale)
        return jnp.sum(jaxfp8.recipe_dot_general(x, narrow, MATRIX, jaxfp8.FP8_DYNAMIC))

    want = jnp.sum(x @ w.qvalue.astype(jnp.float32), 0, keepdims=True)
    assert off(jax.jit(jax.grad(loss))(w.scale), want) < 0.05


def test_a_recipe_that_leaves_both_wide_is_the_float_product():
    wide = jaxfp8.Recipe(name="wide", weight=None)
    x, w, bias = normal(6, 64), normal(64, 24), normal(24)
    got = jaxfp8.recipe_dot_general(x, w, MATRIX, wide, bias=bias)
    np.testing.assert_allclose(got, x @ w + bias, rtol=1e-5, atol=1e-5)


def test_static_activations_saturate_at_the_scale_they_are_given():
    x, w = jnp.full((1, 4), 100.0), jnp.eye(4)
    y = jaxfp8.recipe_dot_general(x, w, MATRIX, jaxfp8.FP8_STATIC, scale=10 / 448)
    np.testing.assert_allclose(y, jnp.full((1, 4), 10.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "recipe", "error", "text"),
    [
        (
            jnp.ones((2, 4), jnp.int8),
            jnp.ones((4, 2)),
            jaxfp8.INT8_DYNAMIC,
            TypeError,
            "`x` is int8",
        ),
        (jnp.ones((2, 4)), jnp.ones((3, 2)), jaxfp8.INT8_DYNAMIC, ValueError, "contracting axes"),
        (jnp.ones((2, 4)), jnp.ones((4, 2)), jaxfp8.DelayedScaling(), TypeError, "of training"),
    ],
    ids=["dtype", "sizes", "recipe"],
)
def test_wrong_use_is_refused(x, w, recipe, error, text):
    with pytest.raises(error, match=text):
        jaxfp8.recipe_dot_general(x, w, MATRIX, recipe)
