"""All 256 codes, NaN, infinities: each decoded exactly, on whichever side and path."""

import numpy as np
import pytest
from gpu.products import ON_HOPPER, matrices, run

from jaxfp8._value import dtypes

EIGHT_BIT = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
CODES = np.arange(256, dtype=np.uint8)


def values(dtype: str) -> np.ndarray:
    return CODES.view(np.dtype(dtype)).astype(np.float32)


def stored(dtype: str, codes: np.ndarray) -> np.ndarray:
    return codes if dtypes.is_float8(dtype) else codes.view(np.dtype(dtype))


KERNELS = ["sm80_w8a16", "sm90_gemm", "cublaslt_wide", "general"]


def skip_unless_taken(kernel: str) -> None:
    if kernel == "sm90_gemm" and not ON_HOPPER:
        pytest.skip("`sm90_gemm` needs compute capability 9.0")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_every_code_of_a_weight_beside_wide_activations(dtype, wide, rhs_first, kernel):
    skip_unless_taken(kernel)
    # Row i of the weight holds code (i + j) at column j; the activations pick row i.
    table = (CODES[:, None] + CODES[None, :32]).astype(np.uint8)
    finite = np.isfinite(values(dtype)[table])
    weight = stored(dtype, np.where(finite, table, 0))
    one = np.eye(256, dtype=np.float32)
    spec = matrices(wide, dtype, 64, 256, 32, rhs_first=rhs_first)
    for start in range(0, 256, 64):
        rows = one[start : start + 64].astype(np.dtype(wide))
        rhs = weight if rhs_first else np.ascontiguousarray(weight.T)
        out, _, ran = run(spec, {"lhs": rows, "rhs": rhs}, kernel)
        assert ran == [kernel]
        expected = np.where(finite, values(dtype)[table], 0)[start : start + 64]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", ["float8_e4m3fn", "float8_e5m2"])
def test_every_code_of_few_rows_beside_fp8_weights(weights, rhs_first):
    """Row r holds codes 16 r to 16 r + 15, and column c of the weights is 1 at depth c."""
    one = np.eye(16).astype(np.dtype(weights)).view(np.uint8)
    codes = CODES.reshape(16, 16)
    spec = matrices("float8_e4m3fn", weights, 16, 16, 16, rhs_first=rhs_first)
    out, _, ran = run(spec, {"lhs": codes, "rhs": one}, "sm80_w8a16")
    assert ran == ["sm80_w8a16"]
    expected = values("float8_e4m3fn")[codes]
    has_nan = np.isnan(expected).any(axis=1)
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), has_nan)
    np.testing.assert_array_equal(out[~has_nan], expected[~has_nan])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_nan_or_infinity_in_a_weight_reaches_its_column_only(dtype, first, rhs_first, kernel):
    """Between columns of the largest value, whose code is next to that of NaN or infinity."""
    skip_unless_taken(kernel)
    special = CODES[~np.isfinite(values(dtype))]
    largest = 0x7E if dtype == "float8_e4m3fn" else 0x7B
    weight = np.full((64, 32), largest, np.uint8)
    weight[:, ::3] |= 0x80
    for column, code in enumerate(special):
        weight[column * 3 % 64, column * 2 + first] = code
    spec = matrices("bfloat16", dtype, 4, 64, 32, rhs_first=rhs_first)
    lhs = np.ones((4, 64), np.dtype("bfloat16"))
    out, _, _ = run(
        spec, {"lhs": lhs, "rhs": weight if rhs_first else np.ascontiguousarray(weight.T)}, kernel
    )
    expected = np.ones((4, 64)) @ weight.view(np.dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(out[finite], expected[finite], rtol=1e-6)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_every_code_on_both_sides_of_a_narrow_product(dtype):
    codes = CODES[np.isfinite(values(dtype))]
    codes = np.resize(codes, 256)
    one = np.float32(1).astype(np.dtype(dtype)).view(np.uint8)
    eye = (np.eye(256) * one).astype(np.uint8)
    table = np.resize(codes, (256, 32))
    spec = matrices(dtype, dtype, 256, 256, 32)
    out, _, _ = run(spec, {"lhs": stored(dtype, eye), "rhs": stored(dtype, table)})
    np.testing.assert_array_equal(out, table.view(np.dtype(dtype)).astype(np.float32))
    spec = matrices(dtype, dtype, 32, 256, 256, rhs_first=False)
    transposed = np.ascontiguousarray(table.T)
    out, _, _ = run(spec, {"lhs": stored(dtype, transposed), "rhs": stored(dtype, eye)})
    np.testing.assert_array_equal(out, transposed.view(np.dtype(dtype)).astype(np.float32))


@pytest.mark.parametrize("pair", [("float8_e4m3fn",) * 2, ("bfloat16", "float8_e4m3fn")], ids=str)
def test_nan_activations_reach_their_row_only(pair):
    spec = matrices(*pair, 16, 128, 32)
    lhs = np.ones((16, 128), np.dtype(pair[0]))
    lhs[5, 77] = np.nan
    rhs = np.full((128, 32), 0x38, np.uint8)
    lhs = lhs.view(np.uint8) if dtypes.is_float8(pair[0]) else lhs
    out, _, _ = run(spec, {"lhs": lhs, "rhs": rhs})
    assert np.isnan(out[5]).all()
    np.testing.assert_array_equal(np.delete(out, 5, 0), 128)
