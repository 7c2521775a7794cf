"""Gradients of quantizing, of dequantizing, and of both in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantizing.samples import (
    ALL,
    BF16,
    E8M0,
    FLOAT8,
    INT8,
    INTEGER,
    LARGEST,
    SCALES,
    SIGNED,
    UINT8,
    gradient_of,
    normal,
    numbers,
)

from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize
from jaxfp8._value.qarray import QArray, scale_and_zero_point


@FLOAT8
@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e6])
def test_no_gradient_passes_through_codes_and_none_is_nan(dtype, factor):
    x = normal(8, 4)
    scale = jnp.float32(0.01)
    gradient = gradient_of(lambda x: factor * dequantize(quantize(x, dtype, scale=scale)).sum(), x)
    np.testing.assert_array_equal(gradient, np.zeros((8, 4)))


@SIGNED
def test_the_gradient_through_a_chosen_scale_is_the_true_one(dtype):
    x = normal(8, 4)
    cotangent = normal(8, 4, seed=1)

    def loss(x):
        return (cotangent * dequantize(quantize(x, dtype, channelwise_axes=[1]))).sum()

    gradient = gradient_of(loss, x)
    codes = numbers(quantize(x, dtype, channelwise_axes=[1]).qvalue)
    peak = np.abs(x).argmax(axis=0)
    expected = np.zeros((8, 4))
    for column, row in enumerate(peak):
        slope = np.sign(x[row, column]) / LARGEST[dtype]
        expected[row, column] = slope * (cotangent * codes)[:, column].sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@SIGNED
def test_no_gradient_passes_through_a_power_of_two_scale(dtype):
    x = normal(8, 4)
    gradient = gradient_of(lambda x: dequantize(quantize(x, dtype, scale_dtype=E8M0)).sum(), x)
    np.testing.assert_array_equal(gradient, np.zeros((8, 4)))


@ALL
@pytest.mark.parametrize("tiles", [{}, {0: 4}, {0: 3}, {0: 1}], ids=str)
def test_the_gradient_of_a_scale_sums_over_its_tile(dtype, tiles):
    q = quantize(np.abs(normal(8, 4)), dtype, tiled_axes=tiles)
    cotangent = normal(8, 4, seed=1)

    def loss(scale):
        return (cotangent * dequantize(QArray(q.qvalue, scale, tiles=q.tiles))).sum()

    gradient = gradient_of(loss, q.scale)
    tile = q.tile_sizes[0]
    terms = cotangent * numbers(q.qvalue)
    expected = [terms[i : i + tile].sum() for i in range(0, 8, tile)]
    np.testing.assert_allclose(gradient[:, 0], expected, rtol=1e-4, atol=1e-3)


@FLOAT8
def test_the_gradient_of_a_whole_qarray_has_zeros_for_its_codes(dtype):
    q = quantize(normal(5), dtype)
    gradient = gradient_of(lambda q: 1e9 * dequantize(q).sum(), q)
    assert gradient.qvalue.dtype == dtype
    np.testing.assert_array_equal(numbers(gradient.qvalue), np.zeros(5))
    np.testing.assert_allclose(gradient.scale, [1e9 * numbers(q.qvalue).sum()], rtol=1e-5)


def test_the_gradient_of_zeros_and_infinities_is_finite():
    x = np.float32([[0, 0], [np.inf, 1]])
    gradient = gradient_of(lambda x: dequantize(quantize(x, channelwise_axes=[0]))[0].sum(), x)
    assert np.isfinite(gradient).all()


@ALL
def test_fake_quantize_equals_a_round_trip(dtype):
    x = normal(20, 6).astype(BF16)
    options = {"channelwise_axes": [1], "tiled_axes": {0: 8}}
    options["zero_point"] = True if dtype in (INT8, UINT8) else None
    y = fake_quantize(x, dtype, **options)
    assert y.dtype == BF16
    np.testing.assert_array_equal(y, dequantize(quantize(x, dtype, **options), BF16))


@SIGNED
@SCALES
def test_fake_quantize_passes_the_gradient_of_values_in_range(dtype, scale_dtype):
    x, cotangent = normal(20, 6), normal(20, 6, seed=1)

    def loss(x):
        return (
            cotangent * fake_quantize(x, dtype, tiled_axes={0: 8}, scale_dtype=scale_dtype)
        ).sum()

    np.testing.assert_array_equal(gradient_of(loss, x), cotangent)


@SIGNED
def test_fake_quantize_stops_the_gradient_of_saturated_values(dtype):
    edge = LARGEST[dtype]
    x = np.float32([0, edge, -edge, 2 * edge, -2 * edge, np.inf])
    gradient = gradient_of(lambda x: fake_quantize(x, dtype, scale=1.0).sum(), x)
    np.testing.assert_array_equal(gradient, [1, 1, 1, 0, 0, 0])


@INTEGER
def test_fake_quantize_passes_the_gradient_around_a_zero_point(dtype):
    x = np.float32(np.random.default_rng(0).uniform(-3, 9, (6, 4)))
    gradient = gradient_of(lambda x: fake_quantize(x, dtype, zero_point=True).sum(), x)
    np.testing.assert_array_equal(gradient, np.ones((6, 4)))


def test_fake_quantize_gives_a_scale_the_gradient_of_learned_step_sizes():
    x = np.float32([0.3, 1.4, 900.0, -900.0])
    gradient = gradient_of(lambda s: fake_quantize(x, INT8, scale=s).sum(), jnp.float32(1))
    np.testing.assert_allclose(gradient, (0 - 0.3) + (1 - 1.4) + 127 - 128, rtol=1e-5)


def test_second_derivative_of_fake_quantize_is_straight_through():
    x = normal(24)
    second = jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(fake_quantize(v) ** 3))(v)))(x)
    np.testing.assert_allclose(second, 6 * fake_quantize(x), rtol=1e-6)


def test_fake_quantize_works_under_jit_vmap_and_forward_mode():
    x, dx = normal(3, 20), normal(3, 20, seed=1)
    fake = jax.jit(jax.vmap(lambda row: fake_quantize(row, tiled_axes={0: 8})))
    y, dy = jax.jvp(fake, (x,), (dx,))
    np.testing.assert_array_equal(y, fake_quantize(x, channelwise_axes=[0], tiled_axes={1: 8}))
    np.testing.assert_array_equal(dy, dx)


def test_scales_and_zero_points_keep_their_gradient_policy_for_other_functions():
    q = quantize(normal(6, 4), tiled_axes={0: 3})

    def total(scale):
        return scale_and_zero_point(QArray(q.qvalue, scale))[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(q.scale), np.ones((2, 1)))
