"""Why a scaled dot has no kernel on a platform, as a sentence."""

from __future__ import annotations

from jaxfp8._value import dtypes
from jaxfp8._value.spec import ScaledDotSpec, is_known

# The platforms with kernels. Others compute `_call/reference` through XLA.
_WITHOUT_KERNELS = {
    "rocm": "there are no ROCm kernels",
    "tpu": "there are no TPU kernels",
}
_OLDEST_GPU = 80
KERNEL_PLATFORMS = ("cpu", "cuda")


def why_unsupported(spec: ScaledDotSpec, platform: str) -> str | None:
    """Says why no kernel of `platform` takes `spec`, as a clause; None if one does.

    Libraries that fail to load have their reason in `jaxfp8._call.library.ffi.why_unavailable`.
    """
    platform = {"gpu": "cuda"}.get(platform, platform)
    if platform not in KERNEL_PLATFORMS:
        return _WITHOUT_KERNELS.get(platform, f"there are no kernels for platform {platform!r}")
    if not any(dtypes.is_eight_bit(side.dtype) for side in (spec.lhs, spec.rhs)):
        return "neither operand is 8-bit"
    if not is_known(spec.lhs.shape + spec.rhs.shape):
        return "its sizes are not known when the program is lowered"
    return None


def why_too_old(compute_capability: int) -> str | None:
    """Says why an NVIDIA GPU of `10 * major + minor` has no kernels, or None if it has."""
    if compute_capability >= _OLDEST_GPU:
        return None
    major, minor = divmod(compute_capability, 10)
    return f"the GPU is of compute capability {major}.{minor}, and the kernels need 8.0 or later"
