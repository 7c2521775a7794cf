"""Dequantizing: the dtype of the result, one rounding, no repeated scale."""

import jax
import numpy as np
import pytest
from quantizing.samples import ALL, BF16, E8M0, normal, numbers, spread

from jaxfp8._ops.quantize import dequantize, quantize


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
