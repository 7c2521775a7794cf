"""Routes: the library's kernel for a scaled dot on a platform, and whether it pays."""

from __future__ import annotations

from typing import NamedTuple

from jaxfp8._call.gpu import asked, canonical, xla_products
from jaxfp8._call.library import ffi, targets
from jaxfp8._call.ops import lowering
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# Up to so many rows `sm80_w8a16` reads 8-bit weights sooner than they are decoded.
_FEW_ROWS = 256
_BLACKWELL = 100
_GENERAL, _BY_CUBLASLT = "general", "cublaslt_"
_CONSTANT_SCALES = "use scales that are constant along the contracted axis, or leave it to XLA here"


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
    if not path or path == xla_products.NAME:
        return None
    form = lowering.as_gpus_read_it(spec)
    if path == _GENERAL:
        return _without_tensor_cores(form)
    if path.startswith(_BY_CUBLASLT):
        return _in_pieces(form, path) or _without_mx(form, path)
    return _decoded_for_many_rows(form) if path == asked.WEIGHT_ONLY else None


def _without_tensor_cores(form: ScaledDotSpec) -> Slower:
    remedy = "leave it to XLA here"
    if "float32" in (form.lhs.dtype, form.rhs.dtype):
        remedy = "convert the float32 operand to bfloat16, or leave it to XLA here"
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
    return Slower(_reason(path, "decodes both sides"), "leave it to XLA here")


def _decoded_for_many_rows(form: ScaledDotSpec) -> Slower | None:
    """With 256 rows it was level with decoding the weight first; each 64 rows decode it again."""
    weights = asked.weights_of(form, asked.WEIGHT_ONLY)
    rows = 0 if weights is None else asked.rows_beside(weights, form)
    if rows <= _FEW_ROWS:
        return None
    does = f"is for up to {_FEW_ROWS} rows, and these are {rows}"
    return Slower(_reason(asked.WEIGHT_ONLY, does), "leave it to XLA here, or give it fewer rows")


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
