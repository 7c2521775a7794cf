"""What quantizing and dequantizing refuse, and how they say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantizing.samples import E8M0, normal, refused

from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize

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
