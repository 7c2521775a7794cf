"""16-bit activations times 8-bit weights by path `sm90_gemm`, against float64."""

import numpy as np
import pytest
from gpu.products import ACCUMULATION, FP8, HOPPER, INT8, check, draw, in_form, matrices, run

import oracle

pytestmark = HOPPER

WEIGHTS = FP8 + INT8


@pytest.mark.parametrize(
    ("size", "rhs_first"),
    [
        *(((1, 16, 1), False), ((67, 400, 131), False), ((300, 1040, 392), False)),
        *(((1, 8, 16), True), ((67, 408, 144), True), ((300, 1040, 400), True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero_points", [False, True], ids=["", "zero points"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("activations", ["bfloat16", "float16"])
def test_weights_on_hopper(activations, weights, zero_points, size, rhs_first):
    m, k, n = size
    for tiles, out_dtype in (((1, k), activations), ((n, k), "float32"), (None, "bfloat16")):
        spec = matrices(
            *(activations, weights, m, k, n),
            rhs_first=rhs_first,
            rhs_tiles=tiles,
            zero_points=zero_points,
            out_dtype=out_dtype,
        )
        assert check(spec, draw(31, spec), "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("tiles", [(128, 128), (1, 128), (1, 64), (5, 192)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_on_hopper_with_scales_and_zero_points_in_blocks(weights, tiles, rhs_first):
    for m, k, n in ((67, 400, 144), (300, 4096, 272)):
        spec = matrices(
            *("bfloat16", weights, m, k, n),
            rhs_first=rhs_first,
            rhs_tiles=tiles,
            zero_points=True,
        )
        assert check(spec, draw(36, spec), "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_scales_in_blocks_on_hopper_may_be_anything(rhs_first):
    """From 2^-100 to 2^100 in a column, negative, 0, subnormal, or infinity and NaN."""
    spec = matrices("bfloat16", "int8", 100, 640, 80, rhs_first=rhs_first, rhs_tiles=(1, 128))
    operands = draw(37, spec)
    scale = np.exp2(np.random.default_rng(0).uniform(-100, 100, (80, 5))).astype(np.float32)
    scale[::3] *= -1
    scale[4, 1], scale[5, :], scale[6, 4], scale[7, 0] = 0, 0, 0, 1e-40
    scale[8, :] = 1e-36
    operands["rhs_scale"] = np.ascontiguousarray(scale.T) if rhs_first else scale
    assert check(spec, operands, "sm90_gemm") == "sm90_gemm"
    operands["rhs_scale"] = operands["rhs_scale"].copy()
    place = (2, 9) if rhs_first else (9, 2)
    for special in (np.nan, np.inf):
        operands["rhs_scale"][place] = special
        out, _, _ = run(spec, operands, "sm90_gemm")
        assert not np.isfinite(out[:, 9]).any()
        assert np.isfinite(np.delete(out, 9, 1)).all()


@pytest.mark.parametrize("tiles", [(1, 640), (1, 64)], ids=str)
@pytest.mark.parametrize("weights", INT8)
def test_zero_points_on_hopper_may_be_outside_the_range_of_the_weight(weights, tiles):
    spec = matrices("bfloat16", weights, 70, 640, 80, rhs_tiles=tiles, zero_points=True)
    operands = draw(38, spec)
    operands["rhs_zero_point"] = operands["rhs_zero_point"] * np.int32(100_000)
    operands["rhs_zero_point"][..., ::2] = 3
    assert check(spec, operands, "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize(("n", "rhs_first"), [(72, False), (77, False), (80, True)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_on_hopper_with_a_whole_epilogue(weights, n, rhs_first):
    spec = matrices(
        *("bfloat16", weights, 130, 272, n),
        batch=3,
        rhs_first=rhs_first,
        lhs_tiles=(1, 272),
        rhs_tiles=(1, 272),
        out_dtype=FP8[0],
        out_scale=(3, 1, 1),
        amax=(3, 130, 1),
        residual=(3, 130, n),
        residual_dtype="bfloat16",
        bias=(1, 1, n),
        activation="silu",
    )
    assert check(spec, draw(32, spec), "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize("form", ["rounded", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("k", "how"),
    [(128, {"rhs_first": False, "rhs_tiles": (1, 128)}), (256, {"rhs_tiles": (1, 64)})],
    ids=["of columns", "in blocks"],
)
def test_weights_on_hopper_have_scales_of_any_form(k, how, form):
    spec = matrices("bfloat16", FP8[0], 100, k, 80, **how)
    operands = draw(33, spec)
    given, kept = in_form(spec, operands, form)
    out, _, ran = run(given, kept, "sm90_gemm")
    assert ran == ["sm90_gemm"]
    bits = np.dtype("bfloat16" if form == "rounded" else form)
    exact = operands | {"rhs_scale": operands["rhs_scale"].astype(bits).astype(np.float32)}
    oracle.assert_within_bound(spec, exact, out, None, ACCUMULATION["sm80_w8a16"])


def test_weights_on_hopper_on_the_left():
    spec = matrices("int8", "bfloat16", 136, 128, 72, rhs_first=False, lhs_tiles=(1, 128))
    assert check(spec, draw(34, spec), "sm90_gemm") == "sm90_gemm"


@pytest.mark.parametrize(
    ("size", "depth"),
    [((300, 4096, 2100), None), ((2100, 1024, 3080), None), ((300, 4096, 2112), 128)],
    ids=str,
)
def test_weights_on_hopper_have_the_same_bits_in_every_run(size, depth):
    m, k, n = size
    spec = matrices("bfloat16", FP8[0], m, k, n, rhs_first=bool(depth), rhs_tiles=(1, depth or k))
    operands = draw(35, spec)
    first = run(spec, operands, "sm90_gemm")[0]
    oracle.assert_within_bound(spec, operands, first, None, ACCUMULATION["sm80_w8a16"])
    for _ in range(3):
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], first)
