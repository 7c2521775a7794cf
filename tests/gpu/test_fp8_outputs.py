"""FP8 outputs that cuBLASLt writes itself: scales of whole tensors, nothing after the sum."""

import pytest
from gpu.products import check, draw, matrices

E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize("amax", [None, (1, 1)], ids=["plain", "amax"])
@pytest.mark.parametrize("out_scale", [None, (1, 1)], ids=["saturated", "scaled"])
@pytest.mark.parametrize("size", [(16, 128, 16), (128, 512, 96), (512, 1024, 768)], ids=str)
def test_an_fp8_output_of_whole_tensors(size, out_scale, amax):
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
    )
    assert check(spec, draw(12, spec)) == "cublaslt_fp8"
