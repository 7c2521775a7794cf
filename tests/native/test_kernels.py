"""Every kernel, forced by name, against float64.

Those whose instructions this machine lacks are skipped, and run with a library that computes them
in software: `make test-avx512`, or `--library` of tests/conftest.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from native import calls

import oracle
import specs
from jaxfp8._call import ffi
from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import ACTIVATIONS, EpilogueSpec, ScaledDotSpec

KERNELS = ffi.kernels("cpu")
FLOAT_KERNELS = [name for name in KERNELS if not name.endswith(("_int8", "_vnni"))]
INTEGER_KERNELS = [name for name in KERNELS if name not in FLOAT_KERNELS]
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CODES = np.arange(256, dtype=np.uint8)
SEEDS = range(40)


@pytest.fixture(autouse=True)
def kernel_runs_here(request):
    """Skips a test whose kernel this machine cannot run, and says why."""
    kernel = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kernel")
    if kernel and kernel not in ffi.available_kernels():
        pytest.skip(f"{kernel} needs what this CPU lacks; it has {ffi.cpu_features()}")


def values_of(dtype: str) -> np.ndarray:
    return oracle.decode(CODES, dtype).astype(np.float32)


def finite_codes(dtype: str) -> np.ndarray:
    return np.where(np.isfinite(values_of(dtype)), CODES, 0).astype(np.uint8)


def wide_types(kernel: str) -> tuple[str, ...]:
    return ("bfloat16",) if kernel.endswith("_bf16") else ("float32", "bfloat16", "float16")


def test_every_isa_has_kernels_for_floats_and_for_integers():
    assert "scalar_f32" in KERNELS
    assert "scalar_int8" in KERNELS


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_all_256_codes_are_exact_as_weights(kernel, dtype):
    for wide in wide_types(kernel):
        spec = calls.matrices(wide, dtype, 1, 1, 256)
        one = np.ones((1, 1), jnp.dtype(wide))
        (out,) = calls.call(spec, one, CODES[None, :], kernel=kernel)
        np.testing.assert_array_equal(out[0], values_of(dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_all_256_codes_are_exact_as_activations(kernel, dtype):
    for wide in ("int8", *wide_types(kernel)):
        spec = calls.matrices(dtype, wide, 256, 1, 1)
        one = np.ones((1, 1), jnp.dtype(wide))
        (out,) = calls.call(spec, CODES[:, None], one, kernel=kernel)
        np.testing.assert_array_equal(out[:, 0], values_of(dtype))


@pytest.mark.parametrize("shape", ["kn", "nk"])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_codes_are_exact_along_the_depth_of_either_side(kernel, dtype, shape):
    """A product with the identity, so that vectors of codes run along the contracted axis."""
    eye = np.eye(256, dtype=np.int8)
    rows = np.stack([finite_codes(dtype), np.roll(finite_codes(dtype), 3)])
    codes = rows if shape == "nk" else rows.T
    axis = 1 if shape == "nk" else 0
    coded = calls.side(dtype, codes.shape, (axis,))
    identity = calls.side("int8", eye.shape, (0,))
    out = EpilogueSpec(out_dtype="float32")
    expected = oracle.decode(rows, dtype)
    (left,) = calls.call(
        ScaledDotSpec(lhs=coded, rhs=identity, epilogue=out), codes, eye, kernel=kernel
    )
    (right,) = calls.call(
        ScaledDotSpec(lhs=identity, rhs=coded, epilogue=out), eye, codes, kernel=kernel
    )
    np.testing.assert_array_equal(left, expected)
    np.testing.assert_array_equal(right, expected.T)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_codes_are_exact_for_any_number_of_rows(kernel, dtype, layout):
    """Rows that pick one depth each, of columns that are deep enough to be multiplied by tiles."""
    depth = 21 * np.arange(48)
    picks = (depth[:, None] == np.arange(1024)).astype(np.int8)
    codes = np.tile([np.roll(finite_codes(dtype), n) for n in range(256)], 4)
    rhs = codes if layout == "nk" else codes.T
    expected = oracle.decode(codes, dtype).T[depth]
    for rows in (8, 12, 17, 48):
        spec = ScaledDotSpec(
            lhs=calls.side("int8", (rows, 1024), (1,)),
            rhs=calls.side(dtype, rhs.shape, (rhs.shape.index(1024),)),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )
        (out,) = calls.call(spec, picks[:rows], rhs, kernel=kernel)
        np.testing.assert_array_equal(out, expected[:rows])


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("rhs", ["int8", "uint8"])
@pytest.mark.parametrize("lhs", ["int8", "uint8"])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_sums_of_extreme_integers_are_exact(kernel, lhs, rhs, layout):
    k = 33_000
    shape = (k, 3) if layout == "kn" else (3, k)
    spec = ScaledDotSpec(
        lhs=calls.side(lhs, (2, k), (1,)),
        rhs=calls.side(rhs, shape, (shape.index(k),)),
        epilogue=EpilogueSpec(out_dtype="int32"),
    )
    for left in (np.iinfo(lhs).min, np.iinfo(lhs).max):
        for right in (np.iinfo(rhs).min, np.iinfo(rhs).max):
            operands = np.full((2, k), left, lhs), np.full(shape, right, rhs)
            (out,) = calls.call(spec, *operands, kernel=kernel)
            np.testing.assert_array_equal(out, k * int(left) * int(right))


@pytest.mark.parametrize("rhs", ["int8", "uint8"])
@pytest.mark.parametrize("lhs", ["int8", "uint8"])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_sums_of_blocks_of_integers(kernel, lhs, rhs):
    """Those of a block are exact, at the ends of the range too; float32 may add them up."""
    rng = np.random.default_rng(2)
    m, n = 40, 70
    for k, tile in [(1024, 256), (1000, 128), (96, 32), (513, 64), (1536, 512)]:
        spec = ScaledDotSpec(
            lhs=calls.side(lhs, (m, k), (1,), tiles=(m, tile), scale=True),
            rhs=calls.side(rhs, (k, n), (0,), tiles=(tile, 64), scale=True),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )
        operands = specs.draw_operands(rng, spec)
        for name, dtype in (("lhs", lhs), ("rhs", rhs)):
            values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1], dtype)
            operands[name] = rng.choice(values, operands[name].shape)
            operands[f"{name}_scale"][...] = np.float32(0.125 if name == "lhs" else 1)
        operands["lhs"][:3], operands["rhs"][:, :3] = np.iinfo(lhs).max, np.iinfo(rhs).max
        (out,) = calls.call_named(spec, operands, kernel)
        oracle.assert_within_bound(spec, operands, out)
        left, right = (operands[name].astype(np.float64) for name in ("lhs", "rhs"))
        blocks = [left[:, i : i + tile] @ right[i : i + tile] for i in range(0, k, tile)]
        allowed = len(blocks) * 2.0**-24 * np.abs(blocks).sum(0)
        assert (np.abs(8 * out - np.sum(blocks, 0)) <= allowed).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_larger_than_caches_is_read_whole(kernel):
    """Of rows of ones, and of sums that float32 holds."""
    k, n = 1501, 17_001
    w = np.random.default_rng(8).integers(-128, 128, (k, n), dtype=np.int8)
    lhs = "int8" if kernel in INTEGER_KERNELS else "bfloat16"
    (out,) = calls.call(
        calls.matrices(lhs, "int8", 2, k, n), jnp.ones((2, k), lhs), w, kernel=kernel
    )
    np.testing.assert_array_equal(out, np.broadcast_to(w.sum(0, dtype=np.int64), out.shape))


@pytest.mark.parametrize("rhs", ["int8", "uint8"])
@pytest.mark.parametrize("lhs", ["int8", "uint8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_integer_times_every_other_is_exact(kernel, lhs, rhs):
    """All 256 x 256 products, by a depth of 1."""
    x, w = CODES.view(lhs)[:, None], CODES.view(rhs)[None, :]
    (out,) = calls.call(calls.matrices(lhs, rhs, 256, 1, 256), x, w, kernel=kernel)
    np.testing.assert_array_equal(out, x.astype(np.float32) * w.astype(np.float32))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 118, 300])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_integer_products_of_odd_sizes_are_exact(kernel, size):
    rng = np.random.default_rng(size)
    for m, k, n in [(size, 5, 7), (3, size, 70), (9, 33, size)]:
        x, w = specs.draw_values(rng, "int8", (m, k)), specs.draw_values(rng, "uint8", (k, n))
        spec = calls.matrices("int8", "uint8", m, k, n, out="int32")
        (out,) = calls.call(spec, x, w, kernel=kernel)
        np.testing.assert_array_equal(out, x.astype(np.int64) @ w.astype(np.int64))


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_problems_stay_within_the_bound(kernel):
    """Any dtypes, axes, tiles, zero points, epilogue and sizes; see tests/specs.py."""
    checked = 0
    for seed in SEEDS:
        rng = np.random.default_rng([seed, 77])
        spec = specs.draw_spec(rng)
        operands = specs.draw_operands(rng, spec)
        if calls.takes(kernel, spec):
            out, *amax = calls.call_named(spec, operands, kernel)
            oracle.assert_within_bound(spec, operands, out, *amax)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("tile", [1, 5, 16, 32, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_along_the_depth_stay_within_the_bound(kernel, tile):
    """Tiles along K on both sides, with a partial last one; below and above one block of depth."""
    rng = np.random.default_rng(tile)
    dtype = "int8" if kernel in INTEGER_KERNELS else "float8_e4m3fn"
    for m, k in (5, 1), (5, 3), (5, 118), (5, 700), (130, 700):
        spec = ScaledDotSpec(
            lhs=calls.side(dtype, (m, k), (1,), tiles=(1, tile), scale=True),
            rhs=calls.side(dtype, (67, k), (1,), tiles=(32, 2 * tile), scale=True),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )
        operands = specs.draw_operands(rng, spec)
        (out,) = calls.call_named(spec, operands, kernel)
        oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("tile", [16, 20, 32])
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_scales_of_short_blocks_may_be_beyond_the_values(kernel, tile):
    """Of many rows: value by value they would overflow, and their sums do not."""
    m, k, n = 130, 256, 66
    spec = ScaledDotSpec(
        lhs=calls.side("float8_e4m3fn", (m, k), (1,), tiles=(1, tile), scale=True),
        rhs=calls.side("float8_e4m3fn", (k, n), (0,), tiles=(tile, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(np.random.default_rng(tile), spec)
    operands["lhs_scale"] = np.full_like(operands["lhs_scale"], 2.0**-120)
    operands["rhs_scale"] = np.full_like(operands["rhs_scale"], 2.0**121)
    (out,) = calls.call_named(spec, operands, kernel)
    assert np.isfinite(out).all()
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("left, right", [(1, 1), (1e30, 1e-30), (1e-22, 1e-22)])
@pytest.mark.parametrize("rows", [1, 3, 6, 33])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_depth_stay_within_the_bound(kernel, layout, rows, left, right):
    """Moderate scales per block, and ones whose product is barely a float32."""
    rng = np.random.default_rng(6)
    dtype = "int8" if kernel in INTEGER_KERNELS else "float8_e4m3fn"
    shape = (1100, 201) if layout == "kn" else (201, 1100)
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (rows, 1100), (1,), tiles=(1, 100), scale=True),
        rhs=calls.side(dtype, shape, (shape.index(1100),), tiles=(100, 100), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(rng, spec)
    operands["lhs_scale"] = operands["lhs_scale"] * np.float32(left)
    operands["rhs_scale"] = operands["rhs_scale"] * np.float32(right)
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in INTEGER_KERNELS])
def test_sums_of_blocks_that_cancel_may_be_beyond_float32(kernel, layout, count):
    def laid_out(across, along):
        return (along, across) if layout == "kn" else (across, along)

    spec = ScaledDotSpec(
        lhs=calls.side("bfloat16", (count, 512), (1,)),
        rhs=calls.side(
            "float8_e4m3fn",
            laid_out(70, 512),
            (laid_out(1, 0).index(0),),
            tiles=laid_out(70, 128),
            scale=True,
        ),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    rows = np.zeros((count, 512), np.float32)
    rows[:, [0, 128, 256]] = 1e30, -1e30, 1
    operands = {
        "lhs": rows.astype(jnp.bfloat16),
        "rhs": np.full(laid_out(70, 512), 0x38, np.uint8),  # 1
        "rhs_scale": np.full(laid_out(1, 4), 2.0**30, np.float32),
    }
    (out,) = calls.call_named(spec, operands, kernel)
    np.testing.assert_array_equal(out, np.full((count, 70), 2.0**30, np.float32))


@pytest.mark.parametrize("tile", [1, 20, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_and_bias_may_have_16_bits(kernel, dtype, tile):
    """The same bits as with the same numbers in float32."""
    spec = ScaledDotSpec(
        lhs=calls.side("int8", (3, 200), (1,), tiles=(1, 200), scale=True),
        rhs=calls.side("int8", (200, 131), (0,), tiles=(tile, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32", bias=(1, 131), activation="relu"),
    )
    names = ("lhs_scale", "rhs_scale", "bias")
    operands = specs.draw_operands(np.random.default_rng(tile), spec)
    narrow = {name: operands[name].astype(jnp.dtype(dtype)) for name in names}
    wide = {name: value.astype(np.float32) for name, value in narrow.items()}
    (expected,) = calls.call_named(spec, operands | wide, kernel)
    oracle.assert_within_bound(spec, operands | wide, expected)
    for name in names:
        (out,) = calls.call_named(spec, operands | wide | {name: narrow[name]}, kernel)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("tile", [1, 20, 200])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_may_be_rounded_by_the_call(kernel, tile, m):
    """To nearest even, of any magnitude: the same bits as with scales that were rounded before."""
    left, right = ("int8", "int8") if kernel in INTEGER_KERNELS else ("bfloat16", "float8_e4m3fn")
    spec = ScaledDotSpec(
        lhs=calls.side(left, (m, 200), (1,), tiles=(1, 200), scale=True),
        rhs=calls.side(right, (200, 70), (0,), tiles=(tile, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(np.random.default_rng(tile), spec)
    some = [1 + 2**-8, 1 + 3 * 2**-8, -1.0039, 1e-39, 3.4e38, 0.0, np.inf, np.nan, 3.14159, 1e-20]
    for name in ("lhs_scale", "rhs_scale"):
        scale = operands[name].copy()
        scale.flat[: len(some)] = some[: scale.size]
        rounded = scale.astype(jnp.bfloat16).astype(np.float32)
        (expected,) = calls.call_named(spec, operands | {name: rounded}, kernel)
        given = operands | {name: scale}
        (out,) = calls.call(
            spec,
            *(given[operand] for operand in spec.operand_names()),
            kernel=kernel,
            **{f"{name}_rounded": True},
        )
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("tile", [1, 20])
@pytest.mark.parametrize(
    ("dtype", "some"),
    [("bfloat16", [2.0**60, -(2.0**-60), 0.0, 1e-39, 3.0]), ("float16", [65504, 2.0**-24, 0, -1])],
)
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_scales_of_16_bits_from_end_to_end(kernel, dtype, some, tile, m):
    spec = ScaledDotSpec(
        lhs=calls.side("bfloat16", (m, 200), (1,)),
        rhs=calls.side("float8_e4m3fn", (200, 70), (0,), tiles=(tile, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    rng = np.random.default_rng(tile)
    operands = specs.draw_operands(rng, spec)
    scale = rng.choice(np.asarray(some, np.float32), spec.rhs.scale_shape).astype(jnp.dtype(dtype))
    wide = operands | {"rhs_scale": scale.astype(np.float32)}
    (expected,) = calls.call_named(spec, wide, kernel)
    (out,) = calls.call_named(spec, operands | {"rhs_scale": scale}, kernel)
    assert np.isfinite(expected).all()
    assert expected.any()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("m", [1, 33])
@pytest.mark.parametrize("tile", [1, 100, 200])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_points_may_be_bytes(kernel, dtype, tile, m):
    """Of single values, of blocks and of columns: the same bits as with int32."""
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (m, 200), (1,), tiles=(1, 200), scale=True, zero_point=True),
        rhs=calls.side(dtype, (200, 70), (0,), tiles=(tile, 1), scale=True, zero_point=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    if not calls.takes(kernel, spec):
        pytest.skip(f"{kernel} takes no zero points")
    operands = specs.draw_operands(np.random.default_rng(tile), spec)
    (expected,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, expected)
    for name in ("lhs_zero_point", "rhs_zero_point"):
        narrow = operands[name].astype(dtype)
        assert (narrow == operands[name]).all()
        assert narrow.any()
        operands[name] = narrow
        (out,) = calls.call_named(spec, operands, kernel)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("zero", [-65533, -4000, -128, -3, 0, 7, 127, 128, 255, 300, 65539])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_zero_points_of_few_rows_are_exact(kernel, dtype, zero):
    """Of values near them, whose differences fit a byte, and some far away."""
    k, n = 4103, 70
    rng = np.random.default_rng(abs(zero))
    middle = np.clip(zero, np.iinfo(dtype).min + 40, np.iinfo(dtype).max - 40)
    lhs = (middle + rng.integers(-40, 40, (4, k))).astype(dtype)
    some = rng.integers(0, k, 20)
    lhs[:, some] = rng.choice([np.iinfo(dtype).min, np.iinfo(dtype).max], (4, 20))
    rhs = rng.integers(-128, 128, (k, n), dtype=np.int8)
    zeros = np.array([[zero], [zero], [0], [zero]], np.int32)
    exact = (lhs.astype(np.int64) - zeros) @ (rhs.astype(np.int64) + 5)
    for m in (1, 2, 3, 4):
        spec = ScaledDotSpec(
            lhs=calls.side(dtype, (m, k), (1,), tiles=(1, k), zero_point=True),
            rhs=calls.side("int8", (k, n), (0,), zero_point=True),
            epilogue=EpilogueSpec(out_dtype="int32"),
        )
        operands = {
            "lhs": lhs[:m],
            "lhs_zero_point": zeros[:m],
            "rhs": rhs,
            "rhs_zero_point": np.full((1, 1), -5, np.int32),
        }
        (out,) = calls.call_named(spec, operands, kernel)
        np.testing.assert_array_equal(out, exact[:m])


@pytest.mark.parametrize("m", [1, 3, 7, 40])
@pytest.mark.parametrize("layout", ["kn", "nk", "prepared"])
@pytest.mark.parametrize("beyond", [255, 256])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_zero_points_of_rows_that_are_near_or_just_beyond(kernel, beyond, layout, m):
    """In all layouts; extreme codes, so that sums are as large as they get."""
    k, n = 4104, 64
    rng = np.random.default_rng(beyond)
    lhs = rng.choice(np.array([0, 255], np.uint8), (m, k))
    rhs = rng.choice(np.array([-128, 127], np.int8), (k, n))
    zeros = rng.choice(np.array([-beyond, beyond, 0], np.int32), (m, 1))
    zeros[0] = -beyond
    exact = (lhs.astype(np.int64) - zeros) @ (rhs.astype(np.int64) + 5)
    weight, sides = {
        "kn": (rhs, calls.side("int8", (k, n), (0,), zero_point=True)),
        "nk": (rhs.T.copy(), calls.side("int8", (n, k), (1,), zero_point=True)),
        "prepared": (
            rhs.reshape(k // 4, 4, 1, n).transpose(2, 0, 3, 1).copy(),
            calls.side("int8", (1, k // 4, n, 4), (1, 3), zero_point=True),
        ),
    }[layout]
    split = layout == "prepared"
    shape, contracting = ((m, k // 4, 4), (1, 2)) if split else ((m, k), (1,))
    tiles = (1, *shape[1:])
    spec = ScaledDotSpec(
        lhs=calls.side("uint8", shape, contracting, tiles=tiles, zero_point=True),
        rhs=sides,
        epilogue=EpilogueSpec(out_dtype="int32"),
    )
    operands = {
        "lhs": lhs.reshape(shape),
        "lhs_zero_point": zeros.reshape(spec.lhs.scale_shape),
        "rhs": weight,
        "rhs_zero_point": np.full(spec.rhs.scale_shape, -5, np.int32),
    }
    (out,) = calls.call_named(spec, operands, kernel)
    np.testing.assert_array_equal(out.reshape(m, n), exact)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("kernel", INTEGER_KERNELS)
def test_few_rows_against_very_many_columns(kernel, m):
    """More columns than few rows take in one go, whose sums are needed for the zero points."""
    k, n = 803, 17_063
    rng = np.random.default_rng(m)
    side = {"scale": False, "zero_point": True}
    spec = ScaledDotSpec(
        lhs=calls.side("int8", (m, k), (1,), **side),
        rhs=calls.side("int8", (k, n), (0,), tiles=(k, 1), **side),
        epilogue=EpilogueSpec(out_dtype="int32"),
    )
    operands = specs.draw_operands(rng, spec)
    if m == 1:  # what is left of a byte fits one
        operands["lhs"] = np.clip(operands["lhs"], -60, 60)
        operands["lhs_zero_point"] = np.full((1, 1), 3, np.int32)
    (out,) = calls.call_named(spec, operands, kernel)
    lhs, rhs = (
        operands[name].astype(np.int32) - np.asarray(operands[f"{name}_zero_point"], np.int32)
        for name in ("lhs", "rhs")
    )
    np.testing.assert_array_equal(out, lhs @ rhs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_products_cross_every_block_border(kernel):
    """More rows, columns and depth than one panel, one tile, one share of work hold."""
    rng = np.random.default_rng(5)
    dtype = "int8" if kernel in INTEGER_KERNELS else "bfloat16"
    m, k, n = (30, 600, 700) if kernel.startswith("scalar") else (259, 1700, 650)
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (m, k), (1,), tiles=(1, k), scale=dtype == "int8"),
        rhs=calls.side("int8", (k, n), (0,), tiles=(k, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(rng, spec)
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("m", [16, 64, 70])
@pytest.mark.parametrize("n", [63, 64, 65, 300])
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_columns(kernel, m, n):
    """On both sides of where rows and columns change places, in strips that are not full."""
    rng = np.random.default_rng(n)
    left, right = ("int8", "uint8") if kernel in INTEGER_KERNELS else ("bfloat16", "float8_e5m2")
    spec = ScaledDotSpec(
        lhs=calls.side(left, (m, 1100), (1,)),
        rhs=calls.side(right, (1100, n), (0,), tiles=(1100, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(rng, spec)
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 48, 49, 64, 100, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_few_rows_against_columns_of_either_layout(kernel, m, layout):
    """Depths and columns that fill no vector, and more than one block of either; zero points."""
    rng = np.random.default_rng(m)
    integers = kernel in INTEGER_KERNELS
    for weight in ("int8", "uint8") if integers else ("float8_e4m3fn", "float8_e5m2", "uint8"):
        for k, n, tile in [(5, 64, 3000), (5003, 67, 3000), (70, 2120, 3000), (20_011, 5, 30_000)]:
            shape, tiles = ((k, n), (tile, 1)) if layout == "kn" else ((n, k), (1, tile))
            spec = ScaledDotSpec(
                lhs=calls.side(
                    "int8" if integers else "bfloat16", (m, k), (1,), zero_point=integers
                ),
                rhs=calls.side(
                    weight,
                    shape,
                    (shape.index(k),),
                    tiles=tiles,
                    scale=True,
                    zero_point=integers,
                ),
                epilogue=EpilogueSpec(out_dtype="float32"),
            )
            operands = specs.draw_operands(rng, spec)
            (out,) = calls.call_named(spec, operands, kernel)
            oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(
    ("k", "tile"),
    [
        (5003, 5003),
        (20_011, 20_011),
        (4480, 128),
        (13_056, 192),
        (13_003, 200),
        (9024, 48),
        (6144, 256),
        (24_576, 512),
        (30_720, 512),
    ],
)
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_of_a_row_do_not_depend_on_how_many_few_there_are(kernel, layout, k, tile, zero_point):
    """So that a part of a product has the bits of the whole, in however many chunks of depth.

    With short blocks along the depth of columns, more rows are packed first, and added otherwise,
    but where float32 may hold the sums of blocks: if no scale is large. (`amx_int8` packs columns
    side by side for any number of rows.)
    """
    integers = kernel in INTEGER_KERNELS
    narrow = tile in (192, 200, 256, 512) and not integers
    all_few = layout == "kn" or tile == k or (tile == 192 and kernel == "avx512_bf16")
    n, most = 70, 8 if all_few else min(max(tile // 32, 2), 8)
    if (kernel, layout, tile) == ("avx512_vnni", "nk", k):
        most = 48
    if layout == "kn" and not kernel.startswith("amx"):
        most = 4
    if layout == "nk" and kernel.startswith("amx"):
        held = tile in (192, 256) if integers else tile in (192, 256, 512)
        most = 128 if tile == k or (held and not (integers and zero_point)) else 32
    shape, tiles = ((k, n), (tile, 1)) if layout == "kn" else ((n, k), (1, tile))
    left, right = ("int8", "int8") if integers else ("bfloat16", "float8_e4m3fn")
    right = "uint8" if zero_point else right

    def spec(rows):
        return ScaledDotSpec(
            lhs=calls.side(
                left,
                (rows, k),
                (1,),
                tiles=(1, k),
                scale=True,
                zero_point=zero_point and integers,
            ),
            rhs=calls.side(
                right,
                shape,
                (shape.index(k),),
                tiles=tiles,
                scale=True,
                zero_point=zero_point,
            ),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )

    if not calls.takes(kernel, spec(most)):
        pytest.skip(f"{kernel} takes no zero points")
    operands = specs.draw_operands(np.random.default_rng(3), spec(most))
    of_rows = [name for name in operands if name.startswith("lhs")]
    for name in ("lhs_scale", "rhs_scale") if narrow else ():
        operands[name] = operands[name] / operands[name].max()
    (whole,) = calls.call_named(spec(most), operands, kernel)
    oracle.assert_within_bound(spec(most), operands, whole)
    for count in {1, 2, 3, 4, 7, 23, 41, 100} & set(range(most)):
        some = operands | {name: operands[name][most - count :] for name in of_rows}
        (part,) = calls.call_named(spec(count), some, kernel)
        np.testing.assert_array_equal(part, whole[most - count :])


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(
    ("k", "n", "tile"),
    [(5003, 70, 5003), (4480, 128, 128), (1300, 131, 50), (8, 20, 8), (301, 5000, 301)],
)
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("left", ["int8", "uint8", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_which_the_first_pack_the_columns(kernel, left, layout, k, n, tile, zero_point):
    """More than few: those times columns side by side have the bits of a part of them."""
    integers, most = kernel in INTEGER_KERNELS, 61
    if integers == (left == "bfloat16"):
        pytest.skip(f"{kernel} takes other values")
    right = "uint8" if zero_point else ("int8" if integers else "float8_e4m3fn")
    shape, tiles = ((k, n), (tile, 1)) if layout == "kn" else ((n, k), (1, tile))

    def spec(rows):
        return ScaledDotSpec(
            lhs=calls.side(left, (rows, k), (1,), zero_point=zero_point and integers),
            rhs=calls.side(
                right,
                shape,
                (shape.index(k),),
                tiles=tiles,
                scale=True,
                zero_point=zero_point,
            ),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )

    if not calls.takes(kernel, spec(most)):
        pytest.skip(f"{kernel} takes no zero points")
    operands = specs.draw_operands(np.random.default_rng(n), spec(most))
    (whole,) = calls.call_named(spec(most), operands, kernel)
    oracle.assert_within_bound(spec(most), operands, whole)
    for count in (5, 6, 7, 8, 9, 10, 11, 12, 16, 19):
        some = operands | {"lhs": operands["lhs"][-count:]}
        (part,) = calls.call_named(spec(count), some, kernel)
        oracle.assert_within_bound(spec(count), some, part)
        if layout == "kn" and (count > 8 or kernel != "amx_bf16"):
            np.testing.assert_array_equal(part, whole[-count:])


@pytest.mark.skipif("amx" not in ffi.cpu_features().split(), reason="needs AMX")
@pytest.mark.parametrize(
    ("dtypes", "layout", "rows", "k", "kernel"),
    [
        (("bfloat16", "float8_e4m3fn"), "kn", 2, 512, "avx512_vbmi"),
        (("bfloat16", "float8_e4m3fn"), "kn", 3, 512, "amx_bf16"),
        (("bfloat16", "int8"), "nk", 1, 512, "avx512_vbmi"),
        (("bfloat16", "int8"), "nk", 2, 512, "amx_bf16"),
        (("bfloat16", "int8"), "nk", 2, 40, "avx512_vbmi"),
        (("int8", "int8"), "nk", 4, 512, "avx512_vnni"),
        (("int8", "int8"), "nk", 5, 512, "amx_int8"),
    ],
)
def test_tiles_leave_few_rows_to_others(dtypes, layout, rows, k, kernel):
    shape = (k, 70) if layout == "kn" else (70, k)
    spec = ScaledDotSpec(
        lhs=calls.side(dtypes[0], (rows, k), (1,)),
        rhs=calls.side(dtypes[1], shape, (shape.index(k),)),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    paths = ffi.cpu_paths(spec)
    assert [name for name, why in paths.items() if not why] == [kernel]


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(("k", "tile"), [(5003, 5003), (9024, 4512), (3900, 1300)])
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_rows_times_deep_columns_along_the_depth(kernel, k, tile, zero_point):
    """As many as tiles of columns along it take, each with the bits of a part of them."""
    n, most = 67, 48
    left, right = ("float32", "uint8") if zero_point else ("bfloat16", "float8_e5m2")

    def spec(rows):
        return ScaledDotSpec(
            lhs=calls.side(left, (rows, k), (1,), tiles=(1, tile), scale=True),
            rhs=calls.side(right, (n, k), (1,), tiles=(1, tile), scale=True, zero_point=zero_point),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )

    if not calls.takes(kernel, spec(most)):
        pytest.skip(f"{kernel} takes no zero points")
    operands = specs.draw_operands(np.random.default_rng(k), spec(most))
    (whole,) = calls.call_named(spec(most), operands, kernel)
    oracle.assert_within_bound(spec(most), operands, whole)
    for count in (12, 13, 18, 47):
        some = operands | {name: operands[name][-count:] for name in ("lhs", "lhs_scale")}
        (part,) = calls.call_named(spec(count), some, kernel)
        oracle.assert_within_bound(spec(count), some, part)
        if kernel.startswith("avx512"):
            np.testing.assert_array_equal(part, whole[-count:])


@pytest.mark.parametrize("rows", [3, 23, 64])
@pytest.mark.parametrize("tile", [16, 128, 1024])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_where_a_row_or_a_column_is(kernel, tile, rows):
    """Rows that are the same, and columns, wherever they lie in the tiles of a kernel."""
    integers = kernel in INTEGER_KERNELS
    left, right = ("int8", "int8") if integers else ("bfloat16", "float8_e4m3fn")
    (m, k, n), same = (rows, 1024, 150), 75
    spec = ScaledDotSpec(
        lhs=calls.side(left, (m, k), (1,), tiles=(1, tile), scale=True),
        rhs=calls.side(right, (k, n), (0,), tiles=(tile, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32", bias=(1, 1)),
    )
    operands = specs.draw_operands(np.random.default_rng(tile), spec)
    for name in ("lhs_scale", "rhs_scale"):  # no larger than 1: sums may be float32
        operands[name] = operands[name] / operands[name].max()
    for name in ("lhs", "lhs_scale"):
        operands[name] = np.repeat(operands[name][:1], m, axis=0)
    for name in ("rhs", "rhs_scale"):
        operands[name] = np.tile(operands[name][:, :same], 2)
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
    np.testing.assert_array_equal(out[:, :same], out[:, same:])


@pytest.mark.parametrize("tile", [32, 128, 2100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_of_a_row_do_not_depend_on_how_many_others_there_are(kernel, tile):
    """So that a part of a product of many rows has the bits of the whole.

    From 128 rows on, short blocks of scales are multiplied into the columns of float32 kernels.
    """
    integers = kernel in INTEGER_KERNELS
    left, right = ("uint8", "int8") if integers else ("float32", "float8_e5m2")
    if kernel.endswith("bf16"):
        left = "bfloat16"
    most = 120 if tile == 32 else 200

    def spec(rows):
        return ScaledDotSpec(
            lhs=calls.side(left, (rows, 2100), (1,)),
            rhs=calls.side(right, (2100, 70), (0,), tiles=(tile, 1), scale=True),
            epilogue=EpilogueSpec(out_dtype="float32"),
        )

    operands = specs.draw_operands(np.random.default_rng(tile), spec(most))
    operands["rhs_scale"] = operands["rhs_scale"] / operands["rhs_scale"].max()
    (whole,) = calls.call_named(spec(most), operands, kernel)
    for count in {17, 18, 22, 35, 64, 71, 119, 128, 129, 192, 193} & set(range(most)):
        some = operands | {"lhs": operands["lhs"][most - count :]}
        (part,) = calls.call_named(spec(count), some, kernel)
        np.testing.assert_array_equal(part, whole[most - count :])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations_hold_from_tiny_to_huge(kernel, activation):
    """Scales carry the sums from 1e-30 to 1e30, through every branch of the function."""
    dtype = "int8" if kernel in INTEGER_KERNELS else "float8_e5m2"
    n = 200
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (2, 4), (1,)),
        rhs=calls.side("int8", (4, n), (0,), tiles=(4, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32", activation=activation),
    )
    operands = specs.draw_operands(np.random.default_rng(1), spec)
    operands["rhs_scale"] = np.logspace(-30, 30, n, dtype=np.float32)[None, :]
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations_of_sums_beyond_float32(kernel, activation, rows):
    """Sums are float64 until they are stored, and `out_scale` brings them back."""
    spec = ScaledDotSpec(
        lhs=calls.side("int8", (rows, 1), (1,), tiles=(1, 1), scale=True),
        rhs=calls.side("int8", (1, 70), (0,), tiles=(1, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="int8", activation=activation, out_scale=(1, 1)),
    )
    operands = {
        "lhs": np.ones((rows, 1), np.int8),
        "lhs_scale": np.full((rows, 1), 1e20, np.float32),
        "rhs": np.tile(np.array([1, -1], np.int8), 35)[None, :],
        "rhs_scale": np.full((1, 70), 1e20, np.float32),
        "out_scale": np.full((1, 1), 1e38, np.float32),
    }
    operands["rhs_scale"][0, 10:20] = 1e17  # within float32, beside what is not
    (out,) = calls.call_named(spec, operands, kernel)
    positive = np.where((np.arange(70) >= 10) & (np.arange(70) < 20), 0, 100)
    expected = np.where(np.arange(70) % 2, -positive if activation == "none" else 0, positive)
    np.testing.assert_array_equal(out, np.tile(expected, (rows, 1)))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_integers_are_rounded_once(kernel, rows):
    """A half and 2^-32, which float32 takes for a half, is 1."""
    dtype = "int8" if kernel in INTEGER_KERNELS else "bfloat16"
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (rows, 1), (1,)),
        rhs=calls.side("int8", (1, 3), (0,), tiles=(1, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="int8", bias=(1, 3), out_scale=(1, 1)),
    )
    operands = {
        "lhs": np.ones((rows, 1), jnp.dtype(dtype)),
        "rhs": np.array([[1, 0, -1]], np.int8),
        "rhs_scale": np.full((1, 3), 2.0**-32, np.float32),
        "bias": np.full((1, 3), 0.5, np.float32),
        "out_scale": np.ones((1, 1), np.float32),
    }
    (out,) = calls.call_named(spec, operands, kernel)
    np.testing.assert_array_equal(out, np.tile([1, 0, 0], (rows, 1)))


@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_nan_and_infinity_spread_as_in_ieee(kernel, wide):
    if wide not in wide_types(kernel):
        pytest.skip(f"{kernel} does not take {wide}")
    x = np.ones((4, 19), jnp.dtype(wide))
    x[1, 3], x[2, 18], x[3, 0], x[3, 1] = np.nan, np.inf, np.inf, -np.inf
    w = np.full((19, 70), 0x3C, np.uint8)  # 1.0 in e5m2
    w[0, 5], w[18, 6] = 0x7E, 0  # NaN, and the 0 that meets row 2's infinity
    spec = calls.matrices(wide, "float8_e5m2", 4, 19, 70)
    (out,) = calls.call(spec, x, w, kernel=kernel)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64) @ oracle.decode(w, "float8_e5m2")
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_padding_never_meets_an_infinity(kernel):
    """Depth and columns that fill no vector: what stands in for them must not make NaN."""
    for k, n in [(1, 1), (3, 65), (17, 63)]:
        x = np.full((2, k), np.inf, jnp.bfloat16)
        w = np.ones((k, n), np.int8)
        (out,) = calls.call(calls.matrices("bfloat16", "int8", 2, k, n), x, w, kernel=kernel)
        np.testing.assert_array_equal(out, np.inf)


@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_eight_bit_outputs_saturate_and_round_to_even(kernel, out_dtype):
    """Against the cast of ml_dtypes, for values clipped to the type's range."""
    dtype = "int8" if kernel in INTEGER_KERNELS else "bfloat16"
    low, high = _dtypes.finite_range(out_dtype)
    exact = np.concatenate([np.linspace(-1.5 * high, 1.5 * high, 997), np.linspace(-0.1, 0.1, 999)])
    exact = exact.astype(np.float32)
    n = exact.size
    spec = ScaledDotSpec(
        lhs=calls.side(dtype, (1, 1), (1,)),
        rhs=calls.side("int8", (1, n), (0,)),
        epilogue=EpilogueSpec(out_dtype=out_dtype, bias=(1, n), out_scale=(1, 1)),
    )
    zero, one = np.zeros((1, 1), jnp.dtype(dtype)), np.ones((1, n), np.int8)
    operands = zero, one, exact[None, :], np.ones((1, 1), np.float32)
    (out,) = calls.call(spec, *operands, kernel=kernel)
    clipped = np.clip(exact, low, high)
    rounded = clipped if _dtypes.is_float8(out_dtype) else np.round(clipped)
    expected = rounded.astype(np.dtype(out_dtype)).view(_dtypes.storage(out_dtype))
    np.testing.assert_array_equal(out[0], expected)


