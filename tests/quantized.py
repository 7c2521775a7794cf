"""Quantizing as float32 arithmetic has it, each operation rounded once."""

from __future__ import annotations

import numpy as np

from jaxfp8._value import dtypes


def codes_of(steps: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest codes, saturated."""
    lowest, highest = dtypes.finite_range(dtype)
    if not dtypes.is_float8(dtype):
        steps = np.round(np.where(np.isnan(steps), 0, steps))
    return np.clip(steps, lowest, highest).astype(np.dtype(dtype))


def scale_of(amax: np.ndarray, dtype: str, power_of_two: bool = False) -> np.ndarray:
    """The scale of tiles with these largest finite magnitudes."""
    highest = dtypes.finite_range(dtype)[1]
    scale = amax * (np.float32(1) / np.float32(highest))
    chosen = power_above(scale) if power_of_two else scale
    return np.where(scale > 0, np.maximum(chosen, np.finfo(np.float32).tiny), np.float32(1))


def power_above(scale: np.ndarray) -> np.ndarray:
    """The least power of two not below a scale, less than two ulp aside; in float64."""
    _, exponent = np.frexp(scale.astype(np.float64) / (1 + 1.5 * 2.0**-23))
    return np.ldexp(1.0, exponent).astype(np.float32)


def expected(
    x: np.ndarray,
    dtype: str,
    tile: tuple[int, int],
    given: float | None = None,
    power_of_two: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and amaxes of a matrix, of which each tile has its own; or of a given scale."""
    wide = x.astype(np.float32)
    down, across = (-(-size // t) for size, t in zip(wide.shape, tile, strict=True))
    padded = np.zeros((down * tile[0], across * tile[1]), np.float32)
    padded[: wide.shape[0], : wide.shape[1]] = wide
    blocks = padded.reshape(down, tile[0], across, tile[1])
    counted = np.where(np.isfinite(blocks), blocks, 0)
    if dtypes.finite_range(dtype)[0] < 0:
        counted = np.abs(counted)
    amax = np.maximum(np.max(counted, axis=(1, 3), keepdims=True), 0)
    chosen = scale_of(amax, dtype, power_of_two)
    scale = chosen if given is None else np.full_like(amax, given)
    codes = codes_of(blocks / scale, dtype).reshape(padded.shape)
    return codes[: wide.shape[0], : wide.shape[1]], scale[:, 0, :, 0], amax[:, 0, :, 0]


def assert_same_codes(codes: np.ndarray, exact: np.ndarray) -> None:
    """The same bits, but for the sign of NaN."""
    codes, exact = np.asarray(codes), np.asarray(exact)
    nan = np.isnan(exact.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(codes.astype(np.float32)), nan)
    np.testing.assert_array_equal(codes.view(np.uint8)[~nan], exact.view(np.uint8)[~nan])


def float8_rows(dtype: str, columns: int) -> np.ndarray:
    """Rows of FP8: all codes; zeros and small magnitudes; one value; only NaN and infinities."""
    bits = np.random.default_rng(columns).permutation(np.arange(256, dtype=np.uint8))
    every = np.resize(bits, (-(-256 // columns), columns))
    signs, magnitudes = every[:1] & 0x80, every[:1] & 0x7F
    smaller = [signs | magnitudes % limit for limit in (1, 2, 8, 61, 100)]
    last = signs | np.uint8(0x2B) * (np.arange(columns) == columns - 1)
    special = signs | (0x7F if dtype == "float8_e4m3fn" else 0x7C | magnitudes % 4)
    return np.concatenate([every, *smaller, last, special]).astype(np.uint8).view(np.dtype(dtype))


def assert_rows_of_int8(codes, scale, x: np.ndarray) -> None:
    """Codes and scales of rows have the bits of the definition."""
    exact_codes, exact_scale, _ = expected(x, "int8", (1, x.shape[1]))
    np.testing.assert_array_equal(np.asarray(scale), exact_scale)
    np.testing.assert_array_equal(np.asarray(codes), exact_codes)
