"""Each tile shape of `sm90_gemm` on an H100, against XLA in float32 on the same device.

The sizes are those of `CheckChoices` and `CheckWeights` in ffi/tests/sm90_gemm_schedule_test.cc.
These tables have the tile shape of each size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import HOPPER, matrices, run

import jaxfp8
from jaxfp8._value import dtypes

pytestmark = HOPPER
E4M3 = "float8_e4m3fn"
BLOCKS = {"lhs_tiles": (1, 128), "rhs_tiles": (128, 128)}
FP8_SIZES = [
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 2112, 7168),
    (4096, 32768, 512),
    (512, 4096, 7168),
    (64, 7168, 16384),
    (64, 4096, 7168),
]
FAST_SIZES = [(4096, 8192, 8192), (256, 4096, 4096), (64, 14336, 4096)]
INT8_SIZES = [(4096, 4096, 4096), (2048, 5120, 5120), (256, 8192, 8192), (64, 8192, 8192)]
MIXED_SIZES = [(128, 28672, 8192), (256, 28672, 8192), (128, 14336, 4096), (4096, 4096, 4096)]
# The largest error as a share of the deviation of the results. A wrong tile exceeds 1.
# Fast sums keep 13 bits.
ERROR, FAST_ERROR = 0.02, 0.25


def drawn(seed, side):
    """Normal values of a side as they are stored, and scales where it has some."""
    values = jax.random.normal(jax.random.key(seed), side.shape, jnp.float32)
    stored = jnp.dtype(dtypes.storage(side.dtype))
    if dtypes.is_int8(side.dtype):
        codes = jnp.clip(jnp.round(values * 23), -127, 127).astype(side.dtype)
    else:
        factor = 100 if dtypes.is_eight_bit(side.dtype) else 1
        codes = jnp.clip(values * factor, -448, 448).astype(side.dtype)
    if not side.scale:
        return codes.view(stored), None, codes.astype(jnp.float32)
    key = jax.random.key(seed + 1)
    scale = jax.random.uniform(key, side.scale_shape, jnp.float32, 0.5, 2.0)
    held = jaxfp8.QArray(codes, scale, tiles=side.tiles)
    return codes.view(stored), scale, jaxfp8.dequantize(held, jnp.float32)


def error(spec):
    """The largest error of the product, as a share of the deviation of the exact one."""
    x, x_scale, wide_x = drawn(0, spec.lhs)
    w, w_scale, wide_w = drawn(2, spec.rhs)
    operands = {"lhs": x, "rhs": w, "lhs_scale": x_scale, "rhs_scale": w_scale}
    given = {name: array for name, array in operands.items() if array is not None}
    got, _, ran = run(spec, given, "sm90_gemm")
    assert ran == ["sm90_gemm"]
    exact = jnp.matmul(wide_x, wide_w.T, precision="highest")
    return float(jnp.abs(got - exact).max() / jnp.std(exact))


@pytest.mark.parametrize("size", FP8_SIZES, ids=str)
def test_blocks(size):
    m, n, k = size
    assert error(matrices(E4M3, E4M3, m, k, n, rhs_first=False, **BLOCKS)) < ERROR


@pytest.mark.parametrize("size", FAST_SIZES, ids=str)
def test_fast_sums(size):
    m, n, k = size
    tiles = {"lhs_tiles": (1, k), "rhs_tiles": (1, k), "precision": "default"}
    assert error(matrices(E4M3, E4M3, m, k, n, rhs_first=False, **tiles)) < FAST_ERROR


@pytest.mark.parametrize("size", MIXED_SIZES, ids=str)
def test_weights_alone(size):
    m, n, k = size
    spec = matrices("bfloat16", E4M3, m, k, n, rhs_first=False, rhs_tiles=(1, k))
    assert error(spec) < ERROR


@pytest.mark.parametrize("size", INT8_SIZES, ids=str)
def test_int8(size):
    m, n, k = size
    spec = matrices("int8", "int8", m, k, n, rhs_first=False)
    operands = {"lhs": drawn(0, spec.lhs)[0], "rhs": drawn(2, spec.rhs)[0]}
    got, _, ran = run(spec, operands, "sm90_gemm")
    assert ran == ["sm90_gemm"]
    numbers = (((1,), (1,)), ((), ()))
    exact = jax.lax.dot_general(*operands.values(), numbers, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(got, np.asarray(exact).astype(np.float32))
