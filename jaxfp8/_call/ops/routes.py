"""Routes: the library's kernel for a scaled dot on a platform."""

from __future__ import annotations

from jaxfp8._call.gpu import asked, canonical, xla_products
from jaxfp8._call.library import ffi, targets
from jaxfp8._call.ops import lowering
from jaxfp8._value.spec import ScaledDotSpec


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
