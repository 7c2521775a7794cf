"""How much scratch memory a scaled dot is given on a GPU.

The call has no allocator of its own: memory from one would be part of a captured CUDA graph after
it has been freed. So the scratch is a result that nobody reads, and its size is chosen before the
device is known. It is what the path can use on the largest device that the kernels are compiled
for. It is a budget as well: with less, a path works in smaller pieces.

For a few rows times a weight it is for GPUs without thread block clusters (compute capability below
9.0), where the blocks that share outputs leave partial sums in it: at most a tenth of the weight's
bytes. From 9.0 on they add up in shared memory, and the scratch is not touched.

ffi/cuda/workspace.cc has the same rule, for callers of the C function `jaxfp8_cuda_workspace`.
"""

from __future__ import annotations

import dataclasses
import math

from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# What NVIDIA recommends for cuBLASLt on Hopper.
_CUBLASLT = 32 << 20
# Decoded weights and accumulators. On an H200 pieces of 97 MiB in all took 1170 us for W8A16 with
# 4096 rows of 14336 x 4096 weights, these take 870.
_SLABS = 256 << 20
# Accumulators where the library is expected to write the output itself.
_SPARE = 64 << 20
# Up to this many rows weights are multiplied as they are stored, and seldom decoded.
_FEW_ROWS = 256
# Rounding of each piece to 256 bytes, and counters.
_SMALL = 1 << 20
# Of paths that need none: no result is empty.
_LEAST = 256

# The path that reads FP8 as lines of the depth, aligned to as many bytes.
_HOPPER = "sm90_gemm"
_ALIGNED = 16

# The path that computes FP8 in int8, as in ffi/cuda/kernels/sm80_imma/schedule.cc: the types of its
# other side, the most rows of a piece's tile, the columns that a row of sums is padded to, and the
# largest depth and batch.
_IN_INT8 = "sm80_imma"
_IN_INT8_LEFT = ("int8", "float8_e4m3fn", "bfloat16", "float16")
_TILE_ROWS = 64
_PADDED = 8
_LONGEST = (2**31 - 1) // 128**2
_MOST_BATCHES = 65535

# The sizes of `sm80_w8a16`, as in ffi/cuda/kernels/sm80_w8a16/{schedule,layout}.h: tiles of 128
# columns and 128 depths, by 8 to 64 rows; blocks that are on the largest device without clusters
# at a time, and that share an output at most; tiles of the depth that a block has at least; and
# sizes that it counts in 32 bits.
_FUSED = "sm80_w8a16"
_TILE = 128
_BLOCKS = 3 * 128
_MOST_SHARING = 8
_FEWEST_STEPS = 2
_SHARE_OF_WEIGHT = 10
_MOST = (2**31 - 1) // 2


def workspace_bytes(spec: ScaledDotSpec, kernel: str = "") -> int:
    """Bytes of scratch that a canonical problem can use.

    Args:
      spec: the problem.
      kernel: the name of the path to force; "" for the best one.
    """
    return max(_LEAST, _wanted(spec, kernel))


def _wanted(spec: ScaledDotSpec, kernel: str) -> int:
    if kernel == _HOPPER:
        return _for_hopper(spec)
    if kernel == _IN_INT8:
        return _for_int8(spec)
    weights, library = _Weights.of(spec), _library_may_take(spec)
    if weights is not None:
        first = weights.rows <= _FEW_ROWS or not library
        if kernel == _FUSED or (kernel == "" and first):
            return min(_SLABS, weights.scratch())
    if library and (kernel == "" or kernel.startswith("cublaslt")):
        return _for_library(spec)
    return 0


