"""Every path against float64: dtypes, layouts, odd sizes, scales, epilogues."""

import dataclasses

import jax
import numpy as np
import pytest
from gpu import products
from gpu.products import ACCUMULATION, FP8, HOPPER, INT8, check, draw, in_form, matrices, run

import jaxfp8
import oracle
import specs
from jaxfp8._call.library import ffi
from jaxfp8._ops import int8_compute
from jaxfp8._value import dtypes

SIZES = [(1, 16, 16), (3, 100, 40), (17, 256, 128), (64, 130, 258), (128, 512, 96), (200, 384, 272)]


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


def test_fast_accumulation_stays_near_the_exact_sum():
    spec = matrices(*["float8_e4m3fn"] * 2, 256, 8192, 256, precision="default")
    operands = draw(11, spec)
    out, _, ran = products.run(spec, operands)
    assert ran == ["cublaslt_fp8"]
    exact = products.oracle.scaled_dot(spec, operands).y
    assert np.linalg.norm(out - exact) < 2e-3 * np.linalg.norm(exact)


def assert_int8_bits(spec, operands, kernel="sm80_imma"):
    """That one call has the bits of two roundings and a product of int8."""
    made = int8_compute.requantized(
        spec, {name: jax.numpy.asarray(x) for name, x in operands.items()}
    )
    want, want_amax, _ = run(int8_compute.narrowed(spec), made)
    got, got_amax, ran = run(spec, operands, kernel)
    assert ran == ["sm80_imma"]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_amax, want_amax)


# M, K, N: aligned and not, of each number of row tiles, with K in a cluster of 1 to 8.
ROWS_OF_INT8 = [
    (1, 130, 17),
    (1, 4096, 300),
    (7, 28672, 48),
    (16, 1024, 4096),
    (17, 401, 131),
    (32, 4100, 72),
    (31, 64, 528),
    (32, 14336, 96),
]


@pytest.mark.parametrize("size", ROWS_OF_INT8, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", FP8)
@pytest.mark.parametrize("lhs", ["int8", "bfloat16", "float16"])
def test_the_path_in_int8_has_the_bits_of_the_operations_that_it_fuses(
    lhs, weights, rhs_first, size
):
    m, k, n = size
    epilogue = {"bias": (1, n), "activation": "relu", "out_dtype": "bfloat16"}
    scales = {"lhs_tiles": (1, k) if lhs == "int8" else None, "rhs_tiles": (1, k)}
    spec = matrices(lhs, weights, m, k, n, rhs_first=rhs_first, **scales, **epilogue)
    assert_int8_bits(spec, draw(23, spec))


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("amax", [(1, 1), (20, 1), (20, 72)], ids=str)
def test_the_path_in_int8_has_the_whole_epilogue(amax, out_dtype):
    out_scale = {"out_scale": (1, 1)} if dtypes.is_eight_bit(out_dtype) else {}
    more = {"residual": (20, 72), "residual_dtype": "bfloat16", "activation": "silu", "amax": amax}
    spec = matrices(
        "bfloat16", "float8_e4m3fn", 20, 300, 72, out_dtype=out_dtype, **out_scale, **more
    )
    assert_int8_bits(spec, draw(24, spec))


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", FP8)
def test_the_path_in_int8_rounds_infinity_and_nan_as_quantize_does(weights, rhs_first):
    spec = matrices("bfloat16", weights, 9, 512, 256, rhs_first=rhs_first, rhs_tiles=(1, 512))
    operands = draw(25, spec)
    codes = np.arange(512 * 256, dtype=np.uint32).reshape(operands["rhs"].shape) % 257
    operands["rhs"] = codes.astype(np.uint8).view(operands["rhs"].dtype)
    operands["lhs"].flat[[3, 700, 1500]] = [np.nan, np.inf, -np.inf]
    assert_int8_bits(spec, operands)


@pytest.mark.parametrize("batch", ["both", "rows alone"])
@pytest.mark.parametrize("lhs", ["int8", "bfloat16"])
def test_the_path_in_int8_takes_a_batch(lhs, batch):
    spec = matrices(lhs, "float8_e4m3fn", 5, 200, 40, batch=3)
    if batch == "rows alone":
        shared = dataclasses.replace(spec.rhs, shape=(1, *spec.rhs.shape[1:]))
        spec = dataclasses.replace(spec, rhs=shared)
    assert_int8_bits(spec, draw(26, spec))


def test_the_path_in_int8_takes_rows_that_are_not_lines_of_the_depth():
    for lhs in ("int8", "float16"):
        spec = matrices(lhs, "float8_e4m3fn", 24, 96, 40, lhs_first=True)
        assert_int8_bits(spec, draw(27, spec))


@pytest.mark.parametrize(("rows", "path"), [(1, "sm80_imma"), (32, "sm80_imma"), (33, "sm90_gemm")])
@HOPPER
def test_few_rows_computed_in_int8_take_the_path_in_int8(rows, path):
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, 4096), "bfloat16")
    w = jaxfp8.quantize(jax.random.normal(key, (4096, 4096), "bfloat16"), channelwise_axes=(1,))
    before = ffi.kernel_calls("cuda")
    got = jax.jit(lambda x, w: jaxfp8.matmul(x, w, compute="int8"))(x, w)
    after = ffi.kernel_calls("cuda")
    assert [name for name in after if after[name] > before[name]] == [path]
    assert np.isfinite(np.asarray(got, np.float32)).all()
