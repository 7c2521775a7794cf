"""What the CUDA library says of a canonical product: who reads its weights, and its scratch.

`route.cc`, `workspace.cc` and the schedules of kernels in ffi/cuda decide. This asks them, and
needs no GPU. A machine that lowers a program for GPUs may lack the library. The program then gets
the plain form, which every path takes: the usual layout, scales in float32, a launch for each
product, and scratch by one bound.

The call has no allocator of its own: memory from one would be part of a captured CUDA graph after
it has been freed. Its scratch is a result that nobody reads. The size is a budget: with less, a
path works in smaller pieces.
"""

from __future__ import annotations

import ctypes
import functools
import math

from jaxfp8._call.library import abi, ffi
from jaxfp8._value import dtypes, errors
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# The path of values and 8-bit weights. The values have 16 bits, or few rows of e4m3 beside FP8.
WEIGHT_ONLY = "sm80_w8a16"
# The first path on the oldest GPU is the first on every GPU, or reads weights as it does.
_OLDEST_GPU, _HOPPER = 80, 90
# The assumed version of cuBLASLt for routes on a machine without a GPU.
CUBLASLT = 130000

# Without the library: cuBLASLt's own scratch, and the most for decoded operands and accumulators.
_FOR_CUBLASLT, _MOST = 33 << 20, 256 << 20


def weights_of(form: ScaledDotSpec, kernel: str = "") -> str | None:
    """The side that `sm80_w8a16` reads as stored, on whatever GPU the product runs.

    Args:
      form: the canonical product.
      kernel: the path that is asked for; "" for the best.

    Returns:
      "lhs" or "rhs"; None if another path may compute the product, or the library is missing.
    """
    if kernel not in ("", WEIGHT_ONLY):
        return None
    paths = _paths(ffi.library_or_none("cuda"), form)
    able = [name for name, why in paths.items() if not why]
    if WEIGHT_ONLY not in (able if kernel else able[:1]):
        return None
    return "lhs" if _are_weights_left(form) else "rhs"


def reads_exponents(form: ScaledDotSpec, kernel: str = "") -> bool:
    """Whether the path of a canonical product takes the exponents of its scales as bytes.

    On the oldest GPU, or, if a path is asked for, on one that has it.
    """
    library = ffi.library_or_none("cuda")
    gpus = (_OLDEST_GPU, _HOPPER) if kernel else (_OLDEST_GPU,)
    paths = [item for gpu in gpus for item in _paths(library, form, gpu).items()]
    return any(not why for name, why in paths if kernel in ("", name))


def rows_beside(weights: str, form: ScaledDotSpec) -> int:
    """The rows of values beside weights: the lines of the other side of a canonical product."""
    return lines(form.rhs if weights == "lhs" else form.lhs)


def workspace_bytes(
    form: ScaledDotSpec, kernel: str = "", compute_capability: int | None = None
) -> int:
    """Bytes of scratch that a canonical product can use.

    Args:
      form: the product.
      kernel: the path that is asked for; "" for the best.
      compute_capability: 10 * major + minor of all devices; None if they are not known.
    """
    return _workspace(ffi.library_or_none("cuda"), form, kernel, compute_capability or 0)


@functools.lru_cache(maxsize=4096)
def _paths(
    library: ctypes.CDLL | None, form: ScaledDotSpec, compute_capability: int = _OLDEST_GPU
) -> dict[str, str]:
    if library is None:
        return {}
    paths = ffi.cuda_paths(form, compute_capability, CUBLASLT)
    return {} if isinstance(paths, str) else paths


@functools.lru_cache(maxsize=4096)
def _workspace(
    library: ctypes.CDLL | None, form: ScaledDotSpec, kernel: str, compute_capability: int
) -> int:
    if library is None:
        values = math.prod(form.lhs.shape) + math.prod(form.rhs.shape)
        return _FOR_CUBLASLT + min(_MOST, 2 * values + 4 * math.prod(form.out_shape))
    size = ctypes.c_size_t()
    asked = abi.Spec.of(form, kernel), compute_capability, ctypes.byref(size)
    status, text = abi.call(library, "jaxfp8_cuda_workspace", *asked)
    if status:
        raise errors.LibraryError(f"the CUDA library refuses {form.told()}: {text}.")
    return size.value


def _are_weights_left(form: ScaledDotSpec) -> bool:
    """Of two 8-bit sides the one with more lines is the weights."""
    if not dtypes.is_eight_bit(form.lhs.dtype):
        return False
    return not dtypes.is_eight_bit(form.rhs.dtype) or lines(form.lhs) > lines(form.rhs)


def lines(side: OperandSpec) -> int:
    """The number of lines of the contracted axis."""
    return math.prod(side.sizes(side.free))
