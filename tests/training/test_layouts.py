"""Which copies of the codes are made for the backward pass."""

import functools

import jax
import numpy as np
import pytest
from training.samples import (
    DELAYED,
    MATRIX,
    PRODUCTS,
    TENSOR,
    each_recipe,
    first_state,
    normal,
    settled,
    step,
)

import jaxfp8
from jaxfp8._recipes import training_codes


@pytest.fixture
def contiguous_sums(monkeypatch):
    """As on a GPU: each product gets operands that have what it sums over last."""
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


TRANSPOSED = {**PRODUCTS, "tokens": ((2, 3, 16), (16, 4, 2), (((2,), (0,)), ((), ())))}


@each_recipe
@pytest.mark.parametrize("product", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.same_bits
def test_transposed_copies_change_no_number(product, recipe, contiguous_sums, monkeypatch):
    x_shape, w_shape, numbers = product
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    y = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=numbers), x, w)
    g = normal(*y.shape, seed=2)
    got = settled(x, w, g, recipe, numbers)
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: False)
    jax.clear_caches()
    want = settled(x, w, g, recipe, numbers)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize("recipe", [DELAYED, TENSOR], ids=["delayed", "tensor"])
@pytest.mark.parametrize("product", ["matrix", "tokens"])
def test_on_a_gpu_each_tensor_is_read_once_and_nothing_is_transposed(
    product, recipe, contiguous_sums
):
    x_shape, w_shape, numbers = TRANSPOSED[product]
    x, w, g = normal(*x_shape), normal(*w_shape), normal(*x_shape[:-1], *w_shape[1:])
    trace = step.trace(x, w, g, first_state(recipe), recipe, numbers)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jaxfp8_quantize") == 3
    assert text.count("custom_call @jaxfp8_scaled_dot") == 3
    assert "stablehlo.transpose" not in text


def test_without_a_backward_pass_only_the_weights_are_transposed(contiguous_sums):
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=TENSOR)
    trace = jax.jit(lambda x, w: product(x, w, MATRIX)).trace(normal(5, 32), normal(32, 7))
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("transposed = true"), text.count("transposed = false")) == (1, 1)
