"""FP8 outputs that cuBLASLt writes itself: scales of whole tensors, nothing after the sum."""

import numpy as np
import pytest
from gpu.products import check, draw, matrices, run

E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("amax", [None, (1, 1)], ids=["plain", "amax"])
@pytest.mark.parametrize("out_scale", [None, (1, 1)], ids=["saturated", "scaled"])
@pytest.mark.parametrize("size", [(16, 128, 16), (128, 512, 96), (512, 1024, 768)], ids=str)
def test_an_fp8_output_of_whole_tensors(size, out_scale, amax, activation):
    m, k, n = size
    spec = matrices(
        *[E4M3] * 2,
        m,
        k,
        n,
        lhs_tiles=(m, k),
        rhs_tiles=(n, k),
        out_dtype=E4M3,
        out_scale=out_scale,
        amax=amax,
        activation=activation,
    )
    assert check(spec, draw(12, spec)) == ("sm80_w8a16" if m == 16 else "cublaslt_fp8")


@pytest.mark.parametrize("out_dtype", [E4M3, "bfloat16", "float32"])
def test_a_relu_by_the_library_keeps_nan(out_dtype):
    m, k, n = 128, 512, 96
    tiles = {"lhs_tiles": (m, k), "rhs_tiles": (n, k)}
    spec = matrices(*[E4M3] * 2, m, k, n, **tiles, out_dtype=out_dtype, activation="relu")
    operands = draw(13, spec)
    operands["lhs"] = np.full((m, k), 0x38, np.uint8)  # 1
    operands["rhs"] = np.full((k, n), 0xB8, np.uint8)  # -1
    operands["lhs"][3, 7] = 0x7F
    out, _, ran = run(spec, operands)
    assert ran == ["cublaslt_fp8"]
    is_nan = out == 0x7F if out_dtype == E4M3 else np.isnan(out.astype(np.float32))
    assert is_nan[3].all()
    np.testing.assert_array_equal(out[np.arange(m) != 3], 0)
