"""Every path against float64: dtypes, layouts, odd sizes, scales, epilogues."""

import dataclasses

import jax
import numpy as np
import pytest
from gpu import products
from gpu.products import ACCUMULATION, HOPPER, check, draw, matrices, run

import oracle
import specs
from jaxfp8._ops import int8_compute
from jaxfp8._value import dtypes

SIZES = [(1, 16, 16), (3, 100, 40), (17, 256, 128), (64, 130, 258), (128, 512, 96), (200, 384, 272)]
FP8 = ("float8_e4m3fn", "float8_e5m2")
INT8 = ("int8", "uint8")


@pytest.mark.parametrize("block", range(24))
def test_random_problems(block):
    rng = np.random.default_rng(70_000 + block)
    for _ in range(20):
        spec = dataclasses.replace(specs.draw_spec(rng), precision="highest")
        check(spec, specs.draw_operands(rng, spec))


@pytest.mark.parametrize("block", range(8))
def test_random_problems_on_the_general_path(block):
    rng = np.random.default_rng(80_000 + block)
    for _ in range(20):
        spec = specs.draw_spec(rng)
        if 0 not in spec.lhs.shape + spec.rhs.shape:
            assert check(spec, specs.draw_operands(rng, spec), "general") == "general"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", FP8 + INT8)
