"""Which kernel computes a scaled dot on a platform, as its library says; for reports."""

from __future__ import annotations

from collections.abc import Callable

from jaxfp8._call import canonical, ffi, lowering, xla_products
from jaxfp8._value.spec import ScaledDotSpec

# The version of cuBLASLt that routes on a GPU are asked for.
_CUBLASLT = 130000


def kernel_for(spec: ScaledDotSpec, platform: str) -> str | None:
    """The name of the kernel that computes `spec` on `platform`.

    Args:
      spec: the scaled dot.
      platform: "cpu", "cuda", "rocm" or "tpu".

    Returns:
      None if there is no kernel (`lowering.why_not` says why). "" if there is one, but which one
      depends on a device that is not here. "xla" where the product is left to XLA's.
    """
    platform = {"gpu": "cuda"}.get(platform, platform)
    if lowering.why_not(spec, platform) is not None:
        return None
    route = _ROUTES.get(platform)
    return "" if route is None else route(spec)


def _on_cpu(spec: ScaledDotSpec) -> str:
    return _first(ffi.cpu_paths(spec))


def _on_cuda(spec: ScaledDotSpec) -> str:
    capability = ffi.compute_capability()
    if capability is None or canonical.is_empty(spec):
        return ""
    if xla_products.takes(spec, "", capability):
        return xla_products.NAME
    return _first(ffi.cuda_paths(canonical.canonical(spec).spec, capability, _CUBLASLT))


def _first(paths: dict[str, str] | str) -> str:
    """The first path without a reason against it."""
    if isinstance(paths, str):
        return ""
    return next((name for name, why in paths.items() if not why), "")


# How to ask the library of each platform.
_ROUTES: dict[str, Callable[[ScaledDotSpec], str]] = {"cpu": _on_cpu, "cuda": _on_cuda}
