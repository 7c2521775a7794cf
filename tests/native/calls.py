"""Calls of the FFI target itself, without the package's own primitive."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxfp8._call.library import ffi
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

TARGET = "jaxfp8_scaled_dot"


def side(dtype: str, shape: tuple[int, ...], contracting: tuple[int, ...], **more) -> OperandSpec:
    """A side of a product; `tiles` default to one tile for the whole array."""
    tiles = more.pop("tiles", tuple(max(size, 1) for size in shape))
    given = {"batch": (), "scale": False, "zero_point": False, **more}
    return OperandSpec(dtype=dtype, shape=shape, contracting=contracting, tiles=tiles, **given)


def matrices(lhs_dtype: str, rhs_dtype: str, m: int, k: int, n: int, out: str = "float32", **more):
    """A plain [M, K] x [K, N] product without scales."""
    return ScaledDotSpec(
        lhs=side(lhs_dtype, (m, k), (1,)),
        rhs=side(rhs_dtype, (k, n), (0,)),
        epilogue=EpilogueSpec(out_dtype=out, **more),
    )


def results_of(spec: ScaledDotSpec) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what the call returns."""
    out = [jax.ShapeDtypeStruct(spec.out_shape, dtypes.storage(spec.epilogue.out_dtype))]
    if spec.epilogue.amax is not None:
        out.append(jax.ShapeDtypeStruct(spec.epilogue.amax, np.float32))
    return out


def call(spec: ScaledDotSpec, *operands, kernel: str = "", **attributes) -> list[np.ndarray]:
    """The results of one call; `attributes` replace those of the spec."""
    ffi.ensure_registered("cpu")
    function = jax.ffi.ffi_call(TARGET, results_of(spec))
    given = {**spec.attributes(), "kernel": kernel, **attributes}
    return [np.asarray(array) for array in function(*operands, **given)]


def call_named(spec: ScaledDotSpec, operands: dict, kernel: str = "") -> list[np.ndarray]:
    """The results of one call whose operands are given by name."""
    return call(spec, *(operands[name] for name in spec.operand_names()), kernel=kernel)


def takes(kernel: str, spec: ScaledDotSpec) -> bool:
    """Whether a kernel can compute a spec at all, by the rules of docs/custom_call.md."""
    sides = (spec.lhs, spec.rhs)
    if kernel.endswith(("_int8", "_vnni")):
        return all(dtypes.is_int8(side.dtype) for side in sides)
    if spec.epilogue.out_dtype == "int32":
        return False
    if kernel.endswith("_bf16"):
        narrow = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
        return all(side.dtype in narrow and not side.zero_point for side in sides)
    return True


def replace_epilogue(spec: ScaledDotSpec, **changes) -> ScaledDotSpec:
    """The spec with another epilogue."""
    return dataclasses.replace(spec, epilogue=dataclasses.replace(spec.epilogue, **changes))