def _for_hopper(spec: ScaledDotSpec) -> int:
    """Copies of the sides that are not aligned lines of the depth.

    Where no path is named, what the paths by cuBLASLt can use is enough for them, but for copies
    of more than 64 MiB, which those make in pieces.
    """
    sides = (spec.lhs, spec.rhs)
    if not all(dtypes.is_float8(side.dtype) for side in sides):
        return 0
    lhs, rhs = (_lines_copied(side) for side in sides)
    return -(-lhs // _LEAST) * _LEAST + rhs


def _lines_copied(side: OperandSpec) -> int:
    depth = _depth(side)
    if side.contracting[0] == len(side.shape) - 1 and depth % _ALIGNED == 0:
        return 0
    return _lines(side) * -(-depth // _ALIGNED) * _ALIGNED


def _for_int8(spec: ScaledDotSpec) -> int:
    """A step and a scale for each line that becomes int8, and a sum for each output of a piece."""
    values, weights = sides = (spec.lhs, spec.rhs)
    if dtypes.is_float8(values.dtype) and not dtypes.is_float8(weights.dtype):
        values, weights = weights, values
    types = values.dtype in _IN_INT8_LEFT and dtypes.is_float8(weights.dtype)
    scaled = any(side.zero_point or (side.scale and _varies(side)) for side in sides)
    if not types or scaled or spec.epilogue.out_dtype == "int32" or _depth(weights) > _LONGEST:
        return 0
    batch, rows, columns = math.prod(spec.out_shape[:-2]), _free(values), _free(weights)
    tiles = -(-rows // 16) * max(1, -(-columns // _TILE))
    if max(rows, columns) > _MOST - _PADDED or batch > _MOST_BATCHES or tiles > _MOST:
        return 0
    scales = 2 * sum(
        -(-4 * max(1, math.prod(side.sizes(side.batch))) * _free(side) // _LEAST) * _LEAST
        for side in sides
        if side.dtype != "int8"
    )
    row = 4 * -(-columns // _PADDED) * _PADDED
    least, best = min(rows, _TILE_ROWS) * row, batch * rows * row
    return scales + min(best, max(least, _SLABS - scales))


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
    bound = _SPARE if not mixed or _lines(wide) <= _FEW_ROWS else _SLABS
    return min(bound, sum(_copied(side) for side in (lhs, rhs)))


def _copied(side: OperandSpec) -> int:
    width = 2 if dtypes.is_eight_bit(side.dtype) else 0
    return width * _lines(side) * (_depth(side) + 16)


def _depth(side: OperandSpec) -> int:
    return math.prod(side.sizes(side.contracting))


def _lines(side: OperandSpec) -> int:
    return math.prod(side.shape) // max(_depth(side), 1)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """A product that `sm80_w8a16` takes: 16-bit values by 8-bit weights.

    Attributes:
      batch: of the output.
      stored: bytes of the weights.
      rows: of values; `columns` of weights.
      depth: that is summed over.
      folded: whether accumulators are scaled along the depth, which halves the largest tile.
    """

    batch: int
    stored: int
    rows: int
    columns: int
    depth: int
    folded: bool

    @classmethod
    def of(cls, spec: ScaledDotSpec) -> _Weights | None:
        """None where the kernel does not take it."""
        sides = (spec.lhs, spec.rhs)
        values, weights = sides[::-1] if dtypes.is_eight_bit(spec.lhs.dtype) else sides
        types = values.dtype in ("bfloat16", "float16") and dtypes.is_eight_bit(weights.dtype)
        if not types or spec.epilogue.out_dtype == "int32" or values.zero_point:
            return None
        scaled = weights.scale or weights.zero_point
        folded = scaled and _varies(weights)
        if values.scale and _varies(values):
            return None
        if folded and weights.tiles[weights.contracting[0]] % _TILE != 0:
            return None
        made = cls(
            batch=math.prod(spec.out_shape[:-2]),
            stored=math.prod(weights.shape),
            rows=values.shape[values.free[0]],
            columns=weights.shape[weights.free[0]],
            depth=_depth(weights),
            folded=folded,
        )
        return made if made._is_countable() else None

    def scratch(self) -> int:
        """Sums of every block, where several blocks share an output."""
        outputs, sums = max(1, self._outputs()), 4 * min(self.rows, self._tile()) * _TILE
        room = self.stored // _SHARE_OF_WEIGHT // outputs // max(1, sums)
        steps = self._depth_tiles() // _FEWEST_STEPS
        sharing = min(_MOST_SHARING, _BLOCKS // outputs, steps, room)
        return sharing * outputs * sums if sharing > 1 else 0

    def _tile(self) -> int:
        tile, most = 8, 32 if self.folded else 64
        while tile < most and self.rows > tile:
            tile *= 2
        return tile

    def _row_tiles(self) -> int:
        return -(-self.rows // self._tile())

    def _depth_tiles(self) -> int:
        return -(-self.depth // _TILE)

    def _outputs(self) -> int:
        return self.batch * self._row_tiles() * -(-self.columns // _TILE)

    def _is_countable(self) -> bool:
        sizes = (self.batch, self.rows, self.columns, self.depth, self._outputs())
        return max(sizes) <= _MOST and self._depth_tiles() <= _MOST // max(1, self._outputs())


def _varies(side: OperandSpec) -> bool:
    """Whether there is more than one tile along the depth."""
    return math.prod(side.scale_shape[axis] for axis in side.contracting) > 1
