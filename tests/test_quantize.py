"""Quantising and dequantising against float64: the codes, the scales, the gradients."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize
from jaxfp8._value.qarray import QArray, check_qarray, scale_and_zero_point

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)

LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0, UINT8: 255.0}
# Half a step: a part of the magnitude, and at least so many units of the scale.
HALF_STEP = {
    E4M3: (2.0**-4, 2.0**-10),
    E5M2: (2.0**-3, 2.0**-17),
    INT8: (0.0, 0.5),
    UINT8: (0.0, 0.5),
}
# How far a stored scale may lie from the chosen one, relatively.
SCALE_ROUNDING = {np.dtype(np.float32): 2.0**-22, BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}

ALL = pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8, UINT8], ids=lambda d: d.name)
SIGNED = pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=lambda d: d.name)
FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: d.name)
INTEGER = pytest.mark.parametrize("dtype", [INT8, UINT8], ids=lambda d: d.name)
SCALES = pytest.mark.parametrize(
    "scale_dtype", [np.float32, BF16, np.float16, E8M0], ids=lambda d: np.dtype(d).name
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(x):
    return np.asarray(x).astype(np.float64)


def spread(values, shape, tiles):
    """A scale with one entry per tile as one with an entry per value."""
    values = np.broadcast_to(values, [-(-n // t) for n, t in zip(shape, tiles, strict=True)])
    return values[np.ix_(*(np.arange(n) // t for n, t in zip(shape, tiles, strict=True)))]


def oracle(q):
    """The definition in float64: what `q` stands for, and its scale by value."""
    scale = numbers(q.scale if q.scale.ndim else jnp.reshape(q.scale, (1,) * q.ndim))
    zero = 0 if q.zero_point is None else numbers(q.zero_point)
    tiles = q.tile_sizes
    entries = [-(-n // t) for n, t in zip(q.shape, tiles, strict=True)]
    scale, zero = (spread(np.broadcast_to(v, entries), q.shape, tiles) for v in (scale, zero))
    return (numbers(q.qvalue) - zero) * scale, scale


def largest_by_tile(x, tiles):
    """The largest magnitude in the tile of each value, by looking at each tile."""
    out = np.zeros(x.shape)
    for index in np.ndindex(*(-(-n // t) for n, t in zip(x.shape, tiles, strict=True))):
        tile = tuple(slice(i * t, (i + 1) * t) for i, t in zip(index, tiles, strict=True))
        out[tile] = np.abs(x[tile]).max(initial=0)
    return out


@st.composite
def cases(draw):
    """Arrays of rank 0 to 4 with any mixture of whole, channelwise and tiled axes."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), max_size=4)))
    kinds = [draw(st.sampled_from(["whole", "channel", "tile"])) for _ in shape]
    side = [draw(st.sampled_from([0, -len(shape)])) for _ in shape]
    tiles = {a + side[a]: draw(st.integers(1, 20)) for a, k in enumerate(kinds) if k == "tile"}
    channels = [a + side[a] for a, k in enumerate(kinds) if k == "channel"]
    magnitude = 10.0 ** draw(st.integers(-30, 30))
    x = normal(*shape, seed=draw(st.integers(0, 2**31))) * magnitude
    return np.float32(x), {"channelwise_axes": channels, "tiled_axes": tiles}


def round_trip(x, dtype, **options):
    """The QArray of `x` and the values it stands for, compiled as one function."""

    def both(x):
        q = quantize(x, dtype, **options)
        return q, dequantize(q, np.float32)

    return jax.jit(both)(x)


def outline(shape, **options):
    """The shapes of the QArray of an array of `shape`."""
    return jax.eval_shape(lambda x: quantize(x, **options), jax.ShapeDtypeStruct(shape, np.float32))


def gradient_of(loss, x):
    """The gradient of a loss, compiled as one function."""
    return jax.jit(jax.grad(loss))(x)


# Accuracy


@settings(max_examples=50)
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


@settings(max_examples=20)
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


# Special values


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


# Given scales and zero points


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


# With x64


OF_PYTHON_NUMBERS = """
import jax, jax.numpy as jnp, numpy as np
from jaxfp8 import dequantize, fake_quantize, quantize

x = np.float32([1.3, -2.0, 0.26])
calls = (
    lambda: quantize(x, np.int8, scale=0.5, zero_point=3),
    lambda: quantize(x, np.uint8, scale=[0.5], zero_point=[3]),
    lambda: quantize(x, scale=1, scale_dtype="float8_e8m0fnu"),
    lambda: quantize(1.3),
    lambda: fake_quantize(1.3, scale=np.float64(0.3)),
    lambda: quantize(x, scale=1e50),
    lambda: quantize(x, np.int8, zero_point=2**40),
)
for call in calls:
    try:
        y = call()
        print(repr(y), dequantize(y) if hasattr(y, "qvalue") else y.dtype, getattr(y, "scale", y))
    except ValueError as error:
        print(error)
"""

