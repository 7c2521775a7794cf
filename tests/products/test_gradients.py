"""Gradients of 8-bit values, and of scales and addends in 16 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products.samples import QW, X, close

import jaxfp8


def test_fp8_values_have_no_gradient_and_no_nan() -> None:
    grad = jax.grad(lambda q: jnp.sum(jaxfp8.matmul(1e4 * X, q)))(QW)
    assert not grad.qvalue.astype(jnp.float32).any()
    close(grad.scale[0], jnp.sum(1e4 * X, 0) @ QW.qvalue.astype(jnp.float32))


def gradients(dtype, function, *small):
    """Those with respect to arrays of `dtype`, and of the same numbers in float32."""
    narrow = [jnp.asarray(x).astype(dtype) for x in small]
    of = jax.grad(function, argnums=tuple(range(len(small))))
    return of(*narrow), of(*(x.astype(jnp.float32) for x in narrow))


def assert_rounded_once(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        np.testing.assert_allclose(g.astype(jnp.float32), w, rtol=2**-7)


ROWS = 8192


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("dtype", "factor"), [(jnp.bfloat16, 1e5), (jnp.float16, 1e-8)])
def test_gradients_of_a_narrow_bias_and_residual_are_summed_in_float32(dtype, activation, factor):
    x = jnp.ones((ROWS, 16))
    w = jaxfp8.quantize(jnp.ones((16, 4)), channelwise_axes=(1,))

    def loss(bias, residual):
        y = jaxfp8.matmul(x, w, bias=bias, residual=residual, activation=activation)
        return (y * factor).sum()

    got, want = gradients(dtype, loss, np.ones(4), np.ones((1, 4)))
    assert_rounded_once(got, want, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_scales_are_summed_in_float32(dtype):
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-9, 100, (64, ROWS)), jnp.int8)
    zeros = jnp.asarray(rng.integers(-9, 0, (1, ROWS)), jnp.int8)
    x = jnp.ones((2, 64))

    def of_one(scale):
        y = jaxfp8.matmul(x, jaxfp8.QArray(codes, scale, zeros))
        return y.astype(jnp.float32).sum() / ROWS

    def of_each(scale):
        def one(zero):
            return jaxfp8.matmul(x, jaxfp8.QArray(codes[:, :8], scale, zero)).astype(jnp.float32)

        return jax.vmap(one)(zeros.reshape(-1, 1, 8)).sum() / ROWS

    for function, shape in ((of_one, ()), (of_one, (1, 1)), (of_each, (1, 8))):
        got, want = gradients(dtype, function, np.full(shape, 0.5))
        assert_rounded_once(got, want, dtype)
