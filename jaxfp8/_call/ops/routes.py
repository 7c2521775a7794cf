"""Routes: the library's kernel for a scaled dot on a platform, and whether it pays."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxfp8._call.gpu import asked, canonical, xla_products
from jaxfp8._call.library import ffi, targets
from jaxfp8._call.ops import lowering
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# Up to so many rows `sm80_w8a16` reads 8-bit weights sooner than they are decoded.
_FEW_ROWS = 256
# The same for weights decoded in registers, where their scales change along K.
_MOST_DECODED = 512
# So many stored values save less than a call costs, where XLA's program has scales along K.
_MOST_SMALL = 5 << 19
# So many rows are multiplied in float32 as soon as in TF32.
_MOST_IN_FLOAT32 = 16
_SHIFTED = "makes the sums of zero points in each of a batch"
_BLACKWELL = 100
_GENERAL, _BY_CUBLASLT = "general", "cublaslt_"
_LEAVE = "leave it to XLA here"
_CONSTANT_SCALES = f"use scales that are constant along the contracted axis, or {_LEAVE}"


def kernel_for(spec: ScaledDotSpec, platform: str) -> str | None:
    """The name of the kernel for `spec` on `platform`; "xla" if the product is left to XLA.

    None if there is no kernel; "" if the choice depends on an absent device.
    """
    platform = {"gpu": "cuda"}.get(platform, platform)
    if lowering.why_not(spec, platform) is not None:
        return None
    if platform == "cuda":
        return _on_cuda(spec)
    return _first(ffi.cpu_paths(spec)) if platform == "cpu" else ""


class Slower(NamedTuple):
    """Why XLA's program for a product is faster than the kernel, and a remedy."""

    reason: str
    remedy: str


def slower_than_xla(spec: ScaledDotSpec, platform: str) -> Slower | None:
    """Why XLA multiplies dequantised values sooner than the kernel multiplies 8-bit data.

    The answer is for the target: the GPU at hand, unless another is named. None if the kernel is at
    least as fast, without a kernel, and without a known GPU.
    """
    if {"gpu": "cuda"}.get(platform, platform) != "cuda":
        return None
    path = kernel_for(spec, platform)
    if not path:
        return None
    form = lowering.as_gpus_read_it(spec)
    if path == xla_products.NAME:
        return _kept_in_float32(form)
    if path == _GENERAL:
        return _without_tensor_cores(form)
    if path.startswith(_BY_CUBLASLT):
        slower = _in_pieces(form, path) or _without_mx(form, path)
    else:
        slower = _decoded_for_many_rows(form, path)
    return slower or _too_small(form, path)


def _kept_in_float32(form: ScaledDotSpec) -> Slower | None:
    """On an H200 8192 x 1536 x 384 took 268 us beside XLA's 72, and 48 x 768 x 768 13 beside 9."""
    if (
        "float32" not in (form.lhs.dtype, form.rhs.dtype)
        or min(asked.lines(form.lhs), asked.lines(form.rhs)) <= _MOST_IN_FLOAT32
    ):
        return None
    why = "XLA's program is faster on this GPU: it rounds float32 to TF32, and the product does not"
    return Slower(why, f"convert the float32 operand to bfloat16, or {_LEAVE}")


def _too_small(form: ScaledDotSpec, path: str) -> Slower | None:
    """On an H200 64 x 3072 x 768 with zero points took 31 us beside XLA's 17.

    128 x 768 x 3072 in groups of 128 took 18 beside 13. `xla_products` has the products without
    either, and like there other GPUs keep the call. So do batches, but for those with zero points:
    8 rows by 8 weights of 1024 x 8192 took 39 beside 28.
    """
    if targets.compute_capability() != xla_products.MEASURED_ON:
        return None
    sides = [side for side in (form.lhs, form.rhs) if dtypes.is_eight_bit(side.dtype)]
    if math.prod(form.lhs.sizes(form.lhs.batch)) > 1:
        shifted = path == asked.WEIGHT_ONLY and any(side.zero_point for side in sides)
        return Slower(_reason(path, _SHIFTED), _LEAVE) if shifted else None
    if not any(_varies(side) or side.zero_point for side in sides):
        return None
    stored = max(math.prod(side.shape) for side in sides)
    if stored > _MOST_SMALL:
        return None
    return Slower(_reason(path, f"is a call of its own, and {stored} values save less"), _LEAVE)


