"""How much scratch memory a scaled dot is given on a GPU.

The call has no allocator of its own: memory from one would be part of a captured CUDA graph after
it has been freed. So the scratch is a result that nobody reads, and its size is chosen before the
device is known. It is what the path can use on the largest device that the kernels are compiled
for. It is a budget as well: with less, a path works in smaller pieces. Hopper keeps the sums of
integers, and of FP8 with up to 256 rows, in registers. These products get less if all devices at
hand are Hopper and the program is not exported.

For a few rows times a weight it is for GPUs without thread block clusters (compute capability below
9.0), where the blocks that share outputs leave partial sums in it: at most a tenth of the weight's
bytes. From 9.0 on they add up in shared memory, and the scratch is not touched, but from 65 rows on
by the Hopper kernel, whose blocks leave a tile's sums each.

ffi/cuda/workspace.cc has the same rule, for callers of the C function `jaxfp8_cuda_workspace`.
"""

from __future__ import annotations

import math

import numpy as np

from jaxfp8._call.gpu import weight_only
from jaxfp8._call.gpu.weight_only import FEW_ROWS, MOST, WeightOnly
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# What NVIDIA recommends for cuBLASLt on Hopper.
_CUBLASLT = 32 << 20
# Decoded weights and accumulators. On an H200 pieces of 97 MiB in all took 1170 us for W8A16 with
# 4096 rows of 14336 x 4096 weights, these take 870.
_SLABS = 256 << 20
# Accumulators where the library is expected to write the output itself.
_SPARE = 64 << 20
# Rounding of each piece to 256 bytes, and counters.
_SMALL = 1 << 20
# Of paths that need none: no result is empty.
_LEAST = 256

# The path that reads FP8 and int8 as lines of the depth, aligned to as many bytes.
_HOPPER = "sm90_gemm"
_ALIGNED = 16
# Beside 16-bit values its blocks share tiles, and leave the sums of one each. It takes so many
# rows, and where those are few, more outputs than so many; so much depth; and bytes on a GPU with
# 132 multiprocessors.
_MANY_ROWS = 65
_FEW_OUTPUTS = 1 << 18
_LEAST_DEPTH = 1024
_SHARED_TILES = 132 * (16 + 4 * 128 * 256)

# The path that computes FP8 in int8, and the name that leads to it (ffi/cuda/route.h). The rules
# below are those of ffi/cuda/kernels/sm80_imma/schedule.cc.
_IN_INT8 = ("sm80_imma", "int8")
_IN_INT8_LEFT = ("int8", "bfloat16", "float16")
_IN_INT8_ROWS = 32
_LONGEST = (2**31 - 1) // 128**2
_MOST_BATCHES = 65535


def workspace_bytes(
    spec: ScaledDotSpec, kernel: str = "", compute_capability: int | None = None
) -> int:
    """Bytes of scratch that a canonical problem can use.

    Args:
      spec: the problem.
      kernel: the name of the path to force; "" for the best one.
      compute_capability: 10 * major + minor of the device, where that is known.
    """
    return max(_LEAST, _wanted(spec, kernel, compute_capability))


def _wanted(spec: ScaledDotSpec, kernel: str, compute_capability: int | None) -> int:
    if kernel == _HOPPER or (
        kernel == "" and compute_capability == 90 and _sums_in_registers(spec)
    ):
        return _for_hopper(spec)
    if kernel in _IN_INT8:
        return _for_int8(spec)
    weights, library = WeightOnly.of(spec), _library_may_take(spec)
    if weights is not None:
        first = weights.rows <= FEW_ROWS or not library
        if kernel == weight_only.NAME:
            return min(_SLABS, weights.scratch())
        if kernel == "" and first:
            shared = compute_capability in (None, 90) and _fills_hopper(spec, weights.rows)
            return max(_for_shared_tiles(spec) if shared else 0, min(_SLABS, weights.scratch()))
    if library and (kernel == "" or kernel.startswith("cublaslt")):
        return _for_library(spec)
    return 0


