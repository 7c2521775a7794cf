"""How much scratch memory a scaled dot is given on a GPU.

The call has no allocator of its own: memory from one would be part of a captured CUDA graph after
it has been freed. So the scratch is a result that nobody uses, and its size is settled before the
device is known. It is a budget: a path that could use more goes over the output in slabs.
"""

from __future__ import annotations

import math

from jaxfp8 import _dtypes
from jaxfp8._spec import OperandSpec, ScaledDotSpec

# What NVIDIA recommends for cuBLASLt on Hopper.
_CUBLASLT = 32 << 20
# Larger slabs gain nothing: this is more than the L2 cache of any device so far.
_SLABS = 64 << 20
# Rounding of each piece to 256 bytes, and counters.
_SMALL = 1 << 20


def workspace_bytes(spec: ScaledDotSpec) -> int:
    """Bytes of scratch for a canonical problem: two packed operands and wide accumulators, or less.

    Operands are packed where tensor cores cannot take them as they are, in slabs where they are
    large.
    """
    accumulators = 4 * math.prod(spec.out_shape)
    packed = _packed(spec.lhs) + _packed(spec.rhs)
    return _CUBLASLT + min(_SLABS, packed + accumulators) + _SMALL


def _packed(side: OperandSpec) -> int:
    """Bytes of a side whose depth is padded; 8-bit values may be decoded to 16 bits."""
    depth = math.prod(side.sizes(side.contracting))
    lines = math.prod(side.shape) // max(depth, 1)
    width = 2 if _dtypes.is_eight_bit(side.dtype) else 0
    return width * lines * (depth + 16)