def _without_tensor_cores(form: ScaledDotSpec) -> Slower:
    remedy = _LEAVE
    if "float32" in (form.lhs.dtype, form.rhs.dtype):
        remedy = f"convert the float32 operand to bfloat16, or {_LEAVE}"
    elif _varies(form.lhs) or _varies(form.rhs):
        remedy = _CONSTANT_SCALES
    return Slower(_reason(_GENERAL, "has no tensor cores"), remedy)


def _in_pieces(form: ScaledDotSpec, path: str) -> Slower | None:
    """The library multiplies the values of one scale; a kernel adds the products up in memory.

    On an H100 int8 in groups of 128 took 3.4 ms for 4096^3, and XLA's program 0.26. Every GPU
    passes the sums through memory once for each piece. Exponents are folded into codes instead.
    """
    sides = [side for side in (form.lhs, form.rhs) if not side.scale_exponents]
    tiles = [side.tiles[side.contracting[0]] for side in sides if _varies(side)]
    if not tiles:
        return None
    does = f"multiplies every {min(tiles)} values of the contracted axis by themselves"
    return Slower(_reason(path, does), _CONSTANT_SCALES)


def _without_mx(form: ScaledDotSpec, path: str) -> Slower | None:
    """From Blackwell on cuDNN multiplies blocks of 32 as they are. Not measured."""
    both = form.lhs.scale_exponents and form.rhs.scale_exponents
    if not both or (targets.compute_capability() or 0) < _BLACKWELL:
        return None
    return Slower(_reason(path, "decodes both sides"), _LEAVE)


def _decoded_for_many_rows(form: ScaledDotSpec, path: str) -> Slower | None:
    """With 256 rows `sm80_w8a16` was level with decoding first; each 64 rows decode again.

    `sm90_gemm` took 90 us for 256 rows of 14336 x 4096 with scales of 32, and XLA's program 150;
    with 4096 rows it took 979 and XLA 688. With 1024 rows and blocks of 128 XLA was 1.08x faster.
    """
    for wide, held in ((form.lhs, form.rhs), (form.rhs, form.lhs)):
        if dtypes.is_eight_bit(wide.dtype):
            continue
        if path != asked.WEIGHT_ONLY and not _varies(held):
            return None
        most = _FEW_ROWS if path == asked.WEIGHT_ONLY else _MOST_DECODED
        rows = asked.lines(wide)
        if rows > most:
            does = f"is for up to {most} rows, and these are {rows}"
            return Slower(_reason(path, does), f"{_LEAVE}, or give it fewer rows")
    return None


def _reason(path: str, does: str) -> str:
    return f"XLA's program is faster on this GPU: the kernel for it, `{path}`, {does}"


def _varies(side: OperandSpec) -> bool:
    return (side.scale or side.zero_point) and side.scale_varies


def _on_cuda(spec: ScaledDotSpec) -> str:
    capability = targets.compute_capability()
    if capability is None or canonical.is_empty(spec):
        return ""
    if xla_products.takes(spec, "", capability):
        return xla_products.NAME
    version = ffi.cublaslt()[1] if ffi.has_backend("cuda") else asked.CUBLASLT
    return path_on(spec, capability, version)


def path_on(spec: ScaledDotSpec, compute_capability: int, cublaslt_version: int) -> str:
    """The path of the CUDA library for a nonempty problem; "" for none. Needs no GPU."""
    form = lowering.as_gpus_read_it(spec)
    return _first(ffi.cuda_paths(form, compute_capability, cublaslt_version))


def _first(paths: dict[str, str] | str) -> str:
    """The first path without a reason against it."""
    if isinstance(paths, str):
        return ""
    return next((name for name, why in paths.items() if not why), "")