OF_FLOAT64 = """
x = jnp.asarray(np.linspace(-3, 3, 12).reshape(4, 3))
q, narrow = (quantize(v, channelwise_axes=[1]) for v in (x, x.astype(jnp.float32)))
same = (q.qvalue == narrow.qvalue).all() and (q.scale == narrow.scale).all()
y, gradient = jax.value_and_grad(lambda v: fake_quantize(v, channelwise_axes=[1]).sum())(x)
print("float64:", x.dtype, q, same, y.dtype, gradient.dtype, (gradient == 1).all())
"""


@pytest.fixture(scope="module")
def printed_with_x64():
    """What the two scripts print in a process that has x64."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", OF_PYTHON_NUMBERS + OF_FLOAT64]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    return subprocess.run(
        command, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def test_python_numbers_mean_the_same_with_x64(capsys, printed_with_x64):
    exec(OF_PYTHON_NUMBERS, {})
    printed = capsys.readouterr().out
    assert "zero_point=int32[]" in printed
    assert printed_with_x64.partition("float64:")[0] == printed


def test_float64_is_quantised_as_its_float32_and_keeps_its_gradient(printed_with_x64):
    q = "QArray(float8_e4m3fn[4,3], scale=float32[1,3])"
    found = printed_with_x64.partition("float64:")[2]
    assert found.strip() == f"float64 {q} True float64 float64 True"


# Dequantising


@pytest.mark.parametrize("scale_dtype", [np.float32, BF16, np.float16], ids=lambda d: str(d))
def test_dequantize_gives_the_dtype_of_the_scale(scale_dtype):
    assert dequantize(quantize(normal(3), scale_dtype=scale_dtype)).dtype == scale_dtype


def test_dequantize_gives_float32_for_power_of_two_scales():
    assert dequantize(quantize(normal(3), scale_dtype=E8M0)).dtype == np.float32


@ALL
@pytest.mark.parametrize("out", [np.float32, BF16, np.float16], ids=lambda d: np.dtype(d).name)
def test_dequantize_rounds_the_float32_product_once_to_its_dtype(dtype, out):
    q = quantize(np.abs(normal(20, 6)), dtype, tiled_axes={0: 8})
    product = numbers(q.qvalue).astype(np.float32) * spread(
        np.asarray(q.scale), q.shape, q.tile_sizes
    )
    np.testing.assert_array_equal(dequantize(q, out), product.astype(out))


def test_dequantize_of_channels_is_a_convert_and_a_multiplication():
    q = quantize(normal(6, 4), channelwise_axes=[1])
    primitives = [str(e.primitive) for e in jax.make_jaxpr(dequantize)(q).eqns]
    assert primitives == ["stop_gradient", "convert_element_type", "mul"]


def test_dequantize_of_dividing_tiles_never_repeats_the_scale():
    q = quantize(normal(6, 4), tiled_axes={0: 3})
    primitives = [str(e.primitive) for e in jax.make_jaxpr(dequantize)(q).eqns]
    assert [p for p in primitives if p != "reshape"] == [
        "stop_gradient",
        "convert_element_type",
        "mul",
    ]


# Gradients


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


# Errors


def refused(error, text, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert text in str(caught.value)


BAD = {
    "dtype": (
        {"dtype": np.float16},
        TypeError,
        "`jaxfp8.quantize`: `dtype` is float16, but float8_e4m3fn, float8_e5m2, int8 or uint8 is "
        "needed; choose one of these.",
    ),
    "dtype of no such name": ({"dtype": "foo"}, TypeError, "`dtype` is 'foo', but float8_e4m3fn"),
    "dtype of a number": ({"dtype": 3}, TypeError, "`dtype` is 3, but float8_e4m3fn"),
    "dtype None": ({"dtype": None}, TypeError, "`dtype` is None, but float8_e4m3fn"),
    "scale dtype of no such name": (
        {"scale_dtype": "qq"},
        TypeError,
        "`jaxfp8.quantize`: `scale_dtype` is 'qq', but float32, bfloat16, float16 or "
        "float8_e8m0fnu is needed; choose one of these.",
    ),
    "scale dtype": (
        {"scale_dtype": np.int32},
        TypeError,
        "`scale_dtype` is int32, but float32, bfloat16, float16 or float8_e8m0fnu is needed",
    ),
    "axis": (
        {"channelwise_axes": [2]},
        ValueError,
        "`jaxfp8.quantize`: `channelwise_axes` names axis 2, but `x` has 2 axes; "
        "name axes from -2 to 1.",
    ),
    "axis of letters": (
        {"channelwise_axes": ("a",)},
        TypeError,
        "`channelwise_axes` names axis 'a', but an axis is an int; give its place.",
    ),
    "axis of 1.5": ({"channelwise_axes": (1.5,)}, TypeError, "names axis 1.5, but an axis is an"),
    "axis True": ({"channelwise_axes": (True,)}, TypeError, "names axis True, but an axis is an"),
    "axes an int": (
        {"channelwise_axes": 1},
        TypeError,
        "`channelwise_axes` is 1, but a collection of axes is needed; write it like `(0,)`.",
    ),
    "axes None": ({"channelwise_axes": None}, TypeError, "is None, but a collection of axes is"),
    "axes a mapping": ({"channelwise_axes": {0: 2}}, TypeError, "is {0: 2}, but a collection of"),
    "tiled axis of letters": (
        {"tiled_axes": {"x": 2}},
        TypeError,
        "`tiled_axes` names axis 'x', but an axis is an int; give its place.",
    ),
    "tiled axes an int": (
        {"tiled_axes": 3},
        TypeError,
        "`tiled_axes` is 3, but a size by axis is needed; write it like `{0: 128}`.",
    ),
    "tiled axes a list": ({"tiled_axes": [(0, 2)]}, TypeError, "is [(0, 2)], but a size by axis"),
    "tiled axis": (
        {"tiled_axes": {-3: 4}},
        ValueError,
        "`tiled_axes` names axis -3, but `x` has 2",
    ),
    "axis twice": (
        {"channelwise_axes": [1], "tiled_axes": {-1: 4}},
        ValueError,
        "axis -1 is named twice, but an axis has one size of tile; "
        "name it in `channelwise_axes` or once in `tiled_axes`.",
    ),
    "tile of 0": (
        {"tiled_axes": {0: 0}},
        ValueError,
        "`tiled_axes` maps axis 0 to 0, but a tile is an int of at least 1; "
        "give the number of values that share.",
    ),
    "tile of 0.5": ({"tiled_axes": {0: 0.5}}, ValueError, "`tiled_axes` maps axis 0 to 0.5"),
    "tile of True": ({"tiled_axes": {0: True}}, ValueError, "`tiled_axes` maps axis 0 to True"),
    "zero point on FP8": (
        {"zero_point": True},
        TypeError,
        "zero_point of `x` is given, but float8_e4m3fn has none",
    ),
    "zero point of floats": (
        {"dtype": np.int8, "zero_point": jnp.float32(1)},
        TypeError,
        "zero_point of `x` has dtype float32, but qvalue of dtype int8 needs int8 or int32",
    ),
    "scale of integers": (
        {"scale": jnp.ones((), np.int32)},
        TypeError,
        "scale of `x` has dtype int32, but float32",
    ),
    "scale of True": ({"scale": True}, TypeError, "scale of `x` has dtype bool, but float32"),
    "scale of text": (
        {"scale": "a"},
        TypeError,
        "`jaxfp8.quantize`: `scale` is of type str, but an array of numbers is needed; "
        "pass `scale` as a jax.Array (inside `jax.eval_shape` for shapes alone).",
    ),
    "scale not positive": (
        {"scale": -1.0},
        ValueError,
        "`scale` is -1.0, but a float32 scale is a number from 1.18e-38 to 3.4e+38; "
        "leave it out to have one chosen.",
    ),
    "scale not a number": ({"scale": float("nan")}, ValueError, "`scale` is nan, but a float32"),
    "scale not finite": ({"scale": float("inf")}, ValueError, "`scale` is inf, but a float32"),
    "scale overflows": ({"scale": 1e50}, ValueError, "`scale` is 1e+50, but a float32 scale"),
    "scale overflows a float": ({"scale": 10**400}, ValueError, "but a float32 scale is a number"),
    "scale underflows": ({"scale": 1e-50}, ValueError, "`scale` is 1e-50, but a float32 scale"),
    "scale denormal": ({"scale": 1e-39}, ValueError, "`scale` is 1e-39, but a float32 scale"),
    "scale overflows its dtype": (
        {"scale": 1e5, "scale_dtype": np.float16},
        ValueError,
        "`scale` is 100000.0, but a float16 scale is a number from 5.96e-08 to 6.55e+04",
    ),
    "scale underflows its dtype": (
        {"scale": 1e-9, "scale_dtype": np.float16},
        ValueError,
        "`scale` is 1e-09, but a float16 scale is a number",
    ),
    "scale past the powers of two": (
        {"scale": 2e38, "scale_dtype": E8M0},
        ValueError,
        "`scale` is 2e+38, but a float8_e8m0fnu scale is a number from 1.18e-38 to 1.7e+38",
    ),
    "zero point of text": ({"zero_point": "a"}, TypeError, "`zero_point` is of type str, but an"),
    "zero point overflows": (
        {"dtype": np.int8, "zero_point": 2**40},
        ValueError,
        "`zero_point` is 1099511627776, but a zero point of int8 is one of its codes, -128 to 127; "
        "pass True to have one chosen.",
    ),
    "zero point below the codes": (
        {"dtype": np.uint8, "zero_point": -1},
        ValueError,
        "`zero_point` is -1, but a zero point of uint8 is one of its codes, 0 to 255",
    ),
    "zero point above the codes": (
        {"dtype": np.uint8, "zero_point": np.int32(256)},
        ValueError,
        "`zero_point` is 256, but a zero point of uint8 is one of its codes, 0 to 255",
    ),
    "scale shape": (
        {"scale": jnp.ones((3, 1))},
        ValueError,
        "scale of `x` has shape (3, 1), but qvalue of shape (4, 6) needs 1, 4 or a divisor of it "
        "on axis 0",
    ),
    "scale against axes": (
        {"scale": jnp.ones((4, 1)), "channelwise_axes": [1]},
        ValueError,
        "`scale` has shape (4, 1), but the axes named for `x` of shape (4, 6) need (1, 6); "
        "name no axes, so that the scale says the tiles.",
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), BAD.values(), ids=BAD.keys())
def test_quantize_refuses(options, error, text):
    refused(error, text, quantize, normal(4, 6), **options)


def test_an_error_of_fake_quantize_names_it():
    refused(TypeError, "`jaxfp8.fake_quantize`: `dtype`", fake_quantize, normal(3), np.int32)


def test_quantize_refuses_integers():
    text = (
        "`x` is int32, but float32, bfloat16, float16 or float64 is needed; "
        "convert it with `.astype`."
    )
    refused(TypeError, text, quantize, jnp.arange(3))


@pytest.mark.parametrize(
    "x",
    [
        "abc",
        None,
        np.array([object()]),
        [[1.0, 2.0], [3.0]],
        jax.ShapeDtypeStruct((3,), np.float32),
    ],
    ids=["text", "None", "objects", "ragged", "shape"],
)
def test_quantize_refuses_what_is_no_array(x):
    text = (
        f"`jaxfp8.quantize`: `x` is of type {type(x).__name__}, but an array of numbers is "
        "needed; pass `x` as a jax.Array (inside `jax.eval_shape` for shapes alone)."
    )
    refused(TypeError, text, quantize, x)


def test_quantize_refuses_a_qarray():
    text = "`x` is a QArray already, but an array of floats is needed; use `jaxfp8.dequantize`"
    refused(TypeError, text, quantize, quantize(normal(3)))


def test_dequantize_refuses_an_array():
    text = "`jaxfp8.dequantize`: `q` is of type ndarray, but a QArray is needed"
    refused(TypeError, text, dequantize, normal(3))


def test_dequantize_refuses_an_integer_dtype():
    text = "`dtype` is int32, but float32, bfloat16 or float16 is needed; choose one of these."
    refused(TypeError, text, dequantize, quantize(normal(3)), np.int32)


def test_dequantize_refuses_a_dtype_of_no_such_name():
    text = "`jaxfp8.dequantize`: `dtype` is 'zz', but float32, bfloat16 or float16 is needed"
    refused(TypeError, text, dequantize, quantize(normal(3)), "zz")


def test_dequantize_refuses_what_holds_no_data():
    text = "`jaxfp8.dequantize`: qvalue of `q` is of type ShapeDtypeStruct, but an array of"
    refused(TypeError, text, dequantize, jax.eval_shape(quantize, normal(3)))


def test_scales_and_zero_points_keep_their_gradient_policy_for_other_functions():
    q = quantize(normal(6, 4), tiled_axes={0: 3})

    def total(scale):
        return scale_and_zero_point(QArray(q.qvalue, scale))[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(q.scale), np.ones((2, 1)))
