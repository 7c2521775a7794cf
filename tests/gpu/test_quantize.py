"""Quantizing on the GPU gives the bits of float32 arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest
import quantized

import jaxfp8
from jaxfp8._call.ops.quantize_call import encode, quantize_tiles
from jaxfp8._value import dtypes

GRAINS = {
    "tensor": {},
    "token": {"channelwise_axes": (0,)},
    "1x128": {"channelwise_axes": (0,), "tiled_axes": {1: 128}},
    "128x128": {"tiled_axes": {0: 128, 1: 128}},
    "column": {"channelwise_axes": (1,)},
    "leading": {"channelwise_axes": (0, 1)},
}


def values(shape: tuple[int, ...], dtype) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)) * 3)
    x.reshape(-1)[:: x.size // 5 + 1] = 0
    return x.astype(np.dtype(dtype))


SCALES = pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])

# Tiles that no kernel takes are left to XLA, which multiplies by a reciprocal: a number between two
# codes may fall to either.
BY_XLA = "column"


def tile_of(shape: tuple[int, ...], grain: str) -> tuple[int, int]:
    """The tile of the matrix with all leading axes as rows."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    return {
        "tensor": (rows, columns),
        "token": (1, columns),
        "leading": (1, columns),
        "1x128": (1, 128),
        "128x128": (128, 128),
        "column": (rows, 1),
    }[grain]


def same(x: np.ndarray, dtype, grain: str, scale_dtype="float32") -> None:
    gpu = jaxfp8.quantize(jnp.asarray(x), dtype, scale_dtype=scale_dtype, **GRAINS[grain])
    matrix, power = x.reshape(-1, x.shape[-1]), scale_dtype != "float32"
    codes, scale, _ = quantized.expected(matrix, dtype, tile_of(x.shape, grain), None, power)
    np.testing.assert_array_equal(np.asarray(gpu.scale).astype(np.float32).ravel(), scale.ravel())
    ours, exact = np.asarray(gpu.qvalue), codes.reshape(x.shape)
    if grain == BY_XLA or dtype == "uint8":
        assert np.mean(ours.view(np.uint8) != exact.view(np.uint8)) < 1e-2
    else:
        quantized.assert_same_codes(ours, exact)


@pytest.mark.parametrize("grain", [g for g in GRAINS if g != "leading"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 256), (200, 1000), (17, 4100)], ids=str)
@SCALES
def test_codes_and_scales_have_the_same_bits(shape, wide, dtype, grain, scale_dtype):
    same(values(shape, wide), dtype, grain, scale_dtype)


@pytest.mark.parametrize("grain", [g for g in GRAINS if g != "leading"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@SCALES
def test_special_values(dtype, grain, scale_dtype):
    x = values((130, 300), "float32")
    x[0, 0], x[1, 1], x[2, 2], x[129, 299] = np.nan, np.inf, -np.inf, 1e38
    x[5] = 0
    x[6] = 1e-30
    same(x, dtype, grain, scale_dtype)


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 256), (200, 1000), (4, 50, 17)], ids=str)
def test_both_layouts_in_one_pass(shape, wide, dtype, scale):
    x = values(shape, wide)
    x[0, 0], x[-1, -1] = np.inf, np.nan
    split = len(shape) - 1
    got = encode(jnp.asarray(x), dtype, None if scale is None else jnp.float32(scale), split)
    matrix = x.reshape(-1, shape[-1])
    codes, used, _ = quantized.expected(matrix, dtype, matrix.shape, scale)
    np.testing.assert_array_equal(np.ravel(got.scale), used.ravel())
    if scale is not None:
        finite = np.where(np.isfinite(x), x, 0).astype(np.float32)
        np.testing.assert_array_equal(np.ravel(got.amax), np.abs(finite).max())
    ours = np.asarray(got.codes)
    np.testing.assert_array_equal(as_floats(ours), as_floats(codes.reshape(shape)))
    turned = ours.transpose(split, *range(split))
    np.testing.assert_array_equal(as_floats(got.transposed), as_floats(turned))


