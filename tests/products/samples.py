"""Operands of the tests of products, and how close results are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jaxfp8

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(5, 24)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(24, 16)), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=16), jnp.float32)
QW = jaxfp8.quantize(W, channelwise_axes=(1,))
DW = jaxfp8.dequantize(QW)
MATMUL = (((1,), (0,)), ((), ()))


def close(got, want, tolerance=1e-5):
    scale = float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), atol=tolerance * scale, rtol=0
    )
