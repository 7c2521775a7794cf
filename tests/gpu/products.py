"""Matrix products on the GPU, each against float64, and how exactly its path accumulates."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import oracle
import specs
from jaxfp8._call.library import ffi
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

# Beyond the bound of float32 sums: how far a sum may be off, as a share of the sum of magnitudes.
# Tensor cores align the terms of one instruction to the largest and cut off what is below: FP8 on
# Hopper keeps 13 bits there, 16-bit types as many as float32 has.
ACCUMULATION = {
    "cublaslt_fp8": 2.0**-10,
    "sm90_gemm": 2.0**-10,
    "sm80_w8a16": 2.0**-21,
    "cublaslt_wide": 2.0**-21,
    "decoded_w8a16": 2.0**-21,
}
# `sm90_gemm` rounds codes times scales of 32 to bfloat16, unless they are powers of two.
ROUNDED_WEIGHTS = 2.0**-8

ON_HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
HOPPER = pytest.mark.skipif(not ON_HOPPER, reason="`sm90_gemm` needs compute capability 9.0")

WIDE = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2")
INT8 = ("int8", "uint8")


def matrices(
    lhs: str,
    rhs: str,
    m: int,
    k: int,
    n: int,
    *,
    batch: int = 0,
    lhs_first: bool = False,
    rhs_first: bool = True,
    lhs_tiles: tuple[int, int] | None = None,
    rhs_tiles: tuple[int, int] | None = None,
    zero_points: bool = False,
    sums: bool = False,
    precision: str = "highest",
    **epilogue,
) -> ScaledDotSpec:
    """[M, K] x [K, N]; `*_first`: the contracted axis comes first. Tiles are (free, depth)."""

    def side(dtype: str, free: int, first: bool, tiles: tuple[int, int] | None) -> OperandSpec:
        lead = 1 if batch else 0
        shape = (k, free) if first else (free, k)
        sizes = (free, k) if tiles is None else tiles
        sizes = sizes[::-1] if first else sizes
        return OperandSpec(
            dtype=dtype,
            shape=(batch,) * lead + shape,
            contracting=(lead + (0 if first else 1),),
            batch=(0,) * lead,
            tiles=(1,) * lead + sizes,
            scale=tiles is not None,
            zero_point=zero_points and dtypes.is_int8(dtype),
            sums=sums and dtypes.is_int8(dtype),
        )

    return ScaledDotSpec(
        lhs=side(lhs, m, lhs_first, lhs_tiles),
        rhs=side(rhs, n, rhs_first, rhs_tiles),
        epilogue=EpilogueSpec(**{"out_dtype": "float32", **epilogue}),
        precision=precision,
    )


def with_zeros(spec: ScaledDotSpec, zeros: str) -> ScaledDotSpec:
    """The same product with zero points on the sides named."""
    made = {s: dataclasses.replace(getattr(spec, s), zero_point=s in zeros) for s in ("lhs", "rhs")}
    return dataclasses.replace(spec, **made)


def in_form(
    spec: ScaledDotSpec, operands: dict[str, np.ndarray], form: str, side: str = "rhs"
) -> tuple[ScaledDotSpec, dict[str, np.ndarray]]:
    """The problem with scales of a side in 16 bits, in float32 to be rounded, or as exponents."""
    name = f"{side}_scale"
    if form == "exponents":
        codes = np.round(np.log2(operands[name])).astype(np.int64) + 127
        powers = dataclasses.replace(getattr(spec, side), scale_exponents=True)
        return dataclasses.replace(spec, **{side: powers}), operands | {
            name: codes.astype(np.uint8)
        }
    if form != "rounded":
        return spec, operands | {name: operands[name].astype(np.dtype(form))}
    rounding = dataclasses.replace(getattr(spec, side), scale_rounded=True)
    return dataclasses.replace(spec, **{side: rounding}), operands


def run(spec: ScaledDotSpec, operands: dict[str, np.ndarray], kernel: str = ""):
    """Output, amax and the path that computed them."""
    before = ffi.kernel_calls("cuda")
    out, amax = scaled_dot(
        spec, **{n: jax.numpy.asarray(x) for n, x in operands.items()}, kernel=kernel
    )
    out = np.asarray(out)
    after = ffi.kernel_calls("cuda")
    ran = [name for name in after if after[name] > before[name]]
    return out, None if amax is None else np.asarray(amax), ran


def check(spec: ScaledDotSpec, operands: dict[str, np.ndarray], kernel: str = "") -> str:
    """Runs a product, compares it with float64, and returns the path that computed it."""
    out, amax, ran = run(spec, operands, kernel)
    assert len(ran) == (0 not in spec.lhs.shape + spec.rhs.shape)
    path = ran[0] if ran else ""
    oracle.assert_within_bound(spec, operands, out, amax, accumulation(spec, path))
    return path


def accumulation(spec: ScaledDotSpec, path: str) -> float:
    """How far sums of a path may be off: not at all for int8, and FP8's is Hopper's alone."""
    sides = (spec.lhs.dtype, spec.rhs.dtype)
    if path in ("sm90_gemm", "decoded_w8a16") and any(map(_is_rounded, (spec.lhs, spec.rhs))):
        return ROUNDED_WEIGHTS
    if all(map(dtypes.is_int8, sides)) and path != "decoded_w8a16":
        return 0.0
    of_wide = path == "sm90_gemm" and not all(map(dtypes.is_eight_bit, sides))
    return ACCUMULATION.get("sm80_w8a16" if of_wide else path, 0.0)


def _is_rounded(side: OperandSpec) -> bool:
    if not side.contracting or not dtypes.is_eight_bit(side.dtype):
        return False
    finest = side.tiles[side.contracting[0]] == 32
    return side.scale_varies and finest and not side.scale_exponents


def draw(seed: int, spec: ScaledDotSpec) -> dict[str, np.ndarray]:
    """Operands of a spec."""
    return specs.draw_operands(np.random.default_rng(seed), spec)
