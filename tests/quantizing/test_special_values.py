"""NaN, infinities, zeros, and the smallest and largest numbers."""

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
    numbers,
)

from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize


@FLOAT8
def test_nan_stays_nan_and_spares_its_tile(dtype):
    x = np.array([1.0, np.nan, -2.0], np.float32)
    q = quantize(x, dtype)
    assert np.isnan(numbers(dequantize(q))).tolist() == [False, True, False]
    np.testing.assert_allclose(q.scale, [2 / LARGEST[dtype]], rtol=1e-6)


@INTEGER
@pytest.mark.parametrize("zero_point", [True, 100])
@pytest.mark.parametrize("function", [fake_quantize, lambda *a, **b: dequantize(quantize(*a, **b))])
def test_zero_points_need_no_promotion_of_dtypes(function, dtype, zero_point):
    x = np.array([-1.0, 0.5, 2.0], np.float32)
    expected = function(x, dtype, zero_point=zero_point)
    with jax.numpy_dtype_promotion("strict"):
        actual = function(x, dtype, zero_point=zero_point)
        jax.grad(lambda x: function(x, dtype, zero_point=zero_point).sum())(jnp.asarray(x))
    np.testing.assert_array_equal(actual, expected)


@INTEGER
@pytest.mark.parametrize("zero_point", [None, True, 100])
def test_nan_becomes_zero_in_integers(dtype, zero_point):
    x = np.array([1.0, np.nan, 2.0], np.float32)
    assert dequantize(quantize(x, dtype, zero_point=zero_point))[1] == 0


@SIGNED
def test_infinities_become_the_largest_finite_value_and_spare_their_tile(dtype):
    x = np.array([1.0, np.inf, -np.inf, -2.0], np.float32)
    q = quantize(x, dtype)
    lowest = -128.0 if dtype == INT8 else -LARGEST[dtype]
    np.testing.assert_allclose(q.scale, [2 / LARGEST[dtype]], rtol=1e-6)
    np.testing.assert_array_equal(numbers(q.qvalue)[1:3], [LARGEST[dtype], lowest])


@ALL
def test_a_tile_of_nothing_finite_has_scale_1(dtype):
    assert quantize(np.float32([np.nan, np.inf]), dtype).scale == 1


@ALL
@SCALES
def test_a_tile_of_zeros_has_scale_1_and_codes_0(dtype, scale_dtype):
    q = quantize(np.zeros((20, 6), np.float32), dtype, tiled_axes={0: 8}, scale_dtype=scale_dtype)
    assert (numbers(q.scale) == 1).all()
    assert (numbers(q.qvalue) == 0).all()


@ALL
def test_values_past_the_range_of_a_given_scale_saturate(dtype):
    q = quantize(np.float32([1e30, 1e9, 1e30]), dtype, scale=1.0)
    np.testing.assert_array_equal(numbers(q.qvalue), LARGEST[dtype])


def test_negative_values_become_0_in_uint8_without_a_zero_point():
    q = quantize(np.float32([-3.0, 0.25, 1.0]), UINT8)
    np.testing.assert_array_equal(q.qvalue, [0, 64, 255])
    np.testing.assert_allclose(q.scale, [1 / 255], rtol=1e-6)


@ALL
@SCALES
@pytest.mark.parametrize("tiny", [1e-37, 1e-39, 1e-45])
def test_the_smallest_numbers_get_a_scale_that_can_be_divided_by(dtype, scale_dtype, tiny):
    q = quantize(np.float32([tiny, 0]), dtype, scale_dtype=scale_dtype)
    values = numbers(dequantize(q))
    assert (numbers(q.scale) > 0).all()
    assert np.isfinite(values).all()
    assert (np.abs(values) <= max(2 * tiny, 2e-38)).all() or scale_dtype == np.float16


@SIGNED
@pytest.mark.parametrize("scale_dtype", [np.float32, BF16, E8M0], ids=lambda d: np.dtype(d).name)
def test_large_numbers_stay_finite(dtype, scale_dtype):
    large = np.finfo(np.float32).max / 2
    q = quantize(np.float32([large, -large]), dtype, scale_dtype=scale_dtype)
    np.testing.assert_allclose(dequantize(q, np.float32), [large, -large], rtol=2.0**-3)


@SIGNED
def test_a_float16_scale_stays_in_its_range(dtype):
    huge, tiny = (quantize(np.float32([v]), dtype, scale_dtype=np.float16) for v in (1e30, 1e-30))
    assert huge.scale == np.finfo(np.float16).max
    assert tiny.scale == np.finfo(np.float16).tiny


@SIGNED
def test_a_power_of_two_scale_is_the_next_one_up(dtype):
    x = np.float32(2.0) ** np.arange(-100, 100, 7, dtype=np.float32) * LARGEST[dtype]
    for factor, expected in ((1, 1), (1.01, 2), (1.99, 2)):
        q = quantize(x * np.float32(factor), dtype, channelwise_axes=[0], scale_dtype=E8M0)
        ratio = numbers(q.scale) / (np.float64(x) / LARGEST[dtype])
        np.testing.assert_allclose(ratio, expected, rtol=1e-6)
