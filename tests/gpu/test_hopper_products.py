"""Products of two 8-bit operands by path `sm90_gemm`, against float64."""

import numpy as np
import pytest
from gpu.products import FP8, HOPPER, INT8, check, draw, matrices, run, with_zeros

import oracle

pytestmark = HOPPER

# Three batch indices of 130 x 72, with what goes beside an 8-bit output.
IN_BATCHES = {
    "batch": 3,
    "out_scale": (3, 1, 1),
    "amax": (3, 1, 1),
    "residual": (3, 130, 72),
    "residual_dtype": "bfloat16",
}


@pytest.mark.parametrize("size", [(1, 130, 16), (67, 401, 131), (300, 512, 392)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in FP8 for b in FP8], ids=str)
@pytest.mark.parametrize("rhs_tiles", [(128, 128), (1, 128), (5, 256)], ids=str)
def test_blocks_on_hopper(rhs_tiles, pair, size):
    m, k, n = size
    for out_dtype, more in (("bfloat16", {}), ("float32", {"bias": (1, n), "activation": "silu"})):
        tiles = {"lhs_tiles": (1, 128), "rhs_tiles": rhs_tiles}
        spec = matrices(*pair, m, k, n, rhs_first=False, out_dtype=out_dtype, **tiles, **more)
        assert check(spec, draw(20, spec)) == "sm90_gemm"


@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_blocks_on_hopper_of_any_layout_in_batches(rhs_first, lhs_first):
    e4m3 = FP8[0]
    spec = matrices(
        *(e4m3, e4m3, 130, 264, 72),
        **IN_BATCHES,
        lhs_first=lhs_first,
        rhs_first=rhs_first,
        lhs_tiles=(1, 128),
        rhs_tiles=(128, 128),
        out_dtype=e4m3,
    )
    assert check(spec, draw(21, spec)) == "sm90_gemm"


def test_blocks_on_hopper_have_the_same_bits_in_every_run():
    spec = matrices(
        *FP8[:1] * 2, 700, 1024, 1544, lhs_tiles=(1, 128), rhs_tiles=(128, 128), rhs_first=False
    )
    operands = draw(22, spec)
    first = run(spec, operands, "sm90_gemm")[0]
    for _ in range(3):
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], first)


ZEROS = pytest.mark.parametrize("zeros", ["", "lhs", "rhs", "lhs rhs"])


@ZEROS
@pytest.mark.parametrize("size", [(1, 130, 16), (67, 401, 131), (300, 1040, 392)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in INT8 for b in INT8], ids=str)
def test_int8_on_hopper_is_rounded_once(pair, size, zeros):
    m, k, n = size
    spec = with_zeros(matrices(*pair, m, k, n, rhs_first=False), zeros)
    operands = draw(24, spec)
    got, _, ran = run(spec, operands, "sm90_gemm")
    assert ran == ["sm90_gemm"]
    lhs, rhs = (
        operands[s].astype(np.int64) - operands.get(f"{s}_zero_point", np.int64(0))
        for s in ("lhs", "rhs")
    )
    np.testing.assert_array_equal(got, (lhs @ rhs.T).astype(np.float32))


@ZEROS
@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_int8_on_hopper_of_any_layout_in_batches(rhs_first, lhs_first, zeros):
    spec = matrices(
        *("int8", "uint8", 130, 264, 72),
        **IN_BATCHES,
        lhs_first=lhs_first,
        rhs_first=rhs_first,
        lhs_tiles=(1, 264),
        rhs_tiles=(72, 264),
        out_dtype="int8",
        bias=(1, 1, 72),
        activation="silu",
    )
    spec = with_zeros(spec, zeros)
    assert check(spec, draw(25, spec), "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [(1, 256), (1, 1), (300, 1)], ids=str)
def test_int8_on_hopper_adds_a_bias(bias, out_dtype):
    spec = matrices(
        *("int8", "int8", 300, 512, 256),
        lhs_tiles=(1, 512),
        rhs_tiles=(1, 512),
        rhs_first=False,
        zero_points=True,
        out_dtype=out_dtype,
        bias=bias,
    )
    assert check(spec, draw(26, spec), "sm90_gemm") == "sm90_gemm"


def test_int8_on_hopper_has_the_same_bits_in_every_run():
    scales = {"lhs_tiles": (1, 1024), "rhs_tiles": (1, 1024)}
    spec = matrices(
        *("int8", "int8", 2100, 1024, 3080), **scales, zero_points=True, rhs_first=False
    )
    operands = draw(27, spec)
    first = run(spec, operands, "sm90_gemm")[0]
    for _ in range(3):
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], first)


FAST = {
    "rows and columns": {"lhs": "rows", "rhs": "rows"},
    "one scale": {"lhs": "one", "rhs": "rows", "bias": True, "activation": "gelu_tanh"},
    "no scale": {"lhs": None, "rhs": "one", "residual": True, "out_dtype": "float16"},
    "an 8-bit output": {"lhs": "rows", "rhs": "rows", "out_dtype": "float8_e4m3fn", "bias": True},
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("size", [(67, 401, 131), (300, 512, 392), (17, 136, 1040)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in FP8 for b in FP8 if FP8[0] in (a, b)], ids=str)
def test_fast_sums_in_registers(pair, size, name):
    """Each of the K / 32 additions keeps 13 bits."""
    m, k, n = size
    how = dict(FAST[name])
    tiles = {None: lambda _: None, "one": lambda lines: (lines, k), "rows": lambda _: (1, k)}
    how["lhs_tiles"], how["rhs_tiles"] = tiles[how.pop("lhs")](m), tiles[how.pop("rhs")](n)
    if how.pop("bias", False):
        how["bias"] = (1, n)
    if how.pop("residual", False):
        how |= {"residual": (m, n), "residual_dtype": "bfloat16"}
    for batch, rhs_first in ((0, False), (3, True)):
        if batch and "residual" in how:
            continue
        more = how | ({"bias": (batch, 1, n)} if batch and "bias" in how else {})
        spec = matrices(
            *pair, m, k, n, batch=batch, rhs_first=rhs_first, precision="default", **more
        )
        operands = draw(31, spec)
        out, amax, ran = run(spec, operands, "sm90_gemm")
        assert ran == ["sm90_gemm"]
        oracle.assert_within_bound(spec, operands, out, amax, 2.0**-12 * (k / 32 + 1))
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], out)


def test_fast_sums_keep_nan_and_infinity():
    spec = matrices(*[FP8[0]] * 2, 80, 256, 64, rhs_first=False, precision="default")
    operands = draw(32, spec)
    operands["lhs"], operands["rhs"] = np.full((80, 256), 0x38, np.uint8), operands["rhs"].copy()
    operands["rhs"][:] = 0x38
    operands["lhs"][5, 200], operands["rhs"][9, 3] = 0x7F, 0xFF
    out, _, _ = run(spec, operands, "sm90_gemm")
    expected = np.full((80, 64), 256.0)
    expected[5], expected[:, 9] = np.nan, np.nan
    np.testing.assert_array_equal(out, expected)
