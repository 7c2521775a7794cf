"""Which copies of the codes are made for the backward pass."""

import functools
import re

import jax
import jax.numpy as jnp
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
from jaxfp8._call.ops import quantize_lowering
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


TOKENS = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("recipe", "platform", "calls"),
    [(ROW, "cpu", 6), (ROW, "cuda", 6), (BLOCK, "cpu", 5), (BLOCK, "cuda", 3)],
    ids=["row-cpu", "row-cuda", "block-cpu", "block-cuda"],
)
@pytest.mark.parametrize(
    ("rows", "numbers"), [((200,), MATRIX), ((2, 256), TOKENS)], ids=["matrix", "tokens"]
)
def test_rows_and_blocks_are_encoded_by_calls_alone(
    rows, numbers, recipe, platform, calls, monkeypatch
):
    """A call for each operand of each product. Blocks of both products are one call on a GPU."""
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: platform == "cuda")
    jax.clear_caches()
    x, w, g = normal(*rows, 384), normal(384, 256), normal(*rows, 256)
    trace = new_step().trace(x, w, g, None, recipe, numbers)
    text = trace.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("custom_call @jaxfp8_quantize") == calls
    assert text.count("power_of_two = true") == calls
    assert not re.search(r"stablehlo.convert.*-> tensor<.*f8", text)
    assert not re.search(r"stablehlo.transpose.*xui8>", text)


def losses(recipe):
    """Those of five steps of two layers in float32."""
    x, y = normal(200, 160), normal(200, 48, seed=1)
    weights = normal(160, 288, seed=2) / 12, normal(288, 48, seed=3) / 17

    @jax.jit
    def step(weights):
        def loss(weights):
            h = jaxfp8.fp8_dot_general(x, weights[0], MATRIX, recipe=recipe)
            z = jaxfp8.fp8_dot_general(jax.nn.gelu(h), weights[1], MATRIX, recipe=recipe)
            return jnp.mean((z - y) ** 2)

        value, slopes = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, d: w - d / 2, weights, slopes)

    found = []
    for _ in range(5):
        value, weights = step(weights)
        found.append(float(value))
    return found


@pytest.mark.same_bits
@pytest.mark.parametrize("recipe", [ROW, BLOCK], ids=["row", "block"])
def test_the_calls_change_no_loss(recipe, monkeypatch):
    ours = losses(recipe)
    monkeypatch.setattr(quantize_lowering, "_has_kernel", lambda *_: False)
    try:
        jax.clear_caches()
        assert losses(recipe) == ours and ours[-1] < ours[0]
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("recipe", [ROW, BLOCK], ids=["row", "block"])
@pytest.mark.parametrize("product", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.same_bits
def test_one_call_for_both_products_changes_no_number(
    product, recipe, contiguous_sums, monkeypatch
):
    x_shape, w_shape, numbers = product
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    y = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=numbers), x, w)
    got = new_step()(x, w, jnp.ones_like(y), None, recipe, numbers)
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: False)
    want = new_step()(x, w, jnp.ones_like(y), None, recipe, numbers)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)


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
