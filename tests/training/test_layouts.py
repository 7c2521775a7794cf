"""Which copies of the codes are made for the backward pass."""

import functools

import jax
import numpy as np
import pytest
from training.samples import (
    BLOCK,
    DELAYED,
    MATRIX,
    PRODUCTS,
    ROW,
    TENSOR,
    first_state,
    normal,
    plain_step,
    settled,
)

import jaxfp8
from jaxfp8._recipes import training_codes


@pytest.fixture
def contiguous_sums(monkeypatch):
    """As on a GPU: each product gets operands that have what it sums over last."""
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: True)


def new_step():
    """A step that is traced anew."""
    return jax.jit(functools.partial(plain_step), static_argnums=(4, 5))


TRANSPOSED = {**PRODUCTS, "tokens": ((2, 3, 16), (16, 4, 2), (((2,), (0,)), ((), ())))}
# With one scale. Others have codes of their own for each product.
whole_tensors = pytest.mark.parametrize("recipe", [DELAYED, TENSOR], ids=["delayed", "tensor"])


@whole_tensors
@pytest.mark.parametrize("product", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.same_bits
def test_transposed_copies_change_no_number(product, recipe, contiguous_sums, monkeypatch):
    x_shape, w_shape, numbers = product
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    y = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=numbers), x, w)
    g = normal(*y.shape, seed=2)
    got = settled(x, w, g, recipe, numbers, new_step())
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: False)
    want = settled(x, w, g, recipe, numbers, new_step())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)


@whole_tensors
@pytest.mark.parametrize("product", ["matrix", "tokens"])
def test_on_a_gpu_each_tensor_is_read_once_and_nothing_is_transposed(
    product, recipe, contiguous_sums
):
    x_shape, w_shape, numbers = TRANSPOSED[product]
    x, w, g = normal(*x_shape), normal(*w_shape), normal(*x_shape[:-1], *w_shape[1:])
    trace = new_step().trace(x, w, g, first_state(recipe), recipe, numbers)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jaxfp8_quantize") == 3
    assert text.count("custom_call @jaxfp8_scaled_dot") == 3
    assert "stablehlo.transpose" not in text


def test_without_a_backward_pass_only_the_weights_are_transposed(contiguous_sums):
    jax.clear_caches()
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=TENSOR)
    trace = jax.jit(lambda x, w: product(x, w, MATRIX)).trace(normal(5, 32), normal(32, 7))
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("transposed = true"), text.count("transposed = false")) == (1, 1)


@pytest.mark.cuda_library
@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [(TENSOR, "cublaslt_fp8"), (ROW, "cublaslt_fp8"), (BLOCK, "sm90_gemm")],
    ids=["tensor", "row", "block"],
)
def test_all_three_products_have_a_kernel_on_hopper(recipe, kernel):
    def loss(x, w):
        return jaxfp8.fp8_dot_general(x, w, MATRIX, recipe=recipe).sum()

    x, w = (jax.ShapeDtypeStruct((n, 4096), np.float32) for n in (8192, 4096))
    report = jaxfp8.explain(jax.grad(loss, (0, 1)), target=jaxfp8.Target("cuda", 90))(x, w)
    assert [call.kernels["cuda"] for call in report.calls] == [kernel] * 3
