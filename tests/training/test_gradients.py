"""Value and gradients of a product that trains."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training.samples import (
    BLOCK,
    MATRIX,
    PRODUCTS,
    ROW,
    STEP,
    TENSOR,
    blocks_too,
    each_recipe,
    first_state,
    normal,
    settled,
    step,
)

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8._recipes import training_codes


@each_recipe
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_values_that_fp8_holds_give_the_gradients_of_the_float_product(product, recipe):
    x_shape, w_shape, numbers = product
    x, w = exact(x_shape), exact(w_shape)
    y, pull_back = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, numbers), x, w)
    g = exact(y.shape)
    out = step(x, w, g, first_state(recipe), recipe, numbers)
    for got, want in zip(out[:3], (y, *pull_back(g)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)


def exact(shape):
    """Values that both types hold, in units of 1 and in units of their amax over the largest."""
    values = np.random.default_rng(0).choice([0, 1.75, -1.75, 3.5, -3.5, -7], shape)
    values.flat[:1] = 7
    return jnp.asarray(values, jnp.float32)


def finite_differences(function, at):
    """The gradient of a float64 function of one array, by central differences."""
    gradient = np.empty(at.shape)
    for index in np.ndindex(*at.shape):
        delta = np.zeros(at.shape)
        delta[index] = 1e-3
        gradient[index] = (function(at + delta) - function(at - delta)) / 2e-3
    return gradient


@each_recipe
def test_gradients_are_finite_differences_up_to_the_rounding_of_both_operands(recipe):
    x, w, g = normal(4, 16), normal(16, 6, seed=1), normal(4, 6, seed=2)
    _, dx, dw, _ = settled(x, w, g, recipe)
    wide = [np.asarray(a, np.float64) for a in (x, w, g)]
    want_dx = finite_differences(lambda x: np.sum(wide[2] * (x @ wide[1])), wide[0])
    want_dw = finite_differences(lambda w: np.sum(wide[2] * (wide[0] @ w)), wide[1])
    relative = (1 + STEP["e4m3"]) * (1 + STEP["e5m2"]) - 1
    size = [np.abs(a) for a in wide]
    # Below its normal range a type has steps of one size: 2^-10 of a scale is half of e4m3's.
    small = 2.0**-10 * max(a.max() for a in size) / 448 * 20
    assert (np.abs(dx - want_dx) <= relative * size[2] @ size[1].T + small).all()
    assert (np.abs(dw - want_dw) <= relative * size[0].T @ size[2] + small).all()


@blocks_too
def test_gradients_point_where_those_of_the_float_product_do(recipe):
    x, w, g = normal(64, 144), normal(144, 96, seed=1), normal(64, 96, seed=2)
    y, dx, dw, _ = settled(x, w, g, recipe)
    for got, want, bound in ((y, x @ w, 0.04), (dx, g @ w.T, 0.07), (dw, x.T @ g, 0.07)):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


def test_float32_weights_and_bfloat16_activations_each_get_gradients_of_their_dtype():
    x, w = normal(4, 16, dtype=jnp.bfloat16), normal(16, 8)
    y, dx, dw, _ = step(x, w, jnp.ones((4, 8)), None, TENSOR)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    y = jaxfp8.fp8_dot_general(x, w, MATRIX, recipe=TENSOR, preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


@blocks_too
@pytest.mark.parametrize("layout_matters", [False, True], ids=["cpu", "gpu"])
def test_one_byte_a_value_is_kept_for_the_backward_pass(recipe, layout_matters, monkeypatch):
    """Codes in one layout. Nothing else of the size of an operand is kept."""
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: layout_matters)
    x, w = normal(64, 128, dtype=jnp.bfloat16), normal(128, 96)

    def kept(x, w, state):
        product = functools.partial(jaxfp8.fp8_dot_general, recipe=recipe)
        return jax.vjp(lambda x, w, state: product(x, w, MATRIX, state), x, w, state)[1]

    leaves = jax.tree.leaves(jax.eval_shape(kept, x, w, first_state(recipe)))
    large = [leaf for leaf in leaves if leaf.size >= min(x.size, w.size)]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in large) == x.size + w.size


def of_linen(recipe, x, w):
    product = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    layer = nn.Dense(w.shape[1], use_bias=False, dot_general_cls=product)
    return layer.apply({"params": {"kernel": w}}, x)


def of_nnx(recipe, x, w):
    product = jaxfp8.nnx.Fp8DotGeneral(recipe)
    layer = nnx.Linear(*w.shape, use_bias=False, dot_general=product, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    return layer(x)


@pytest.mark.parametrize("recipe", [ROW, BLOCK], ids=["row", "block"])
@pytest.mark.parametrize("layer", [of_linen, of_nnx], ids=["linen", "nnx"])
def test_layers_share_scales_as_the_recipe_says(layer, recipe):
    x, w, g = normal(32, 144), normal(144, 48, seed=1), normal(32, 48, seed=2)

    @jax.jit
    def products(x, w, g):
        y, pull_back = jax.vjp(functools.partial(layer, recipe), x, w)
        return y, *pull_back(g)

    wide = [np.asarray(a, np.float64) for a in (x, w, g)]
    wanted = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    results = products(x, w, g), wanted, (0.04, 0.07, 0.07), step(x, w, g, None, recipe)[:3]
    for got, want, bound, own in zip(*results, strict=True):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound
        np.testing.assert_allclose(got, own, rtol=1e-5, atol=1e-5)
