"""Weights that are quantized ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.float_programs import (
    PARAMS,
    W,
    X,
    by_name,
    close,
    normal,
    two_dots,
)

import jaxfp8


@by_name(argvalues=[jaxfp8.INT8_W8A16, jaxfp8.FP8_DYNAMIC, jaxfp8.FP8_BLOCK])
def test_weights_ahead_give_the_same_numbers(recipe):
    g = jaxfp8.quantize_dots(two_dots, recipe, weights=0)
    narrow = g.quantize_weights(PARAMS, X)
    assert all(isinstance(leaf, jaxfp8.QArray) for leaf in narrow.values())
    np.testing.assert_allclose(g(narrow, X), g(PARAMS, X), rtol=1e-6, atol=1e-6)
    assert len(g.explain(narrow, X).matched) == 2


def einsum_of_heads(w, x):
    return jnp.einsum("btd,hkd->bhtk", x, w)


def through_reshape(w, x):
    return jnp.tanh(x.reshape(-1, 40)) @ w.reshape(15, 40).T


@pytest.mark.parametrize(
    ("f", "shape", "scale"),
    [
        (lambda w, x: x @ w.T, (15, 40), (15, 1)),
        (einsum_of_heads, (3, 5, 40), (3, 5, 1)),
        (through_reshape, (3, 5, 40), (3, 5, 1)),
        (lambda w, x: jax.lax.map(lambda w: x @ w, w), (4, 40, 8), (4, 1, 8)),
        (lambda w, x: x @ w.astype(jnp.bfloat16).astype(jnp.float32), (40, 8), (1, 8)),
    ],
    ids=["transposed", "einsum", "reshaped", "stack", "cast"],
)
def test_weight_ahead_has_scales_along_what_is_not_summed(f, shape, scale):
    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC, weights=0)
    x = normal(2, 7, 40)
    q = g.quantize_weights(normal(*shape, seed=2), x)
    assert q.scale.shape == scale
    assert not g.explain(q, x).missed


def test_weight_ahead_keeps_the_dtype_of_the_program():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.FP8_DYNAMIC)
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    q = g.quantize_weights(w, x)
    assert q.dtype == jnp.bfloat16
    assert g(q, x).dtype == jnp.bfloat16


def test_gradient_passes_to_activations_of_weights_ahead():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.FP8_DYNAMIC)
    q = g.quantize_weights(W, X)
    got = jax.grad(lambda x: g(q, x).sum())(X)
    close(got, np.ones((6, 24)) @ np.asarray(jaxfp8.dequantize(q), np.float64).T)


def test_only_weights_of_chosen_dots_are_quantized():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC, where="^up")
    narrow = g.quantize_weights(PARAMS, X)
    assert isinstance(narrow["up"], jaxfp8.QArray)
    assert narrow["down"] is PARAMS["down"]
