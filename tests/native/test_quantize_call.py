"""The call `jaxfp8_quantize` on the CPU: the bits of float32 arithmetic, on any instruction set."""

from __future__ import annotations

import concurrent.futures
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized

from jaxfp8._call.library import ffi

SETS = [name for name in ("avx512", "avx2") if name in ffi.cpu_features().split()] + ["scalar"]
WIDE = ("bfloat16", "float16", "float32")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
WHOLE = 1 << 62
GRAINS = {
    "tensor": (WHOLE, WHOLE),
    "token": (1, WHOLE),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "3x5": (3, 5),
    "7 rows": (7, WHOLE),
}


def call(x, dtype: str, tile=(WHOLE, WHOLE), scale=None, amax=False, **attributes) -> list:
    """The results of one call."""
    ffi.ensure_registered("cpu")
    x = np.asarray(x)
    counts = tuple(-(-size // t) for size, t in zip(x.shape, tile, strict=True))
    results = [jax.ShapeDtypeStruct(x.shape, np.dtype(dtype))]
    tiles = jax.ShapeDtypeStruct(counts, np.float32)
    results += [tiles] * ((scale is None) + amax)
    operands = [x] if scale is None else [x, np.broadcast_to(np.float32(scale), counts)]
    given = {
        "out_dtype": dtype,
        "tile_rows": np.int64(tile[0]),
        "tile_columns": np.int64(tile[1]),
        "given_scale": scale is not None,
        "amax": amax,
        **attributes,
    }
    return [np.asarray(y) for y in jax.ffi.ffi_call("jaxfp8_quantize", results)(*operands, **given)]


def refusal(*args, **kwargs) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def check(x: np.ndarray, dtype: str, grain: str, kernel: str) -> None:
    check_tile(x, dtype, GRAINS[grain], kernel)


def check_tile(x: np.ndarray, dtype: str, of_call: tuple[int, int], kernel: str) -> None:
    tile = tuple(min(t, size) for t, size in zip(of_call, x.shape, strict=True))
    for power in (False, True):
        codes, scale, amax = call(x, dtype, of_call, amax=True, kernel=kernel, power_of_two=power)
        exact_codes, exact_scale, exact_amax = quantized.expected(x, dtype, tile, None, power)
        np.testing.assert_array_equal(amax, exact_amax)
        np.testing.assert_array_equal(scale, exact_scale)
        quantized.assert_same_codes(codes, exact_codes)


def every_code(wide: str) -> np.ndarray:
    """All values of a 16-bit type; all float32 whose upper 16 bits those are, two of each."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if wide != "float32":
        return bits.view(np.dtype(wide))[None]
    low = np.array([0x0000, 0x8001], np.uint32)
    return (bits.astype(np.uint32)[:, None] << 16 | low).view(np.float32).reshape(1, -1)


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -0.7, 1e-40, 1e38, np.inf], ids=str)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kernel", SETS)
def test_every_value_by_a_given_scale(kernel, wide, dtype, scale):
    x = every_code(wide)
    (codes,) = call(x, dtype, scale=scale, kernel=kernel)
    with np.errstate(all="ignore"):
        steps = x.astype(np.float32) / (np.float32(scale) or np.float32(1))
        quantized.assert_same_codes(codes, quantized.codes_of(steps, dtype))


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("kernel", SETS)
def test_amaxes_beside_a_given_scale(kernel, grain):
    for shape in SHAPES:
        x = values(shape, "float32")
        codes, amax = call(x, "int8", GRAINS[grain], scale=0.3, amax=True, kernel=kernel)
        tile = tuple(min(t, size) for t, size in zip(GRAINS[grain], x.shape, strict=True))
        exact_codes, _, exact_amax = quantized.expected(x, "int8", tile, 0.3)
        np.testing.assert_array_equal(amax, exact_amax)
        quantized.assert_same_codes(codes, exact_codes)


def borders(dtype: str) -> np.ndarray:
    """What lies halfway between two codes, and the two float32 on either side of it."""
    codes = np.arange(128, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    half = (codes[:-1] + codes[1:]) / 2
    near = half.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    return np.concatenate([near, near | np.int32(-(2**31))]).view(np.float32).reshape(1, -1)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kernel", SETS)
def test_ties_go_to_the_even_code_and_neighbours_to_their_own(kernel, dtype):
    steps = borders(dtype)
    (codes,) = call(steps, dtype, scale=1, kernel=kernel)
    quantized.assert_same_codes(codes, quantized.codes_of(steps, dtype))
    rng = np.random.default_rng(0)
    for scale in np.exp(rng.normal(size=50)).astype(np.float32):
        x = steps * scale
        (codes,) = call(x, dtype, scale=scale, kernel=kernel)
        quantized.assert_same_codes(codes, quantized.codes_of(x / scale, dtype))


def values(shape: tuple[int, int], wide: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)) * 3)
    x.reshape(-1)[:: x.size // 5 + 1] = 0
    return x.astype(np.dtype(wide))


SHAPES = [(1, 1), (3, 5), (1, 31), (2, 33), (130, 256), (200, 130), (17, 1027)]


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kernel", SETS)
def test_codes_scales_and_amaxes_of_any_tiles(kernel, dtype, grain):
    for shape, wide in itertools.product(SHAPES, WIDE):
        check(values(shape, wide), dtype, grain, kernel)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", SETS)
def test_random_shapes_and_tiles(kernel, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        shape, tile = (tuple(map(int, rng.integers(1, most, 2))) for most in (300, 200))
        special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e-30, 6e4], shape)
        with np.errstate(all="ignore"):
            x = values(shape, WIDE[rng.integers(3)])
            x = np.where(rng.random(shape) < 0.01, special, x).astype(x.dtype)
            check_tile(x, NARROW[rng.integers(3)], tile, kernel)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kernel", SETS)
def test_a_power_of_two_is_the_next_one_up(kernel, dtype):
    highest = 127 if dtype == "int8" else ml_dtypes.finfo(dtype).max
    exact = np.float32(highest) * np.float32(2.0) ** np.arange(-126, 112, dtype=np.float32)
    bits = exact.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    tiny = np.float32([0, 2.0**-149, 2.0**-140, 2.0**-126])
    amaxes = np.concatenate([bits.view(np.float32).ravel(), tiny])
    check_tile(np.stack([-amaxes, amaxes / 3], axis=1), dtype, (1, WHOLE), kernel)


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kernel", SETS)
def test_nan_infinities_zeros_and_subnormals(kernel, wide, grain):
    x = values((131, 300), wide)
    tiny = 2.0 ** (-149 if wide == "float32" else -133 if wide == "bfloat16" else -24)
    x[0, 0], x[1, 1], x[2, 2], x[3, 299], x[130, 299] = np.nan, np.inf, -np.inf, -np.nan, np.inf
    x[5], x[6], x[7], x[8] = 0, tiny, -0.0, np.nan
    x[9], x[10] = 0, np.finfo(x.dtype).max if wide == "float16" else ml_dtypes.finfo(x.dtype).max
    x[9, 7] = tiny
    with np.errstate(all="ignore"):
        for dtype in NARROW:
            check(x, dtype, grain, kernel)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kernel", SETS)
def test_a_plain_division_by_zero_and_a_lowest_code(kernel, dtype):
    x = every_code("bfloat16")
    for scale, lowest in ((0.0, -128), (-0.0, -128), (0.25, -127), (0.25, 0)):
        (codes,) = call(x, dtype, scale=scale, plain=True, lowest=np.int64(lowest), kernel=kernel)
        with np.errstate(all="ignore"):
            exact = quantized.codes_of(x.astype(np.float32) / np.float32(scale), dtype)
        exact = np.maximum(exact, lowest).astype(exact.dtype) if dtype == "int8" else exact
        quantized.assert_same_codes(codes, exact)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kernel", SETS)
def test_codes_of_values_times_a_factor(kernel, dtype):
    x = every_code("bfloat16")
    for factor in (0.3, 0.0, -7.0, 1e-40, 1e38, np.inf):
        (codes,) = call(x, dtype, scale=factor, plain=True, multiplies=True, kernel=kernel)
        with np.errstate(all="ignore"):
            exact = quantized.codes_of(x.astype(np.float32) * np.float32(factor), dtype)
        quantized.assert_same_codes(codes, exact)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (300, 4100), (3, 0)], ids=str)
def test_the_amax_of_rows_is_nan_before_infinity_before_numbers(shape, wide):
    x = values(shape, wide)
    if x.size > 100:
        x[0, 3], x[1, 32], x[1, 4], x[2, 7] = -np.inf, np.nan, np.inf, np.nan
    ffi.ensure_registered("cpu")
    result = jax.ShapeDtypeStruct(shape[:1], np.float32)
    amax = jax.ffi.ffi_call("jaxfp8_amax", result)(x)
    exact = np.max(np.abs(x.astype(np.float32)), axis=1, initial=0)
    np.testing.assert_array_equal(amax, exact)


def test_an_amax_of_other_shapes_is_refused():
    ffi.ensure_registered("cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="`x` needs two axes and to be float32"):
        jax.ffi.ffi_call("jaxfp8_amax", jax.ShapeDtypeStruct((3,), np.float32))(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the result needs one axis, of the size"):
        jax.ffi.ffi_call("jaxfp8_amax", jax.ShapeDtypeStruct((2,), np.float32))(jnp.ones((3, 4)))


@pytest.mark.parametrize("shape", [(1, 1 << 20), (1024, 1025), (3, 400_001)], ids=str)
@pytest.mark.parametrize("grain", ["tensor", "token", "128x128"])
def test_arrays_that_threads_share(grain, shape):
    for kernel in ("", *SETS):
        check(values(shape, "bfloat16"), "int8", grain, kernel)


def test_calls_from_several_threads_at_once():
    x = values((300, 4096), "float32")
    alone = call(x, "float8_e4m3fn", (1, WHOLE))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for codes, scale in pool.map(lambda _: call(x, "float8_e4m3fn", (1, WHOLE)), range(16)):
            quantized.assert_same_codes(codes, alone[0])
            np.testing.assert_array_equal(scale, alone[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_nothing_is_quantized_to_nothing(shape):
    codes, scale = call(np.zeros(shape, np.float32), "int8")
    assert (codes.size, scale.size) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kernel": "neon"}, "attribute `kernel` is `neon`, but this CPU needs one of: "),
        ({"kernel": 1}, "attribute `kernel` has another type, but needs to be a string"),
        ({"out_dtype": "uint8"}, "attribute `out_dtype` needs to be float8_e4m3fn, float8_e5m2 or"),
        ({"transposed": True}, "attributes `transposed` and `transposed_scale` are for GPUs"),
        ({"transposed_scale": True}, "attributes `transposed` and `transposed_scale` are for GPUs"),
        ({"multiplies": True}, "attribute `multiplies` needs `plain` and `given_scale`"),
        ({"lowest": np.int64(-129)}, "attribute `lowest` is -129, but needs to be from -128 to 0"),
        ({"tile_rows": np.int64(0)}, "attributes `tile_rows` and `tile_columns` are 0"),
        ({"tile_rows": np.int64(1)}, "`scale` is float32 of (1, 1), but needs to be float32 of (2"),
        ({"amax": 1}, "attribute `amax` has another type, but needs to be a bool"),
        ({"power_of_two": 1}, "attribute `power_of_two` has another type, but needs to be a bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_that_does_not_fit_is_refused(arguments, text):
    attributes = {"amax": False, **arguments}
    amax = attributes.pop("amax")
    given = {} if amax is False else {"amax": amax}
    results = [jax.ShapeDtypeStruct((2, 3), np.int8), jax.ShapeDtypeStruct((1, 1), np.float32)]
    ffi.ensure_registered("cpu")
    asked = {"out_dtype": "int8", "tile_rows": np.int64(2), "tile_columns": np.int64(3)}
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.ffi.ffi_call("jaxfp8_quantize", results)(
            jnp.ones((2, 3)), **{**asked, **attributes, **given}
        )
    assert f"INVALID_ARGUMENT: `jaxfp8_quantize`: {text}" in str(caught.value)


def test_operands_that_do_not_fit_are_refused():
    assert "`x` is int8, but needs to be float32, bfloat16 or float16" in refusal(
        np.ones((2, 3), np.int8), "int8"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 2 operands, but its attributes ask"):
        results = [jax.ShapeDtypeStruct((2, 3), np.int8), jax.ShapeDtypeStruct((1, 1), np.float32)]
        jax.ffi.ffi_call("jaxfp8_quantize", results)(
            jnp.ones((2, 3)),
            jnp.ones((1, 1)),
            out_dtype="int8",
            tile_rows=np.int64(2),
            tile_columns=np.int64(3),
        )


@pytest.mark.parametrize("seed", range(2))
def test_attributes_that_nobody_means_are_refused_with_a_sentence(seed):
    rng = np.random.default_rng(90_000 + seed)
    sizes = (-(2**63), -1, 0, 1, 3, 2**40, 2**62, 2**63 - 1)
    names = ("tile_rows", "tile_columns", "lowest")
    words = ("given_scale", "transposed", "plain", "multiplies", "out_dtype", "kernel")
    values = (True, False, "", "int8", "float64", 2.5, np.int32(1))
    x, results = rng.normal(size=(3, 8)).astype(np.float32), 0
    for _ in range(40):
        attributes = {str(name): np.int64(rng.choice(sizes)) for name in rng.choice(names, 2)}
        if rng.random() < 0.5:
            attributes[str(rng.choice(words))] = values[rng.integers(len(values))]
        try:
            call(x, "float8_e4m3fn", (1, 4), **attributes)
            results += 1
        except jax.errors.JaxRuntimeError as error:
            assert str(error).startswith("INVALID_ARGUMENT: "), str(error)
            assert "`jaxfp8_quantize`: " in str(error)
    assert results < 20
