"""Quantising on the GPU gives the bits of float32 arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import _dtypes
from jaxfp8._quantize_tiles import encode

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


# Tiles that no kernel takes are left to XLA, which multiplies by a reciprocal: a number between two
# codes may fall to either.
BY_XLA = "column"


def blocks_of(x: np.ndarray, grain: str) -> tuple[int, int, int, int]:
    """The matrix as [row tiles, rows, column tiles, columns], partial tiles filled up."""
    rows, columns = x.shape
    tile = {
        "tensor": (rows, columns),
        "token": (1, columns),
        "leading": (1, columns),
        "1x128": (1, 128),
        "128x128": (128, 128),
        "column": (rows, 1),
    }[grain]
    return -(-rows // tile[0]), tile[0], -(-columns // tile[1]), tile[1]


def expected(
    x: np.ndarray, dtype: str, grain: str, given: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales as float32 arithmetic has them, each operation rounded once."""
    wide = x.reshape(-1, x.shape[-1]).astype(np.float32)
    row_tiles, tile_rows, column_tiles, tile_columns = blocks_of(wide, grain)
    padded = np.zeros((row_tiles * tile_rows, column_tiles * tile_columns), np.float32)
    padded[: wide.shape[0], : wide.shape[1]] = wide
    blocks = padded.reshape(row_tiles, tile_rows, column_tiles, tile_columns)
    lowest, highest = _dtypes.finite_range(dtype)
    counted = np.where(np.isfinite(blocks), blocks, 0)
    amax = np.max(counted if lowest == 0 else np.abs(counted), axis=(1, 3), keepdims=True)
    scale = np.maximum(amax, 0) * (np.float32(1) / np.float32(highest))
    scale = np.where(scale > 0, np.maximum(scale, np.finfo(np.float32).tiny), np.float32(1))
    scale = scale if given is None else np.full_like(scale, given)
    steps = blocks / scale
    if not _dtypes.is_float8(dtype):
        steps = np.round(np.where(np.isnan(steps), 0, steps))
    codes = np.clip(steps, lowest, highest).astype(np.dtype(dtype)).reshape(padded.shape)
    return codes[: wide.shape[0], : wide.shape[1]].reshape(x.shape), scale[:, 0, :, 0]


def same(x: np.ndarray, dtype, grain: str) -> None:
    gpu = jaxfp8.quantize(jnp.asarray(x), dtype, **GRAINS[grain])
    codes, scale = expected(x, dtype, grain)
    np.testing.assert_array_equal(np.asarray(gpu.scale).reshape(scale.shape), scale)
    ours, exact = np.asarray(gpu.qvalue), codes
    if grain == BY_XLA or dtype == "uint8":
        assert np.mean(ours.view(np.uint8) != exact.view(np.uint8)) < 1e-2
    else:
        nan = np.isnan(exact.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(ours.astype(np.float32)), nan)
        np.testing.assert_array_equal(ours.view(np.uint8)[~nan], exact.view(np.uint8)[~nan])


@pytest.mark.parametrize("grain", [g for g in GRAINS if g != "leading"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 256), (200, 1000), (17, 4100)], ids=str)
def test_codes_and_scales_have_the_same_bits(shape, wide, dtype, grain):
    same(values(shape, wide), dtype, grain)


@pytest.mark.parametrize("grain", [g for g in GRAINS if g != "leading"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_special_values(dtype, grain):
    x = values((130, 300), "float32")
    x[0, 0], x[1, 1], x[2, 2], x[129, 299] = np.nan, np.inf, -np.inf, 1e38
    x[5] = 0
    x[6] = 1e-30
    same(x, dtype, grain)


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 256), (200, 1000), (4, 50, 17)], ids=str)
def test_both_layouts_in_one_pass(shape, wide, dtype, scale):
    x = values(shape, wide)
    x[0, 0], x[-1, -1] = np.inf, np.nan
    split = len(shape) - 1
    got = encode(jnp.asarray(x), dtype, None if scale is None else jnp.float32(scale), split)
    codes, used = expected(x.reshape(-1, shape[-1]), dtype, "tensor", scale)
    np.testing.assert_array_equal(np.ravel(got.scale), used.ravel())
    if scale is not None:
        finite = np.where(np.isfinite(x), x, 0).astype(np.float32)
        np.testing.assert_array_equal(np.ravel(got.found), np.abs(finite).max())
    ours = np.asarray(got.codes)
    np.testing.assert_array_equal(as_floats(ours), as_floats(codes.reshape(shape)))
    turned = ours.transpose(split, *range(split))
    np.testing.assert_array_equal(as_floats(got.turned), as_floats(turned))


def as_floats(codes) -> np.ndarray:
    return np.asarray(codes).astype(np.float32)


def test_long_rows_and_leading_axes():
    same(values((2, 3, 20_000), "bfloat16"), "float8_e4m3fn", "leading")


def test_large_arrays():
    same(values((4096, 4096), "bfloat16"), "float8_e4m3fn", "token")
    same(values((4096, 4096), "bfloat16"), "float8_e4m3fn", "tensor")