@pytest.mark.parametrize("activations", ["bfloat16", "float16"])
def test_weight_only_products(activations, weights, rhs_first, size):
    m, k, n = size
    spec = matrices(
        activations, weights, m, k, n, rhs_first=rhs_first, rhs_tiles=(1, k), out_dtype=activations
    )
    for kernel in ("sm80_w8a16", "cublaslt_wide"):
        if kernel == "sm80_w8a16" or k % 8 == 0:
            check(spec, draw(1, spec), kernel if m <= 64 or kernel != "sm80_w8a16" else "")


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("tiles", [(128, 128), (1, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("m", [1, 16, 64, 100])
def test_weight_only_products_with_blocks(m, tiles, rhs_first):
    spec = matrices("bfloat16", "float8_e4m3fn", m, 512, 384, rhs_first=rhs_first, rhs_tiles=tiles)
    check(spec, draw(2, spec))


def in_form(spec, operands, form: str, side: str = "rhs"):
    """The problem with the scales of a side in float32 to be rounded, or in 16 bits."""
    name = f"{side}_scale"
    if form != "rounded":
        return spec, operands | {name: operands[name].astype(np.dtype(form))}
    rounding = dataclasses.replace(getattr(spec, side), scale_rounded=True)
    return dataclasses.replace(spec, **{side: rounding}), operands


@pytest.mark.parametrize("form", ["rounded", "bfloat16", "float16"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("size", [(1, 300, 130), (17, 1100, 72), (64, 512, 200), (300, 160, 72)])
def test_scales_of_weights_count_as_they_are_stored(size, rhs_first, form):
    m, k, n = size
    for weights, tiles, kernel in (
        ("float8_e4m3fn", (1, k), ""),
        ("float8_e5m2", (1, 128), "sm80_w8a16"),
        ("uint8", (n, k), ""),
    ):
        spec = matrices(
            "bfloat16", weights, m, k, n, rhs_first=rhs_first, rhs_tiles=tiles, zero_points=True
        )
        operands = draw(2, spec)
        given, stored = in_form(spec, operands, form)
        out, _, _ = run(given, stored, kernel)
        bits = np.dtype("bfloat16" if form == "rounded" else form)
        exact = operands | {"rhs_scale": operands["rhs_scale"].astype(bits).astype(np.float32)}
        oracle.assert_within_bound(spec, exact, out, None, ACCUMULATION["sm80_w8a16"])


@pytest.mark.parametrize("form", ["rounded", "bfloat16"])
def test_a_scale_of_a_weight_on_the_left_counts_as_it_is_stored(form):
    spec = matrices("int8", "bfloat16", 24, 128, 8, lhs_tiles=(1, 128), rhs_tiles=(1, 128))
    given, stored = in_form(spec, draw(3, spec), form, "lhs")
    given, stored = in_form(given, stored, form, "rhs")
    out, _, _ = run(given, stored)
    rounded = {
        name: x.astype(np.dtype("bfloat16")).astype(np.float32) if "scale" in name else x
        for name, x in stored.items()
    }
    oracle.assert_within_bound(spec, rounded, out, None, ACCUMULATION["sm80_w8a16"])


@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("m", [24, 257])
def test_the_weight_on_the_left(m, lhs_first):
    spec = matrices("int8", "bfloat16", m, 128, 8, lhs_first=lhs_first, lhs_tiles=(1, 128))
    assert check(spec, draw(3, spec)) == "sm80_w8a16"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in FP8 for b in FP8], ids=str)
@pytest.mark.parametrize("tiles", ["tensor", "channel", "mixed"])
def test_fp8_products(tiles, pair, size):
    m, k, n = size
    lhs_tiles, rhs_tiles = {
        "tensor": ((m, k), (n, k)),
        "channel": ((1, k), (1, k)),
        "mixed": ((m, k), (1, k)),
    }[tiles]
    for out_dtype in ("bfloat16", "float32"):
        spec = matrices(
            *pair, m, k, n, lhs_tiles=lhs_tiles, rhs_tiles=rhs_tiles, out_dtype=out_dtype
        )
        path = check(spec, draw(4, spec))
        assert path in ("cublaslt_fp8", "sm80_w8a16", "sm90_gemm", "cublaslt_wide", "general")


@pytest.mark.parametrize("layout", ["MK NK", "MK KN", "KM NK"])
@pytest.mark.parametrize("size", [(1, 4096, 520), (3, 517, 72), (16, 1160, 264), (9, 136, 9)])
@pytest.mark.parametrize("weights", FP8)
def test_few_rows_of_fp8_are_decoded(weights, size, layout):
    m, k, n = size
    firsts = {"lhs_first": layout.startswith("KM"), "rhs_first": layout.endswith("KN")}
    for rhs_tiles, more in (
        ((1, k), {"out_dtype": "bfloat16"}),
        ((128, 128) if k > 128 else (n, k), {"bias": (1, n), "activation": "silu"}),
        ((n, k), {"residual": (m, n), "residual_dtype": "bfloat16", "amax": (1, 1)}),
    ):
        tiles = {"lhs_tiles": (1, k), "rhs_tiles": rhs_tiles}
        spec = matrices("float8_e4m3fn", weights, m, k, n, **firsts, **tiles, **more)
        assert check(spec, draw(4, spec)) == "sm80_w8a16"


def test_few_columns_of_fp8_are_decoded():
    tiles = {"lhs_tiles": (1, 256), "rhs_tiles": (1, 256), "out_dtype": "bfloat16"}
    spec = matrices("float8_e5m2", "float8_e4m3fn", 300, 256, 5, batch=3, **tiles)
    assert check(spec, draw(4, spec)) == "sm80_w8a16"


@pytest.mark.parametrize("m", [17, 64])
def test_fp8_products_of_a_deep_sum_and_few_columns(m):
    """The library's tiles leave most of the device idle, so our epilogue scales the sums."""
    k, e4m3 = 4096, "float8_e4m3fn"
    scales = {"lhs_tiles": (1, k), "rhs_tiles": (1, k)}
    spec = matrices(e4m3, e4m3, m, k, 384, rhs_first=False, out_dtype="bfloat16", **scales)
    assert check(spec, draw(5, spec)) == "cublaslt_fp8"


@pytest.mark.parametrize("m", [1, 64, 200, 256])
def test_deepseek_blocks(m):
    spec = matrices(
        *FP8[:1] * 2, m, 512, 384, lhs_tiles=(1, 128), rhs_tiles=(128, 128), out_dtype="bfloat16"
    )
    check(spec, draw(5, spec))


@HOPPER
@pytest.mark.parametrize("size", [(1, 130, 16), (67, 401, 131), (300, 512, 392)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in FP8 for b in FP8], ids=str)
@pytest.mark.parametrize("rhs_tiles", [(128, 128), (1, 128), (5, 256)], ids=str)
def test_blocks_on_hopper(rhs_tiles, pair, size):
    m, k, n = size
    for out_dtype, more in (("bfloat16", {}), ("float32", {"bias": (1, n), "activation": "silu"})):
        tiles = {"lhs_tiles": (1, 128), "rhs_tiles": rhs_tiles}
        spec = matrices(*pair, m, k, n, rhs_first=False, out_dtype=out_dtype, **tiles, **more)
        assert check(spec, draw(20, spec)) == "sm90_gemm"


@HOPPER
@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_blocks_on_hopper_of_any_layout_in_batches(rhs_first, lhs_first):
    e4m3 = FP8[0]
    spec = matrices(
        *(e4m3, e4m3, 130, 264, 72),
        batch=3,
        lhs_first=lhs_first,
        rhs_first=rhs_first,
        lhs_tiles=(1, 128),
        rhs_tiles=(128, 128),
        out_dtype=e4m3,
        out_scale=(3, 1, 1),
        amax=(3, 1, 1),
        residual=(3, 130, 72),
        residual_dtype="bfloat16",
    )
    assert check(spec, draw(21, spec)) == "sm90_gemm"


@HOPPER
def test_blocks_on_hopper_have_the_same_bits_in_every_run():
    spec = matrices(
        *FP8[:1] * 2, 700, 1024, 1544, lhs_tiles=(1, 128), rhs_tiles=(128, 128), rhs_first=False
    )
    operands = draw(22, spec)
    first = run(spec, operands, "sm90_gemm")[0]
    for _ in range(3):
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], first)


def with_zeros(spec, zeros):
    """The same product with zero points on the sides named."""
    made = {s: dataclasses.replace(getattr(spec, s), zero_point=s in zeros) for s in ("lhs", "rhs")}
    return dataclasses.replace(spec, **made)


ZEROS = pytest.mark.parametrize("zeros", ["", "lhs", "rhs", "lhs rhs"])


@HOPPER
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


@HOPPER
@ZEROS
@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_int8_on_hopper_of_any_layout_in_batches(rhs_first, lhs_first, zeros):
    spec = matrices(
        *("int8", "uint8", 130, 264, 72),
        batch=3,
        lhs_first=lhs_first,
        rhs_first=rhs_first,
        lhs_tiles=(1, 264),
        rhs_tiles=(72, 264),
        out_dtype="int8",
        out_scale=(3, 1, 1),
        amax=(3, 1, 1),
        residual=(3, 130, 72),
        residual_dtype="bfloat16",
        bias=(1, 1, 72),
        activation="silu",
    )
    spec = with_zeros(spec, zeros)
    assert check(spec, draw(25, spec), "sm90_gemm") == "sm90_gemm"


@HOPPER
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


@HOPPER
def test_int8_on_hopper_has_the_same_bits_in_every_run():
    scales = {"lhs_tiles": (1, 1024), "rhs_tiles": (1, 1024)}
    spec = matrices(
        *("int8", "int8", 2100, 1024, 3080), **scales, zero_points=True, rhs_first=False
    )
    operands = draw(27, spec)
    first = run(spec, operands, "sm90_gemm")[0]
    for _ in range(3):
        np.testing.assert_array_equal(run(spec, operands, "sm90_gemm")[0], first)


WEIGHTS_ON_HOPPER = FP8 + INT8


@HOPPER
@pytest.mark.parametrize(
    ("size", "rhs_first"),
    [
        *(((1, 16, 1), False), ((67, 400, 131), False), ((300, 1040, 392), False)),
        *(((1, 8, 16), True), ((67, 408, 144), True), ((300, 1040, 400), True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero_points", [False, True], ids=["", "zero points"])
@pytest.mark.parametrize("weights", WEIGHTS_ON_HOPPER)
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


@HOPPER
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("tiles", [(128, 128), (1, 128), (1, 64), (5, 192)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS_ON_HOPPER)
def test_weights_on_hopper_with_scales_and_zero_points_in_blocks(weights, tiles, rhs_first):
    for m, k, n in ((67, 400, 144), (300, 4096, 272)):
        spec = matrices(
            *("bfloat16", weights, m, k, n),
            rhs_first=rhs_first,
            rhs_tiles=tiles,
            zero_points=True,
        )
        assert check(spec, draw(36, spec), "sm90_gemm") == "sm90_gemm"


@HOPPER
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


@HOPPER
@pytest.mark.parametrize("tiles", [(1, 640), (1, 64)], ids=str)
@pytest.mark.parametrize("weights", INT8)
def test_zero_points_on_hopper_may_be_outside_the_range_of_the_weight(weights, tiles):
    spec = matrices("bfloat16", weights, 70, 640, 80, rhs_tiles=tiles, zero_points=True)
    operands = draw(38, spec)
    operands["rhs_zero_point"] = operands["rhs_zero_point"] * np.int32(100_000)
    operands["rhs_zero_point"][..., ::2] = 3
    assert check(spec, operands, "sm90_gemm") == "sm90_gemm"


@HOPPER
@pytest.mark.parametrize(("n", "rhs_first"), [(72, False), (77, False), (80, True)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS_ON_HOPPER)
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


@HOPPER
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


@HOPPER
def test_weights_on_hopper_on_the_left():
    spec = matrices("int8", "bfloat16", 136, 128, 72, rhs_first=False, lhs_tiles=(1, 128))
    assert check(spec, draw(34, spec), "sm90_gemm") == "sm90_gemm"


@HOPPER
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


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in INT8 for b in INT8], ids=str)
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
def test_int8_products(zero_points, pair, size):
    m, k, n = size
    tiles = {"lhs_tiles": (1, k), "rhs_tiles": (1, k), "zero_points": zero_points}
    spec = matrices(*pair, m, k, n, **tiles, out_dtype="bfloat16", bias=(1, n))
    check(spec, draw(6, spec))


def test_int32_sums_are_exact():
    spec = matrices("int8", "int8", 128, 512, 128, out_dtype="int32")
    assert check(spec, draw(7, spec)) == "cublaslt_int8"


EPILOGUES = {
    "bias": {"bias": (1, 272)},
    "row bias": {"bias": (200, 1)},
    "residual": {"residual": (200, 272), "residual_dtype": "bfloat16"},
    "relu": {"bias": (1, 272), "activation": "relu"},
    "gelu": {"activation": "gelu_tanh"},
    "gelu_erf": {"activation": "gelu_erf"},
    "silu": {"residual": (1, 272), "residual_dtype": "float32", "activation": "silu"},
    "fp8": {"out_dtype": "float8_e4m3fn", "out_scale": (1, 1), "amax": (1, 1)},
    "int8 rows": {"out_dtype": "int8", "out_scale": (200, 1), "amax": (200, 1)},
    "amax": {"amax": (1, 272), "activation": "relu"},
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize(
    "pair", [("float8_e4m3fn",) * 2, ("int8",) * 2, ("bfloat16", "int8")], ids=str
)
def test_epilogues(pair, name):
    spec = matrices(
        *pair, 200, 384, 272, rhs_tiles=(1, 384), **{"out_dtype": "bfloat16", **EPILOGUES[name]}
    )
    check(spec, draw(8, spec))


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_of_few_rows(name):
    epilogue = {
        key: tuple(3 if size == 200 else size for size in value) if type(value) is tuple else value
        for key, value in EPILOGUES[name].items()
    }
    spec = matrices(
        "bfloat16",
        "float8_e4m3fn",
        3,
        384,
        272,
        rhs_tiles=(1, 384),
        **{"out_dtype": "bfloat16", **epilogue},
    )
    assert check(spec, draw(8, spec)) == "sm80_w8a16"


@pytest.mark.parametrize(
    "pair", [("float8_e4m3fn",) * 2, ("int8",) * 2, ("bfloat16", "int8")], ids=str
)
def test_batches(pair):
    spec = matrices(*pair, 48, 64, 80, batch=5, lhs_tiles=(1, 64), rhs_tiles=(1, 64))
    if not dtypes.is_eight_bit(pair[0]):
        spec = dataclasses.replace(spec, lhs=dataclasses.replace(spec.lhs, scale=False))
    check(spec, draw(9, spec))


@pytest.mark.parametrize("pair", [("float8_e4m3fn",) * 2, ("bfloat16", "float8_e4m3fn")], ids=str)
def test_large_products(pair):
    spec = matrices(*pair, 1024, 4096, 1536, rhs_tiles=(1, 4096), out_dtype="bfloat16")
    check(spec, draw(10, spec))


FAST = {
    "rows and columns": {"lhs": "rows", "rhs": "rows"},
    "one scale": {"lhs": "one", "rhs": "rows", "bias": True, "activation": "gelu_tanh"},
    "no scale": {"lhs": None, "rhs": "one", "residual": True, "out_dtype": "float16"},
    "an 8-bit output": {"lhs": "rows", "rhs": "rows", "out_dtype": "float8_e4m3fn", "bias": True},
}


@HOPPER
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


@HOPPER
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


def test_fast_accumulation_stays_near_the_exact_sum():
    spec = matrices(*["float8_e4m3fn"] * 2, 256, 8192, 256, precision="default")
    operands = draw(11, spec)
    out, _, ran = products.run(spec, operands)
    assert ran == ["cublaslt_fp8"]
    exact = products.oracle.scaled_dot(spec, operands).y
    assert np.linalg.norm(out - exact) < 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("size", [(1, 130, 17), (16, 4096, 300), (67, 401, 131)], ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", FP8)
@pytest.mark.parametrize("lhs", ["int8", "float8_e4m3fn", "bfloat16", "float16"])
def test_the_path_in_int8_has_the_bits_of_the_operations_that_it_fuses(
    lhs, weights, rhs_first, size
):
    m, k, n = size
    epilogue = {"bias": (1, n), "activation": "relu", "out_dtype": "bfloat16"}
    scales = {"lhs_tiles": (1, k) if lhs == "int8" else None, "rhs_tiles": (1, k)}
    spec = matrices(lhs, weights, m, k, n, rhs_first=rhs_first, **scales, **epilogue)
    operands = draw(23, spec)
    made = int8_compute.requantised(
        spec, {name: jax.numpy.asarray(x) for name, x in operands.items()}
    )
    want = run(int8_compute.narrowed(spec), made)[0]
    got, _, ran = run(spec, operands, "sm80_imma")
    assert ran == ["sm80_imma"]
    np.testing.assert_array_equal(got, want)