@pytest.mark.parametrize("kernel", FLOAT_KERNELS)
def test_nan_stays_nan_in_fp8_and_becomes_0_in_integers(kernel):
    x = np.array([[np.nan], [np.inf], [-np.inf]], jnp.bfloat16)
    expected = {
        "float8_e4m3fn": [np.nan, 448, -448],
        "float8_e5m2": [np.nan, 57344, -57344],
        "int8": [0, 127, -128],
        "uint8": [0, 255, 0],
    }
    for out_dtype, values in expected.items():
        spec = calls.matrices("bfloat16", "int8", 3, 1, 1, out=out_dtype, out_scale=(1, 1))
        ones = np.ones((1, 1), np.int8), np.ones((1, 1), np.float32)
        (out,) = calls.call(spec, x, *ones, kernel=kernel)
        np.testing.assert_array_equal(oracle.decode(out, out_dtype)[:, 0], values)


@pytest.mark.parametrize("kernel", KERNELS)
def test_amax_reduces_the_axes_of_size_1_and_nan_wins(kernel):
    dtype = "int8" if kernel in INTEGER_KERNELS else "float8_e4m3fn"
    rng = np.random.default_rng(3)
    for amax in [(1, 1), (1, 70), (9, 1), (9, 70)]:
        spec = calls.matrices(dtype, "int8", 9, 20, 70, out="bfloat16", bias=(9, 70), amax=amax)
        operands = specs.draw_operands(rng, spec)
        operands["bias"][4, 11] = np.nan
        _, found = calls.call_named(spec, operands, kernel)
        x, w = oracle.decode(operands["lhs"], dtype), operands["rhs"].astype(np.float64)
        y = np.abs(x @ w + operands["bias"])
        axes = tuple(axis for axis, size in enumerate(amax) if size == 1)
        np.testing.assert_allclose(found, y.max(axes, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_forced_kernel_is_the_one_that_is_counted(kernel):
    spec = calls.matrices("int8", "int8", 2, 3, 4)
    before = ffi.kernel_calls()
    calls.call(spec, np.ones((2, 3), np.int8), np.ones((3, 4), np.int8), kernel=kernel)
    after = ffi.kernel_calls()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        kernel: 1
    }


def prepared(dtype: str, m: int, k: int, n: int, weight: str, **more) -> ScaledDotSpec:
    """A product with a right side as `jaxfp8.prepare` lays it out, scaled per channel."""
    shape = (n // 64, k // 4, 64, 4)
    tiles = more.pop("tiles", (1, k // 4, 1, 4))
    return ScaledDotSpec(
        lhs=calls.side(dtype, (m, k // 4, 4), (1, 2), **more),
        rhs=calls.side(weight, shape, (1, 3), tiles=tiles, scale=True, **more),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )


@pytest.mark.parametrize("weight", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_of_prepared_columns_are_exact(kernel, weight):
    """All codes in every place of a quad, by a product with the identity."""
    integers = kernel in INTEGER_KERNELS
    if integers and weight.startswith("float8"):
        pytest.skip(f"{kernel} takes integers")
    codes = finite_codes(weight).view(_dtypes.storage(weight))
    columns = np.stack([np.roll(codes, i) for i in range(64)], axis=1)
    spec = prepared("int8" if integers else "bfloat16", 256, 256, 64, weight)
    packed = columns.reshape(64, 4, 1, 64).transpose(2, 0, 3, 1)
    eye = np.eye(256, dtype=jnp.dtype(spec.lhs.dtype)).reshape(spec.lhs.shape)
    for rows in (256, 2):
        part = dataclasses.replace(spec.lhs, shape=(rows, 64, 4), tiles=(rows, 64, 4))
        few = dataclasses.replace(spec, lhs=part)
        (out,) = calls.call(
            few, eye[:rows], packed, np.ones((1, 1, 64, 1), np.float32), kernel=kernel
        )
        np.testing.assert_array_equal(out.reshape(rows, 64), oracle.decode(columns[:rows], weight))


@pytest.mark.parametrize("m", [1, 3, 4, 5, 15, 16, 17, 70])
@pytest.mark.parametrize("kernel", KERNELS)
def test_prepared_columns_stay_within_the_bound(kernel, m):
    """Depths that fill no tile, scales per block and so often that they part quads, zero points."""
    rng = np.random.default_rng(m)
    integers = kernel in INTEGER_KERNELS
    weight, wide = ("uint8", "int8") if integers else ("float8_e4m3fn", "bfloat16")
    few = kernel.startswith("scalar")
    for k, n, tiles in [
        (4, 64, (1, 1, 1, 4)),
        (516, 192, (1, 32, 64, 4)),
        (64, 128, (2, 1, 64, 2)),
        (516 if few else 5004, 128, (2, 8, 64, 4)),
    ]:
        zero = {"zero_point": True} if integers else {}
        spec = prepared(wide, m, k, n, weight, tiles=tiles, **zero)
        operands = specs.draw_operands(rng, spec)
        (out,) = calls.call_named(spec, operands, kernel)
        oracle.assert_within_bound(spec, operands, out)
