"""8-bit layers of linen compute what Flax's own do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen.layers import BOUND, RECIPES, both, normal, off

import jaxfp8
import jaxfp8.linen


@pytest.mark.parametrize("recipe", RECIPES, ids=BOUND)
def test_dense_is_flax_dense(recipe):
    x = normal(9, 256)
    want, got, narrow = both(nn.Dense(64), jaxfp8.linen.Dense(64, recipe=recipe), x)
    assert got.dtype == want.dtype and off(got, want) < BOUND[recipe.name]
    assert narrow["params"]["kernel"].qvalue.dtype == recipe.weight.dtype


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"features": (4, 6)}, (3, 32)),
        ({"features": 8, "axis": (-2, -1)}, (2, 3, 4, 8)),
        ({"features": (4,), "axis": (1, -1)}, (2, 4, 3, 8)),
        ({"features": 4, "axis": (-1, 1)}, (2, 5, 5)),
        ({"features": 4, "axis": (2, 1)}, (2, 3, 5)),
        ({"features": 8, "axis": -1, "batch_dims": (0,)}, (3, 5, 16)),
        ({"features": 8, "use_bias": False}, (3, 16)),
    ],
)
def test_dense_general_is_flax_dense_general(fields, shape):
    x = normal(*shape)
    theirs, ours = (module.DenseGeneral(**fields) for module in (nn, jaxfp8.linen))
    want, got, narrow = both(theirs, ours, x)
    assert got.shape == want.shape and off(got, want) < BOUND["FP8_W8A16"]
    shapes = jax.tree.map(jnp.shape, theirs.init(jax.random.key(0), x)["params"])
    assert narrow["params"]["kernel"].shape == shapes["kernel"]


@pytest.mark.parametrize(
    ("kernel", "equation", "shape"),
    [
        ((5, 6, 7), "abc,cde->abde", (3, 4, 5)),
        ((2, 8, 6), "bthd,hdk->bthk", (3, 4, 2, 8)),
        ((6, 8), "...d,kd->...k", (3, 4, 8)),
        ((8, 6), "td,dk->kt", (4, 8)),
    ],
)
def test_einsum_is_flax_einsum(kernel, equation, shape):
    x = normal(*shape)
    theirs, ours = (module.Einsum(kernel, equation) for module in (nn, jaxfp8.linen))
    want, got, narrow = both(theirs, ours, x)
    assert got.shape == want.shape and off(got, want) < BOUND["FP8_W8A16"]
    shapes = jax.tree.map(jnp.shape, theirs.init(jax.random.key(0), x)["params"])
    assert narrow["params"]["bias"].shape == shapes["bias"]


def test_equation_may_be_given_to_the_call():
    layer, x = jaxfp8.linen.Einsum((8, 6)), normal(4, 8)
    y, variables = layer.init_with_output(jax.random.key(0), x, "td,dk->tk")
    np.testing.assert_array_equal(layer.apply(variables, x, "td,dk->tk"), y)


@pytest.mark.parametrize(
    "recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_BLOCK, jaxfp8.INT8_DYNAMIC], ids=lambda r: r.name
)
def test_embed_looks_up_rows_and_attends_to_them(recipe):
    indices = jnp.array([[0, 299, 17], [-1, 130, 4]])
    theirs = nn.Embed(300, 144)
    ours = jaxfp8.linen.Embed(300, 144, recipe=recipe)
    want, got, narrow = both(theirs, ours, indices)
    assert off(got, want) < BOUND[recipe.name]
    table = jaxfp8.dequantize(narrow["params"]["embedding"])
    np.testing.assert_array_equal(got, table[indices])
    logits = ours.apply(narrow, got, method="attend")
    assert off(logits, got @ table.T) < BOUND[recipe.name]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_an_index_out_of_range_gives_nan_as_in_flax(dtype):
    recipe = jaxfp8.Recipe(name="rows", weight=jaxfp8.Quantization(dtype=dtype))
    layer = jaxfp8.linen.Embed(5, 4, recipe=recipe)
    rows = layer.apply(layer.init(jax.random.key(0), jnp.arange(2)), jnp.array([4, 5, -5, -6]))
    np.testing.assert_array_equal(np.isnan(rows).all(1), [False, True, False, True])


def test_bfloat16_layer_computes_in_bfloat16():
    layer = jaxfp8.linen.Dense(16, dtype=jnp.bfloat16, recipe=jaxfp8.FP8_DYNAMIC)
    y, _ = layer.init_with_output(jax.random.key(0), normal(3, 32))
    assert y.dtype == jnp.bfloat16


def test_gradient_of_the_input_is_that_of_the_dequantized_layer():
    x, layer = normal(5, 32), jaxfp8.linen.Dense(16, recipe=jaxfp8.INT8_DYNAMIC)
    variables = layer.init(jax.random.key(0), x)
    got = jax.grad(lambda x: jnp.sum(jnp.sin(layer.apply(variables, x))))(x)
    kernel = jaxfp8.dequantize(variables["params"]["kernel"])
    want = jax.grad(lambda x: jnp.sum(jnp.sin(x @ kernel)))(x)
    assert off(got, want) < 0.02
