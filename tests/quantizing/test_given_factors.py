"""Scales and zero points that the caller gives, and chosen zero points."""

import jax.numpy as jnp
import numpy as np
import pytest
from quantizing.samples import INT8, INTEGER, SCALES, normal

from jaxfp8._ops.quantize import dequantize, quantize
from jaxfp8._value.qarray import QArray


@SCALES
def test_a_given_scale_is_used_as_it_is(scale_dtype):
    scale = jnp.array([[0.5], [2.0]], scale_dtype)
    q = quantize(np.float32([[1, 2], [1, 2]]), INT8, scale=scale)
    assert q.scale is scale
    np.testing.assert_array_equal(q.qvalue, [[2, 4], [0, 1]])


@SCALES
def test_a_number_as_scale_becomes_the_scale_dtype(scale_dtype):
    q = quantize(np.float32([1, 2]), scale=0.25, scale_dtype=scale_dtype)
    assert (q.scale.dtype, q.scale.shape, float(q.scale)) == (scale_dtype, (), 0.25)


def test_a_number_as_scale_may_be_as_small_as_its_dtype_holds():
    q = quantize(np.float32([1e-7]), INT8, scale=1e-7, scale_dtype=np.float16)
    assert q.scale == np.float16(1e-7)
    assert dequantize(q, np.float32)[0] == np.float32(np.float16(1e-7))


@pytest.mark.parametrize("axis", [np.int64(1), jnp.int32(1)], ids=["numpy", "jax"])
def test_axes_may_be_anything_that_counts_as_an_int(axis):
    assert quantize(normal(4, 6), channelwise_axes=[axis]).scale.shape == (1, 6)


def test_the_shape_of_a_given_scale_says_the_tiles():
    q = quantize(normal(6, 4), scale=jnp.ones((3, 4)))
    assert q.tile_sizes == (2, 1)


def test_a_given_scale_may_have_partial_tiles_where_they_are_named():
    q = quantize(normal(7, 4), scale=jnp.ones((3, 1)), tiled_axes={0: 3})
    assert q.tile_sizes == (3, 4)


def test_a_given_scale_of_zero_gives_no_nan():
    assert dequantize(quantize(np.float32([0, 1]), scale=jnp.float32(0))).tolist() == [0, 0]


@INTEGER
@pytest.mark.parametrize("scale", [None, 0.1, "array"])
def test_a_chosen_zero_point_is_of_the_codes_dtype_and_represents_zero(dtype, scale):
    scale = jnp.full((5, 1), 0.1) if scale == "array" else scale
    x = np.float32(np.random.default_rng(0).uniform(-3, 9, (20, 6)))
    q = quantize(x, dtype, scale=scale, zero_point=True)
    assert q.zero_point.dtype == dtype
    assert (dequantize(QArray(q.zero_point, q.scale, q.zero_point)) == 0).all()


@INTEGER
def test_a_chosen_zero_point_uses_the_whole_range(dtype):
    info = np.iinfo(dtype)
    q = quantize(np.linspace(-1, 3, 99, dtype=np.float32), dtype, zero_point=True)
    assert (q.qvalue.min(), q.qvalue.max()) == (info.min, info.max)
    np.testing.assert_allclose(q.scale, [4 / 255], rtol=1e-6)


@INTEGER
@pytest.mark.parametrize("zero_dtype", [None, np.int32], ids=["own", "int32"])
def test_a_given_zero_point_chooses_the_scale_that_just_fits(dtype, zero_dtype):
    info = np.iinfo(dtype)
    zero = jnp.array([[info.min + 55], [info.max]], zero_dtype or dtype)
    x = np.float32([[-1.0, 2.0], [-1.0, 2.0]])
    q = quantize(x, dtype, channelwise_axes=[0], zero_point=zero)
    assert q.zero_point is zero
    np.testing.assert_allclose(q.scale, [[max(1 / 55, 2 / 200)], [1 / 255]], rtol=1e-6)
    np.testing.assert_allclose(dequantize(q), [[-1, 2], [-1, 0]], atol=1 / 100)


def test_zero_is_a_zero_point_and_false_is_none():
    assert quantize(normal(3), INT8, zero_point=0).zero_point == 0
    assert quantize(normal(3), INT8, zero_point=False).zero_point is None


def test_a_zero_point_outside_the_codes_is_kept_exactly():
    q = quantize(np.float32([400.0, 500.0]), INT8, scale=1.0, zero_point=jnp.int32(-420))
    np.testing.assert_array_equal(q.qvalue, [-20, 80])
    np.testing.assert_array_equal(dequantize(q), [400, 500])
