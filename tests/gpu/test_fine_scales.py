"""Scales that change every 32 or 64 of the sum, among them MX: each against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu.products import HOPPER, ON_HOPPER, accumulation, check, draw, in_form, matrices, run

import jaxfp8
import oracle

E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", np.dtype(ml_dtypes.float8_e8m0fnu)
FORMS = ["float32", "bfloat16", "float16", "exponents"]
# Rows, depth, columns: whole tiles, and every axis odd.
FEW = [(1, 256, 256), (16, 512, 130), (3, 1000, 77), (33, 416, 129), (70, 1056, 200)]
MANY = [(128, 1024, 256), (257, 2048, 384), (300, 1312, 1040)]

layouts = pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
forms = pytest.mark.parametrize("form", FORMS)


def formed(seed, form, *args, **kwargs):
    spec = matrices(*args, **kwargs)
    operands = draw(seed, spec)
    return (spec, operands) if form == "float32" else in_form(spec, operands, form)


@forms
@layouts
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("sizes", FEW, ids=str)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, "int8", "uint8"])
def test_few_rows(dtype, wide, sizes, block, rhs_first, form):
    args = (wide, dtype, *sizes)
    spec, operands = formed(1, form, *args, rhs_first=rhs_first, rhs_tiles=(1, block))
    assert check(spec, operands, "sm80_w8a16") == "sm80_w8a16"


@layouts
@pytest.mark.parametrize("tiles", [(32, 32), (1000, 32), (128, 64)], ids=str)
def test_tiles_of_several_columns(tiles, rhs_first):
    sizes = 5, 320, 200
    spec, operands = formed(
        2, "exponents", "bfloat16", E4M3, *sizes, rhs_first=rhs_first, rhs_tiles=tiles
    )
    check(spec, operands, "sm80_w8a16")


@HOPPER
@forms
@layouts
@pytest.mark.parametrize("sizes", MANY, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, "int8"])
def test_many_rows(dtype, sizes, rhs_first, form):
    m, k, n = sizes
    n = n // 16 * 16
    args = ("bfloat16", dtype, m, k, n)
    spec, operands = formed(3, form, *args, rhs_first=rhs_first, rhs_tiles=(1, 32))
    assert check(spec, operands, "sm90_gemm") == "sm90_gemm"


@HOPPER
@layouts
def test_many_rows_of_exponents_of_64(rhs_first):
    args = ("bfloat16", E4M3, 200, 1024, 256)
    spec, operands = formed(4, "exponents", *args, rhs_first=rhs_first, rhs_tiles=(1, 64))
    assert check(spec, operands, "sm90_gemm") == "sm90_gemm"


KERNELS = ["sm80_w8a16", "cublaslt_wide", *(["sm90_gemm"] if ON_HOPPER else [])]


@layouts
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_exponent_and_code_of_a_weight(kernel, rhs_first):
    """Column c has exponent c; its 32 codes of a block meet rows of the identity."""
    codes = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 256))
    finite = np.isfinite(codes.view(np.dtype(E4M3)).astype(np.float32))
    codes = np.where(finite, codes, 0)
    exponents = np.tile(np.arange(256, dtype=np.uint8), (8, 1))  # of blocks, by columns
    spec = matrices("bfloat16", E4M3, 256, 256, 256, rhs_first=rhs_first, rhs_tiles=(1, 32))
    side = dataclasses.replace(spec.rhs, scale_exponents=True)
    spec = dataclasses.replace(spec, rhs=side)
    turn = (lambda x: x) if rhs_first else (lambda x: np.ascontiguousarray(x.T))
    lhs = np.eye(256).astype(ml_dtypes.bfloat16)
    operands = {"lhs": lhs, "rhs": turn(codes), "rhs_scale": turn(exponents)}
    out, _, ran = run(spec, operands, kernel)
    assert ran == [kernel]
    with np.errstate(all="ignore"):
        exact = codes.view(np.dtype(E4M3)).astype(np.float64) * exponents.view(E8M0)[0].astype(
            np.float64
        )
    assert np.isnan(out[:, 255]).all()
    # An infinite value meets zeros of the other rows, where it is not scaled after the sum.
    overflows = (np.abs(exact) >= 2.0**128).any(axis=0)
    kept = 255 if kernel == "sm80_w8a16" else np.argmax(overflows)
    assert kept > 240 and not np.isfinite(out[:, 254]).all()
    out, exact = out[:, :kept], exact[:, :kept]
    # Values below the least normal number are rounded, to bfloat16 at most, and others are exact.
    normal = (np.abs(exact) >= 2.0**-126) & (np.abs(exact) < 2.0**128)
    np.testing.assert_array_equal(out[normal], exact[normal])
    small = np.abs(exact) < 2.0**-126
    assert (np.abs(out[small] - exact[small]) <= 2.0**-133).all()
    huge = np.abs(exact) >= 2.0**128
    assert not np.isfinite(out[huge]).any()


@layouts
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_of_a_code_or_scale_reaches_its_column_only(kernel, rhs_first):
    rng = np.random.default_rng(5)
    codes = np.full((256, 64), 0x38, np.uint8)
    codes[77, 3] = 0x7F
    scale = np.full((8, 64), 127, np.uint8)
    scale[5, 9] = 255
    spec = matrices("bfloat16", E4M3, 70, 256, 64, rhs_first=rhs_first, rhs_tiles=(1, 32))
    spec = dataclasses.replace(spec, rhs=dataclasses.replace(spec.rhs, scale_exponents=True))
    turn = (lambda x: x) if rhs_first else (lambda x: np.ascontiguousarray(x.T))
    lhs = rng.integers(-3, 4, (70, 256)).astype(ml_dtypes.bfloat16)
    out, _, _ = run(spec, {"lhs": lhs, "rhs": turn(codes), "rhs_scale": turn(scale)}, kernel)
    bad = np.zeros(64, bool)
    bad[[3, 9]] = True
    assert np.isnan(out[:, bad]).all()
    want = lhs.astype(np.float64).sum(1, keepdims=True)
    np.testing.assert_array_equal(out[:, ~bad], np.broadcast_to(want, (70, 62)))


def mx(m, k, n, *, lhs=E4M3, rhs=E4M3, rhs_first=False, batch=0, block=32, seed=6):
    spec = matrices(
        lhs, rhs, m, k, n, batch=batch, rhs_first=rhs_first, lhs_tiles=(1, block),
        rhs_tiles=(1, block),
    )  # fmt: skip
    spec, operands = in_form(spec, draw(seed, spec), "exponents", "lhs")
    return in_form(spec, operands, "exponents", "rhs")


@pytest.mark.parametrize("kernel", ["", "decoded_w8a16", "cublaslt_wide"])
@layouts
@pytest.mark.parametrize("sizes", [(1, 512, 256), (64, 1024, 528), (300, 2048, 512)], ids=str)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2), ("int8", "int8")])
def test_mx_by_mx(pair, sizes, rhs_first, kernel):
    if kernel == "decoded_w8a16" and sizes[0] > 256 and not ON_HOPPER:
        pytest.skip("many rows need Hopper")
    m, k, n = sizes
    spec, operands = mx(m, k, n, lhs=pair[0], rhs=pair[1], rhs_first=rhs_first)
    check(spec, operands, kernel)


@pytest.mark.parametrize("sizes", [(5, 100, 77), (33, 1000, 130)], ids=str)
@pytest.mark.parametrize("batch", [0, 3])
def test_mx_of_odd_sizes_and_batches(batch, sizes):
    check(*mx(*sizes, batch=batch))


def test_the_side_with_fewer_values_is_decoded():
    check(*mx(600, 1024, 32), "decoded_w8a16")


@pytest.mark.parametrize("dtype", ["int8", E4M3])
def test_rows_with_a_scale_each_beside_scales_of_32(dtype):
    tiles = {"lhs_tiles": (1, 1024), "rhs_tiles": (1, 32)}
    spec = matrices(dtype, dtype, 48, 1024, 256, rhs_first=False, **tiles)
    assert check(spec, draw(7, spec)) == "decoded_w8a16"


def as_written(x, w, of_x, of_w):
    return jax.nn.scaled_matmul(x, w, of_x, of_w, preferred_element_type=jnp.float32)


@HOPPER
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_a_scaled_product_of_jax_is_a_call(rows):
    spec, operands = mx(rows, 2048, 2048)
    x, w = (operands[name].view(np.dtype(E4M3))[None] for name in ("lhs", "rhs"))
    of_x, of_w = (operands[f"{name}_scale"].view(E8M0)[None] for name in ("lhs", "rhs"))
    (site,) = jaxfp8.explain(as_written)(x, w, of_x, of_w).matched
    assert site.kernels["cuda"] == "decoded_w8a16"
    out = np.asarray(jax.jit(jaxfp8.rewrite(as_written))(x, w, of_x, of_w))[0]
    oracle.assert_within_bound(spec, operands, out, None, accumulation(spec, "decoded_w8a16"))


@HOPPER
def test_gradients_of_scaled_dot_general_are_calls():
    config = [jax.nn.get_scaled_dot_general_config("mxfp8") for _ in range(3)]
    numbers = (((1,), (1,)), ((), ()))

    def loss(x, w):
        y = jax.nn.scaled_dot_general(x, w, numbers, jnp.float32, configs=config)
        return (y * y).sum()

    keys = jax.random.split(jax.random.key(8), 2)
    x, w = (jax.random.normal(key, (2048, 2048), jnp.bfloat16) for key in keys)
    gradient = jax.grad(loss, (0, 1))
    assert len(jaxfp8.explain(gradient)(x, w).matched) == 3
    found = jax.jit(jaxfp8.rewrite(gradient))(x, w)
    for got, want in zip(found, jax.jit(gradient)(x, w), strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)