def as_floats(codes) -> np.ndarray:
    return np.asarray(codes).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(128, 256), (200, 1000), (130, 129), (257, 4100)], ids=str)
def test_squares_in_both_layouts_in_one_pass(shape, wide, dtype):
    x = values(shape, wide)
    x[0, 0], x[-1, -1] = np.inf, np.nan
    got = encode(jnp.asarray(x), dtype, None, 1, tiles=(128, 128), power_of_two=True)
    codes, scale, _ = quantized.expected(x, dtype, (128, 128), None, True)
    np.testing.assert_array_equal(got.scale, scale)
    quantized.assert_same_codes(got.codes, codes)
    np.testing.assert_array_equal(as_floats(got.transposed), as_floats(got.codes).T)


@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "float32"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "shape", [(128, 256), (1, 300), (37, 300), (130, 129), (272, 144), (2, 256, 520), (3, 50, 144)]
)
def test_blocks_of_both_layouts_in_one_pass(shape, wide, dtype, power_of_two):
    """FP8 in one call where the rows of an entry are whole tiles, and else in two."""
    x = values(shape, wide)
    x[..., 0, 0], x[..., -1, -1], x[..., 0, 5], x[..., 7], x[..., 9] = np.inf, np.nan, -np.inf, 0, 1
    x[..., 8] = np.nan
    lead = (1,) * (len(shape) - 2)
    tiles = [tuple(map(min, tile, shape)) for tile in ((*lead, 1, 128), (*lead, 128, 1))]
    got = encode(jnp.asarray(x), dtype, None, len(shape) - 1, tiles[0], power_of_two, tiles[1])
    matrix = x.reshape(-1, shape[-1])
    codes, scale, _ = quantized.expected(matrix, dtype, (1, 128), None, power_of_two)
    np.testing.assert_array_equal(np.ravel(got.scale), scale.ravel())
    quantized.assert_same_codes(np.asarray(got.codes).reshape(matrix.shape), codes)
    entries = [
        quantized.expected(entry.T, dtype, (1, 128), None, power_of_two)
        for entry in x.reshape(-1, *shape[-2:])
    ]
    codes, scale = (np.stack([entry[i] for entry in entries], axis=1) for i in range(2))
    np.testing.assert_array_equal(np.ravel(got.transposed_scale), scale.ravel())
    ours = np.asarray(got.transposed).reshape(codes.shape)
    quantized.assert_same_codes(ours, codes)


# Amaxes around powers of two times the highest code, and subnormal ones.
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_power_of_two_is_the_next_one_up(dtype):
    highest = np.float32(dtypes.finite_range(dtype)[1])
    exact = highest * np.float32(2.0) ** np.arange(-126, 112, dtype=np.float32)
    bits = exact.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    amaxes = np.concatenate([bits.view(np.float32).ravel(), np.float32([0, 1e-45, 1e-40])])
    x = np.stack([-amaxes, *[amaxes / 3] * 16], axis=1)
    same(x, dtype, "token", "float8_e8m0fnu")


@SCALES
def test_long_rows_and_leading_axes(scale_dtype):
    same(values((2, 3, 20_000), "bfloat16"), "float8_e4m3fn", "leading", scale_dtype)
    same(values((2, 3, 70_000), "bfloat16"), "float8_e4m3fn", "leading", scale_dtype)


def test_large_arrays():
    same(values((4096, 4096), "bfloat16"), "float8_e4m3fn", "token")
    same(values((4096, 4096), "bfloat16"), "float8_e4m3fn", "tensor")


# Rows of 17 and of 131073 begin at any byte. The latter are longer than a block holds in registers.
@pytest.mark.parametrize("columns", [1, 17, 4096, 14336, 131_072, 131_073])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_float8_become_int8(dtype, columns):
    x = quantized.float8_rows(dtype, columns)
    codes, scale = quantize_tiles(jnp.asarray(x), np.dtype(np.int8), (1, columns))
    quantized.assert_rows_of_int8(codes, scale, x)