def _for_hopper(spec: ScaledDotSpec) -> int:
    """Copies of the sides that are not aligned lines of the depth, and sums for zero points.

    Where no path is named, what the paths by cuBLASLt can use is enough for them, but for copies
    of more than 64 MiB, which those make in pieces.
    """
    sides = (spec.lhs, spec.rhs)
    kinds = (dtypes.is_float8, dtypes.is_int8)
    if dtypes.is_eight_bit(spec.lhs.dtype) != dtypes.is_eight_bit(spec.rhs.dtype):
        return _for_shared_tiles(spec)
    if not any(all(kind(side.dtype) for side in sides) for kind in kinds):
        return 0
    end = 0
    for side, other in (sides, sides[::-1]):
        for size in (_lines_copied(side), _lines_summed(side, other)):
            if size:
                end = -(-end // _LEAST) * _LEAST + size
    return end


def _fills_hopper(spec: ScaledDotSpec, rows: int) -> bool:
    few = rows <= FEW_ROWS and math.prod(spec.out_shape) <= _FEW_OUTPUTS
    return rows >= _MANY_ROWS and spec.lhs.depth >= _LEAST_DEPTH and not few


def _for_shared_tiles(spec: ScaledDotSpec) -> int:
    """For the Hopper kernel, where it takes 16-bit values and weights: it reads both in place."""
    values, weights = (spec.lhs, spec.rhs)
    if dtypes.is_eight_bit(values.dtype):
        values, weights = weights, values
    lines = values.contracting[0] == len(values.shape) - 1 and values.depth * 2 % _ALIGNED == 0
    types = values.dtype in ("bfloat16", "float16")
    return _SHARED_TILES if lines and types and weights.shape[-1] % _ALIGNED == 0 else 0


def _sums_in_registers(spec: ScaledDotSpec) -> bool:
    """Whether Hopper is certain to keep sums in registers, where others have them in memory."""
    return _sums_integers_in_registers(spec) or _sums_float8_in_registers(spec)


def _sums_float8_in_registers(spec: ScaledDotSpec) -> bool:
    """FP8 of a few rows: not those that `sm80_w8a16` takes, nor scales of whole tensors alone."""
    sides = (spec.lhs, spec.rhs)
    scaled = [side for side in sides if side.scale]
    return (
        all(dtypes.is_float8(side.dtype) for side in sides)
        and any(side.dtype == "float8_e4m3fn" for side in sides)
        and spec.precision == "default"
        and WeightOnly.of(spec) is None
        and 0 < spec.lhs.shape[spec.lhs.free[0]] <= FEW_ROWS
        and spec.lhs.depth > 0
        and not any(side.scale_varies for side in scaled)
        and any(side.tiles[axis] < side.shape[axis] for side in scaled for axis in side.free)
    )


def _sums_integers_in_registers(spec: ScaledDotSpec) -> bool:
    sides = (spec.lhs, spec.rhs)
    if not all(dtypes.is_int8(side.dtype) for side in sides):
        return False
    wide = any(side.zero_point or side.dtype == "uint8" for side in sides)
    most = (2**31 - 1) // (255 if wide else 128) ** 2
    return (
        np.dtype(spec.epilogue.out_dtype) in dtypes.WIDE_FLOAT
        and not any((side.scale or side.zero_point) and side.scale_varies for side in sides)
        and 0 < spec.lhs.depth <= most
        and math.prod(spec.out_shape) <= MOST
    )


def _lines_copied(side: OperandSpec) -> int:
    if side.contracting[0] == len(side.shape) - 1 and side.depth % _ALIGNED == 0:
        return 0
    return _lines(side) * -(-side.depth // _ALIGNED) * _ALIGNED


def _lines_summed(side: OperandSpec, other: OperandSpec) -> int:
    """An int32 a line, where the other side has zero points and no sums are given."""
    return 4 * _lines(side) if other.zero_point and not side.sums else 0


def _for_int8(spec: ScaledDotSpec) -> int:
    """The int8 codes of the activations, and a scale for each row."""
    values, weights = sides = (spec.lhs, spec.rhs)
    if dtypes.is_float8(values.dtype) and not dtypes.is_float8(weights.dtype):
        values, weights = weights, values
    types = values.dtype in _IN_INT8_LEFT and dtypes.is_float8(weights.dtype)
    scaled = any(side.zero_point or (side.scale and side.scale_varies) for side in sides)
    if not types or scaled or spec.epilogue.out_dtype == "int32" or weights.depth > _LONGEST:
        return 0
    batch, rows = math.prod(spec.out_shape[:-2]), _free(values)
    if rows > _IN_INT8_ROWS or _free(weights) > MOST or batch > _MOST_BATCHES:
        return 0
    lines = rows * max(1, math.prod(values.sizes(values.batch)))
    codes = lines * -(-values.depth // _ALIGNED) * _ALIGNED
    return -(-codes // _LEAST) * _LEAST + 4 * lines


def _free(side: OperandSpec) -> int:
    return side.shape[side.free[0]]


def _library_may_take(spec: ScaledDotSpec) -> bool:
    """Whether a path by cuBLASLt takes the operands' types, on some device."""
    sides = (spec.lhs, spec.rhs)
    if all(dtypes.is_float8(side.dtype) for side in sides):
        return True
    if all(dtypes.is_int8(side.dtype) for side in sides):
        return True
    wide = {side.dtype for side in sides if not dtypes.is_eight_bit(side.dtype)}
    return (
        wide in (set(), {"bfloat16"}, {"float16"})
        and not any(side.zero_point for side in sides)
        and spec.epilogue.out_dtype != "int32"
    )


def _for_library(spec: ScaledDotSpec) -> int:
    """Two packed operands and wide accumulators, or less: it goes over the output in pieces.

    Operands are packed where tensor cores cannot take them as they are, in slabs where they are
    large.
    """
    accumulators = 4 * math.prod(spec.out_shape)
    if dtypes.is_float8(spec.lhs.dtype) and dtypes.is_float8(spec.rhs.dtype):
        accumulators = min(accumulators, _SPARE)
    return _CUBLASLT + min(_SLABS, _packed(spec) + accumulators) + _SMALL


def _packed(spec: ScaledDotSpec) -> int:
    """Bytes of the sides whose depth is padded, or which are decoded to 16 bits."""
    lhs, rhs = spec.lhs, spec.rhs
    mixed = dtypes.is_eight_bit(lhs.dtype) != dtypes.is_eight_bit(rhs.dtype)
    wide = rhs if dtypes.is_eight_bit(lhs.dtype) else lhs
    bound = _SPARE if not mixed or _lines(wide) <= FEW_ROWS else _SLABS
    return min(bound, sum(_copied(side) for side in (lhs, rhs)))


def _copied(side: OperandSpec) -> int:
    width = 2 if dtypes.is_eight_bit(side.dtype) else 0
    return width * _lines(side) * (side.depth + 16)


def _lines(side: OperandSpec) -> int:
    return math.prod(side.shape) // max(side.depth, 1)
