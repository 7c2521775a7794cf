"""The dtype of a product, 8-bit outputs, amax, and infinite scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products.samples import DW, QW, RNG, X, close

import jaxfp8
from jaxfp8 import QArray


class TestDtypes:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    def test_default_output_is_the_float_side(self, dtype) -> None:
        assert jaxfp8.matmul(X.astype(dtype), QW).dtype == dtype
        assert jaxfp8.matmul(QArray(QW.qvalue.T, QW.scale.T), X.astype(dtype).T).dtype == dtype

    def test_default_output_of_two_qarrays_is_the_promoted_scale(self) -> None:
        half = QArray(QW.qvalue, QW.scale.astype(jnp.bfloat16))
        qx = jaxfp8.quantize(X, scale_dtype=jnp.bfloat16)
        assert jaxfp8.matmul(qx, half).dtype == jnp.bfloat16
        assert jaxfp8.matmul(qx, QW).dtype == jnp.float32

    def test_unscaled_integers_sum_exactly_in_int32(self) -> None:
        a = RNG.integers(-128, 128, (7, 300)).astype(np.int8)
        b = RNG.integers(0, 256, (300, 9)).astype(np.uint8)
        got = jaxfp8.matmul(a, b)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))

    def test_eight_bit_output_is_a_qarray(self) -> None:
        got = jaxfp8.matmul(X, QW, preferred_element_type=jnp.float8_e4m3fn, out_scale=0.05)
        assert got.qvalue.dtype == jnp.float8_e4m3fn
        close(jaxfp8.dequantize(got), X @ DW, 0.07)

    def test_out_scale_by_row_is_kept_as_the_scale(self) -> None:
        y = X @ DW
        out_scale = jnp.max(jnp.abs(y), axis=1, keepdims=True) / 127
        got = jaxfp8.matmul(X, QW, preferred_element_type=jnp.int8, out_scale=out_scale)
        np.testing.assert_array_equal(got.scale, out_scale)
        close(jaxfp8.dequantize(got), y, 0.005)

    def test_amax_is_taken_after_the_activation_and_before_out_scale(self) -> None:
        q, amax = jaxfp8.matmul(
            X,
            QW,
            activation="relu",
            preferred_element_type=jnp.int8,
            out_scale=9.0,
            return_amax=True,
        )
        assert isinstance(q, QArray)
        assert amax.shape == ()
        close(amax, jnp.max(jax.nn.relu(X @ DW)))

    def test_out_scale_gets_the_rank_of_the_output(self) -> None:
        got = jaxfp8.matmul(X, QW, preferred_element_type=jnp.int8, out_scale=jnp.full((16,), 0.1))
        assert got.scale.shape == (1, 16)
        close(jaxfp8.dequantize(got), X @ DW, 0.02)

    @pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "silu"])
    def test_activations_of_special_values_are_those_of_jax(self, activation) -> None:
        x = jnp.asarray([[-jnp.inf], [jnp.inf], [jnp.nan], [-3e38], [3e38], [-0.0]])
        one = jnp.ones((1, 1), jnp.float8_e4m3fn)
        want = {
            "relu": jax.nn.relu,
            "gelu_tanh": jax.nn.gelu,
            "gelu_erf": lambda y: jax.nn.gelu(y, approximate=False),
            "silu": jax.nn.silu,
        }[activation](x)
        np.testing.assert_array_equal(jaxfp8.matmul(x, one, activation=activation), want)


class TestInfiniteScales:
    """A scale follows the sum of the terms that share it."""

    CODES = jnp.asarray([[1, 2, -1], [-2, 0, 1], [0, 1, 0], [0, 1, 0]])
    WANT = (-np.inf, np.inf, np.nan)  # of sums -1, 4 and 0

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("x", [jnp.float32, jnp.bfloat16, jnp.int8])
    def test_a_product_has_the_sign_of_the_sum(self, x, dtype) -> None:
        w = jaxfp8.QArray(self.CODES.astype(dtype), jnp.full((1, 3), jnp.inf))
        x = jnp.ones((2, 4), x)
        got = jaxfp8.matmul(x, w, preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(got, [self.WANT] * 2)

    def test_a_code_of_0_is_dequantized_to_nan(self) -> None:
        w = jaxfp8.QArray(self.CODES.astype(jnp.int8), jnp.full((1, 3), jnp.inf))
        np.testing.assert_array_equal(np.isnan(jaxfp8.dequantize(w)), self.CODES == 0)
