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
# Decoded weights and accumulators. On an H200 pieces of 97 MiB in all took 1170 us for W8A16 with
# 4096 rows of 14336 x 4096 weights, these take 870.
_SLABS = 256 << 20
# Accumulators where the library is expected to write the output itself.
_SPARE = 64 << 20
# Up to so many rows weights are multiplied as they are stored, and seldom decoded.
_FEW_ROWS = 256
# Rounding of each piece to 256 bytes, and counters.
_SMALL = 1 << 20


def workspace_bytes(spec: ScaledDotSpec) -> int:
    """Bytes of scratch for a canonical problem: two packed operands and wide accumulators, or less.

    Operands are packed where tensor cores cannot take them as they are, in slabs where they are
    large. The C function `jaxfp8_cuda_workspace` follows the same rule.
    """
    accumulators = 4 * math.prod(spec.out_shape)
    if _dtypes.is_float8(spec.lhs.dtype) and _dtypes.is_float8(spec.rhs.dtype):
        accumulators = min(accumulators, _SPARE)
    return _CUBLASLT + min(_SLABS, _packed(spec) + accumulators) + _SMALL


def _packed(spec: ScaledDotSpec) -> int:
    """Bytes of the sides whose depth is padded, or which are decoded to 16 bits."""
    lhs, rhs = spec.lhs, spec.rhs
    mixed = _dtypes.is_eight_bit(lhs.dtype) != _dtypes.is_eight_bit(rhs.dtype)
    wide = rhs if _dtypes.is_eight_bit(lhs.dtype) else lhs
    bound = _SPARE if not mixed or _lines(wide) <= _FEW_ROWS else _SLABS
    return min(bound, sum(_copied(side) for side in (lhs, rhs)))


def _copied(side: OperandSpec) -> int:
    width = 2 if _dtypes.is_eight_bit(side.dtype) else 0
    return width * _lines(side) * (_depth(side) + 16)


def _depth(side: OperandSpec) -> int:
    return math.prod(side.sizes(side.contracting))


def _lines(side: OperandSpec) -> int:
    return math.prod(side.shape) // max(_depth(side), 1)
