"""quantize_dots: values against explicit products, comparisons, and wrong use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.float_programs import (
    PARAMS,
    RECIPES,
    W,
    X,
    by_name,
    close,
    expected,
    two_dots,
)

import jaxfp8


@by_name(argvalues=RECIPES)
def test_product_is_that_of_the_rounded_operands(recipe):
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, recipe)
    close(g(X, W), expected(X, W, recipe))
    assert len(g.explain(X, W).matched) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_output_keeps_its_dtype(dtype):
    g = jaxfp8.quantize_dots(jnp.matmul, jaxfp8.FP8_DYNAMIC)
    y = g(X.astype(dtype), W.astype(dtype))
    exact = expected(X.astype(dtype), W.astype(dtype), jaxfp8.FP8_DYNAMIC)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=1e-2, atol=1e-2)


def test_bias_and_activation_are_absorbed():
    def f(x, w, b):
        return jax.nn.gelu(x @ w + b)

    (site,) = jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC).explain(X, W, jnp.ones(24)).matched
    assert "bias" in site.epilogue and "gelu" in site.epilogue


def test_labels_and_kwargs_pass():
    def f(x, *, w, scale):
        return {"y": x @ w * scale, "name": "y"}

    out = jaxfp8.quantize_dots(f, jaxfp8.FP8_W8A16)(X, w=W, scale=2.0)
    assert out["name"] == "y"
    close(out["y"], 2 * expected(X, W, jaxfp8.FP8_W8A16))


def test_error_is_that_of_the_outputs():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC)
    found, exact, got = g.compare(PARAMS, X), two_dots(PARAMS, X), g(PARAMS, X)
    noise = np.linalg.norm(np.asarray(got - exact, np.float64))
    signal = np.linalg.norm(np.asarray(exact, np.float64))
    assert found.relative_l2 == pytest.approx(noise / signal, rel=1e-3)
    assert found.sqnr == pytest.approx(20 * np.log10(signal / noise), rel=1e-3)
    assert found.max_abs == pytest.approx(float(jnp.abs(got - exact).max()), rel=1e-3)
    assert 30 < found.sqnr < 60


def test_error_names_each_output():
    def f(w, x):
        return {"a": x @ w, "b": x, "n": 3, "label": "c"}

    found = jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC).compare(W, X)
    assert [e.name for e in found.outputs] == ["['a']", "['b']"]
    assert found.outputs[1].sqnr == np.inf and "SQNR" in str(found)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jaxfp8.quantize_dots(3, jaxfp8.INT8_DYNAMIC), TypeError, "`fun` is 3"),
        (lambda: jaxfp8.quantize_dots(two_dots, "int8"), TypeError, "a recipe, a rule"),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.CurrentScaling()),
            TypeError,
            "is for training",
        ),
        (lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.FP8_STATIC), ValueError, "static scales"),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC, where="("),
            ValueError,
            "`where` is '\\('",
        ),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC).quantize_weights(
                PARAMS, X, argnum=2
            ),
            ValueError,
            "`argnum` is 2",
        ),
        (
            lambda: jaxfp8.quantize_dots(
                two_dots, jaxfp8.INT8_DYNAMIC, where="none"
            ).quantize_weights(PARAMS, X),
            ValueError,
            "holds no weight",
        ),
    ],
)
def test_wrong_use_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()
