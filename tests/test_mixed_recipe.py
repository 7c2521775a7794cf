"""`from_rows`: the rows of a product choose how activations are held, and reports say so."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

MATRIX = (((1,), (0,)), ((), ()))
ROWS = 8
MIXED = jaxfp8.FP8_DYNAMIC.from_rows(ROWS)
# By the rows of a product, the recipe that it is computed by.
EDGES = [
    pytest.param(1, jaxfp8.FP8_W8A16, id="1 row"),
    pytest.param(ROWS - 1, jaxfp8.FP8_W8A16, id="one below"),
    pytest.param(ROWS, jaxfp8.FP8_DYNAMIC, id="as many"),
    pytest.param(ROWS + 1, jaxfp8.FP8_DYNAMIC, id="one above"),
]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


W = normal(64, 24, seed=1)


def product(recipe, x, w=W, numbers=MATRIX):
    return jaxfp8.recipe_dot_general(x, w, numbers, recipe)


@pytest.mark.parametrize(("rows", "same"), EDGES)
def test_a_product_is_that_of_the_recipe_for_its_rows(rows, same):
    x = normal(rows, 64)
    np.testing.assert_array_equal(product(MIXED, x), product(same, x))


@pytest.mark.parametrize(("rows", "same"), EDGES[1:3])
def test_so_are_its_gradients(rows, same):
    def loss(x, w, recipe):
        return jnp.sum(product(recipe, x, w) ** 2)

    gradients = [jax.grad(loss, (0, 1))(normal(rows, 64), W, recipe) for recipe in (MIXED, same)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_one_weight_serves_both():
    held = MIXED.quantize_weight(W, (0,))
    few, many = normal(2, 64), normal(20, 64)
    for x, same in ((few, jaxfp8.FP8_W8A16), (many, jaxfp8.FP8_DYNAMIC)):
        np.testing.assert_array_equal(product(MIXED, x, held), product(same, x))


@pytest.mark.parametrize(
    ("shape", "contracting", "batch", "narrow"),
    [((2, 4, 64), (2,), (), True), ((2, 4, 64), (-1,), (-3,), False), ((64, 8), (0,), (), True)],
    ids=["free axes count together", "batch axes do not", "first axis summed"],
)
def test_rows_are_the_free_axes_of_a_product(shape, contracting, batch, narrow):
    x = MIXED.quantize_activation(normal(*shape), contracting, batch)
    assert isinstance(x, jaxfp8.QArray) == narrow


def test_without_rows_a_token_has_the_same_bits_in_every_batch():
    """Where sums are exact, so that no kernel's order of adding counts."""
    recipe = jaxfp8.FP8_W8A16
    x = jnp.round(50 * normal(300, 64))  # 8 bits would round these
    w = jaxfp8.QArray(jnp.round(2 * W).astype(jnp.float8_e4m3fn), jnp.ones((1, 24)))
    whole = product(recipe, x, w)
    for rows in (1, 4, 8, 64):
        np.testing.assert_array_equal(product(recipe, x[:rows], w), whole[:rows])


def test_with_rows_a_token_is_rounded_otherwise_in_a_large_batch():
    x = normal(ROWS, 64)
    assert not np.array_equal(product(MIXED, x)[:1], product(MIXED, x[:1]))


@pytest.mark.parametrize(("rows", "same"), EDGES[1:3])
def test_an_ordinary_program_is_that_of_the_recipe_for_its_rows(rows, same):
    x = normal(rows, 64)
    got, want = (jaxfp8.quantize_dots(lambda w, x: x @ w, r)(W, x) for r in (MIXED, same))
    np.testing.assert_array_equal(got, want)


def test_rows_of_a_program_are_those_of_the_operand_that_is_no_weight():
    def f(w, x):
        return jax.lax.dot_general(w, x, (((0,), (1,)), ((), ())))

    explain = jaxfp8.quantize_dots(f, MIXED, weights=0).explain
    for rows, narrow in ((ROWS - 1, False), (ROWS, True)):
        (site,) = explain(W, normal(rows, 64)).matched
        assert site.rhs.eight_bit == narrow and site.lhs.eight_bit


def test_a_product_of_two_activations_of_few_rows_says_why_it_stays():
    f = jaxfp8.quantize_dots(lambda x: jnp.sin(x) @ jnp.cos(x), MIXED, where=lambda path, dot: True)
    (site,) = f.explain(normal(4, 4)).missed
    assert "FP8_DYNAMIC.from_rows(8) leaves activations of 4 rows as they are" in site.reason


def nnx_layer(recipe):
    layer = nnx.Linear(64, 24, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer)
    jaxfp8.nnx.quantize(model, recipe)
    return model


def linen_layer(recipe):
    layer = jaxfp8.linen.Dense(24, recipe=recipe)
    params = nn.Dense(24).init(jax.random.key(0), jnp.ones((1, 64)))
    variables, _ = jaxfp8.linen.quantize(layer, params, jnp.ones((1, 64)))
    return lambda x: layer.apply(variables, x)


@pytest.mark.parametrize("make", [nnx_layer, linen_layer], ids=["nnx", "linen"])
@pytest.mark.parametrize(("rows", "same"), EDGES[1:3])
def test_a_layer_is_that_of_the_recipe_for_its_rows(make, rows, same):
    x = normal(rows, 64)
    np.testing.assert_array_equal(make(MIXED)(x), make(same)(x))


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS])
def test_explain_prints_the_threshold_and_what_it_chose(rows):
    x, of_program = normal(rows, 64), jaxfp8.quantize_dots(lambda w, x: x @ w, MIXED).explain
    (site,) = of_program(W, x).sites
    (call,) = jaxfp8.explain(lambda x: product(MIXED, x))(x).calls
    for row in (site, call):
        assert row.path == "FP8_DYNAMIC.from_rows(8)" and row.lhs.eight_bit == (rows >= ROWS)


def test_its_name_says_the_threshold():
    assert MIXED.name == "FP8_DYNAMIC.from_rows(8)" and "FP8_DYNAMIC.from_rows(8)" in repr(MIXED)
    assert jaxfp8.FP8_DYNAMIC.from_rows(8) == MIXED


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "8"])
def test_rows_that_are_no_number_are_refused(rows):
    with pytest.raises(ValueError, match=r"`jaxfp8.Recipe`: `rows` is .*from 1 is needed"):
        jaxfp8.FP8_DYNAMIC.from_rows(rows)


def test_rows_of_a_recipe_without_activations_are_refused():
    with pytest.raises(ValueError, match="activations stay as they are"):
        dataclasses.replace(jaxfp8.FP8_W8A16, rows=8)


def test_rows_that_are_a_symbol_are_refused():
    (rows,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"the number of rows is b.*export a program for each"):
        jax.export.export(jax.jit(lambda x: product(MIXED, x)))(x)
