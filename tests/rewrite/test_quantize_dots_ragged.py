"""`quantize_dots` takes ragged dots: experts of a float program in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import jaxfp8

GROUPS, ROWS, DEPTH, COLUMNS = 3, 11, 256, 128
SIZES = jnp.array([4, 0, 5])
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (ROWS, DEPTH))
W = {
    "up": jax.random.normal(KEYS[1], (GROUPS, DEPTH, COLUMNS)) / 16,
    "down": jax.random.normal(KEYS[2], (GROUPS, COLUMNS, DEPTH)) / 16,
}


def experts(w, x, sizes):
    hidden = jax.nn.silu(lax.ragged_dot(x, w["up"], sizes))
    return lax.ragged_dot(hidden, w["down"], sizes)


RECIPES = [
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
    jaxfp8.FP8_W8A16,
    jaxfp8.FP8_BLOCK,
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_groups_are_in_8_bits(recipe):
    g = jaxfp8.quantize_dots(experts, recipe)
    report = g.explain(W, X, SIZES)
    assert (len(report.matched), len(report.missed), report.others) == (2, 0, 0)
    assert g.compare(W, X, SIZES).sqnr > 20
    narrow = g.quantize_weights(W, X, SIZES)
    assert all(narrow[name].scale.shape[0] == GROUPS for name in W)
    np.testing.assert_array_equal(g(narrow, X, SIZES), g(W, X, SIZES))


def test_each_expert_has_scales_of_its_own():
    narrow = jaxfp8.quantize_dots(experts, jaxfp8.INT8_DYNAMIC).quantize_weights(W, X, SIZES)
    want = jaxfp8.quantize(W["up"], jnp.int8, channelwise_axes=(0, 2))
    np.testing.assert_array_equal(narrow["up"].qvalue, want.qvalue)
    np.testing.assert_array_equal(narrow["up"].scale, want.scale)


def test_the_gradient_is_straight_through():
    g = jaxfp8.quantize_dots(experts, jaxfp8.FP8_DYNAMIC)
    ours, theirs = (
        jax.grad(lambda w, x, f=f: jnp.sum(f(w, x, SIZES) ** 2), (0, 1))(W, X) for f in (g, experts)
    )
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(mine - other) < 0.1 * np.linalg.norm(other)


def test_groups_along_k_are_activations_of_two_sides():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def outer(x, dy, sizes):
        return lax.ragged_dot_general(jnp.tanh(x), jnp.tanh(dy), sizes, numbers)

    g = jaxfp8.quantize_dots(outer, jaxfp8.INT8_DYNAMIC, where=lambda *_: True)
    args = X, X[:, :24], SIZES
    assert len(g.explain(*args).matched) == 1 and g.compare(*args).sqnr > 30


def test_groups_of_batches_are_in_8_bits():
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])

    def batches(w, x):
        return lax.ragged_dot_general(x, w["up"], jnp.array([1, 2]), numbers)

    g = jaxfp8.quantize_dots(batches, jaxfp8.INT8_DYNAMIC)
    args = W, jnp.stack([X] * GROUPS)
    assert len(g.explain(*args).matched) == 1 and g.compare(*args).sqnr > 30
    left = jaxfp8.quantize_dots(batches, jaxfp8.INT8_DYNAMIC, where=lambda *_: False)
    assert (len(left.explain(*args).missed), left.explain(*args).others) == (1, 0)


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_AS_INT8, jaxfp8.INT8_SPLIT], ids=lambda r: r.name)
def test_other_products_are_none_of_groups(recipe):
    report = jaxfp8.quantize_dots(experts, recipe).explain(W, X, SIZES)
    assert len(report.missed) == 2 and not report.matched
    assert all("none for groups" in site.reason for site in report.missed)
    assert jaxfp8.quantize_dots(experts, jaxfp8.FP8_DYNAMIC).explain(W, X, SIZES).matched


def wrapped(w, x, sizes):
    """As tokamax writes it."""

    @custom_vmap
    def call(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    @call.def_vmap
    def _(size, batched, *args):
        assert size == 2 and all(batched)
        return jax.vmap(lax.ragged_dot)(*args), True

    return call(x, w["up"], sizes)


def test_a_function_with_a_rule_for_vmap_is_rounded_in_both():
    recipe = jaxfp8.INT8_DYNAMIC
    g = jaxfp8.quantize_dots(wrapped, recipe)
    assert len(g.explain(W, X, SIZES).matched) == 1
    y = g(W, X, SIZES)
    plain = jaxfp8.quantize_dots(lambda w, x, s: lax.ragged_dot(x, w["up"], s), recipe)
    np.testing.assert_array_equal(y, plain(W, X, SIZES))
    twice = jax.vmap(g)(*jax.tree.map(lambda a: jnp.stack([a, a]), (W, X, SIZES)))
    np.testing.assert_allclose(twice[1], y, rtol=1e-5, atol=1e-5)
