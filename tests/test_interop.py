"""Arrays of qwix in our operations, and ours as theirs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8

X = jax.random.normal(jax.random.key(0), (5, 64))
W = jax.random.normal(jax.random.key(1), (64, 32))


def theirs(q):
    return types.SimpleNamespace(qvalue=q.qvalue, scale=q.scale, zero_point=q.zero_point)


@pytest.mark.parametrize(
    "options",
    [
        {"channelwise_axes": (1,)},
        {"channelwise_axes": (1,), "tiled_axes": {0: 16}},
        {"dtype": jnp.int8, "channelwise_axes": (1,), "zero_point": True},
    ],
    ids=["channel", "tiles", "zero point"],
)
def test_array_of_the_same_fields_is_an_operand(options):
    q = jaxfp8.quantize(W, **options)
    exact = jaxfp8.matmul(X, q)
    numbers = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(jaxfp8.matmul(X, theirs(q)), exact)
    np.testing.assert_array_equal(jaxfp8.einsum("mk,kn->mn", X, theirs(q)), exact)
    np.testing.assert_array_equal(jaxfp8.dot_general(X, theirs(q), numbers), exact)
    np.testing.assert_array_equal(
        jaxfp8.recipe_dot_general(X, theirs(q), numbers, jaxfp8.FP8_W8A16), exact
    )
    np.testing.assert_array_equal(jaxfp8.dequantize(theirs(q)), jaxfp8.dequantize(q))


def test_conversion_there_and_back_keeps_the_arrays():
    q = jaxfp8.quantize(W, jnp.int8, channelwise_axes=(1,), zero_point=True)
    again = jaxfp8.QArray.of(q.to(types.SimpleNamespace))
    assert again.qvalue is q.qvalue and again.scale is q.scale
    assert again.zero_point is q.zero_point


def test_own_array_is_taken_as_it_is():
    q = jaxfp8.quantize(W)
    assert jaxfp8.QArray.of(q) is q


def test_partial_tile_is_refused_to_others():
    q = jaxfp8.quantize(W, tiled_axes={0: 48})
    with pytest.raises(ValueError, match="tiles that divide their axis are needed"):
        q.to(types.SimpleNamespace)


def test_what_has_no_such_fields_is_refused():
    with pytest.raises(TypeError, match="`qvalue` and `scale` are needed"):
        jaxfp8.QArray.of(W)


def test_wrong_dtype_of_another_class_is_named():
    q = types.SimpleNamespace(qvalue=jnp.ones((64, 32), jnp.int16), scale=jnp.ones(()))
    with pytest.raises(TypeError, match="qvalue of `rhs` has dtype int16"):
        jaxfp8.matmul(X, q)


def test_array_of_qwix_multiplies_as_qwix_says():
    qwix = pytest.importorskip("qwix")
    for options in ({"dtype": jnp.int8}, {"dtype": jnp.float8_e4m3fn}):
        ours = jaxfp8.quantize(W, **options, channelwise_axes=(1,))
        array = ours.to(qwix.QArray)
        assert isinstance(array, qwix.QArray)
        got = jax.jit(jaxfp8.matmul)(X, array)
        exact = np.asarray(X, np.float64) @ np.asarray(jaxfp8.dequantize(ours), np.float64)
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_quantize_dots_takes_arrays_of_qwix():
    g = jaxfp8.quantize_dots(jnp.matmul, jaxfp8.FP8_DYNAMIC)
    q = jaxfp8.quantize(W, channelwise_axes=(1,))
    namespace = pytest.importorskip("qwix").QArray
    np.testing.assert_array_equal(g(X, q.to(namespace)), g(X, q))
