"""Quantized values are within half a step of what they were, for any tiles and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizing.samples import (
    ALL,
    BF16,
    E4M3,
    E5M2,
    FLOAT8,
    HALF_STEP,
    INT8,
    LARGEST,
    SCALE_ROUNDING,
    SCALES,
    UINT8,
    cases,
    largest_by_tile,
    normal,
    numbers,
    oracle,
    outline,
    round_trip,
    spread,
)

from jaxfp8._ops.quantize import dequantize, quantize
from jaxfp8._value.qarray import QArray, check_qarray


@settings(max_examples=sampling.examples(50))
@given(cases(), st.sampled_from([E4M3, E5M2, INT8]), st.sampled_from([BF16, np.float32]))
def test_values_are_within_half_a_step_whatever_the_tiles(case, dtype, scale_dtype):
    x, axes = case
    q, y = round_trip(x, dtype, scale_dtype=scale_dtype, **axes)
    check_qarray(q, "test", "q")
    exact, scale = oracle(q)
    relative, absolute = HALF_STEP[dtype]
    bound = np.maximum(relative * np.abs(x), absolute * scale) * (1 + 1e-5)
    assert (np.abs(exact - x) <= bound).all()
    expected = largest_by_tile(np.float64(x), q.tile_sizes) / LARGEST[dtype]
    expected = np.where(expected == 0, 1, expected)
    rounding = SCALE_ROUNDING[np.dtype(scale_dtype)]
    np.testing.assert_allclose(scale, expected, rtol=rounding)
    np.testing.assert_allclose(numbers(y), exact, rtol=2.0**-23)


@settings(max_examples=sampling.examples(20))
@given(cases(), st.sampled_from([INT8, UINT8]), st.floats(-3, 3))
def test_a_chosen_zero_point_keeps_values_within_half_a_step(case, dtype, shift):
    x, axes = case
    x = np.float32(x + shift * np.abs(x).max(initial=0))
    q, y = round_trip(x, dtype, zero_point=True, **axes)
    check_qarray(q, "test", "q")
    exact, scale = oracle(q)
    assert (np.abs(exact - x) <= 0.5 * scale * (1 + 1e-4)).all()
    np.testing.assert_allclose(numbers(y), exact, rtol=2.0**-23)


@ALL
@SCALES
@pytest.mark.same_bits
def test_codes_are_the_nearest_to_x_over_the_stored_scale(dtype, scale_dtype):
    x = np.abs(normal(20, 6)) if dtype == UINT8 else normal(20, 6)
    q = quantize(x, dtype, channelwise_axes=[1], tiled_axes={0: 8}, scale_dtype=scale_dtype)
    stored = np.asarray(q.scale).astype(np.float32)
    steps = np.clip(x / spread(stored, x.shape, q.tile_sizes), -LARGEST[dtype], LARGEST[dtype])
    steps = np.round(steps) if dtype in (INT8, UINT8) else steps
    assert q.scale.dtype == scale_dtype
    np.testing.assert_array_equal(np.asarray(q.qvalue), steps.astype(dtype))


@pytest.mark.parametrize("x_dtype", [np.float32, BF16, np.float16], ids=lambda d: np.dtype(d).name)
@ALL
def test_each_float_input_is_computed_in_float32(dtype, x_dtype):
    x = normal(20, 6).astype(x_dtype)
    q, wide = (quantize(v, dtype, tiled_axes={0: 8}) for v in (x, x.astype(np.float32)))
    np.testing.assert_array_equal(q.qvalue, wide.qvalue)
    np.testing.assert_array_equal(q.scale, wide.scale)


@FLOAT8
def test_dequantize_decodes_every_code(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    values = dequantize(QArray(jnp.asarray(codes), jnp.float32(0.5)))
    np.testing.assert_array_equal(values, codes.astype(np.float32) * 0.5)


@FLOAT8
def test_every_finite_code_survives_a_round_trip(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    q = quantize(codes.astype(np.float32), dtype, scale=1.0)
    np.testing.assert_array_equal(np.asarray(q.qvalue).view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((6, 8), {}, (1, 1)),
        ((6, 8), {"channelwise_axes": [1]}, (1, 8)),
        ((6, 8), {"channelwise_axes": [-1]}, (1, 8)),
        ((6, 8), {"tiled_axes": {0: 2, -1: 4}}, (3, 2)),
        ((7, 8), {"channelwise_axes": [1], "tiled_axes": {0: 3}}, (3, 8)),
        ((7, 8), {"tiled_axes": {0: 128}}, (1, 1)),
        ((0, 8), {"channelwise_axes": [1]}, (1, 8)),
        ((0, 8), {"channelwise_axes": [0]}, (0, 1)),
        ((), {}, ()),
    ],
)
def test_the_scale_has_an_entry_per_tile(shape, axes, expected):
    assert outline(shape, **axes).scale.shape == expected


def test_tiles_are_stated_only_where_shapes_do_not_tell():
    shape = (2, 8, 9, 8)
    assert outline(shape, tiled_axes={1: 4, 3: 2}).tiles is None
    assert outline(shape, tiled_axes={1: 4, 2: 4, 3: 2}).tiles == (4, None)


@ALL
def test_jit_agrees_with_op_by_op(dtype):
    x = normal(20, 6)
    eager = quantize(x, dtype, tiled_axes={0: 8})
    jitted = jax.jit(lambda x: quantize(x, dtype, tiled_axes={0: 8}))(x)
    np.testing.assert_array_equal(eager.qvalue, jitted.qvalue)
    np.testing.assert_array_equal(eager.scale, jitted.scale)
