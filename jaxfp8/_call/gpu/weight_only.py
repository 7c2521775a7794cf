"""The path `sm80_w8a16`: which products of values and 8-bit weights it computes, and how.

The values have 16 bits. Up to 16 rows they may be e4m3, beside FP8.

ffi/cuda/kernels/sm80_w8a16/schedule.cc has the same rules.
"""

from __future__ import annotations

import dataclasses
import math

from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

NAME = "sm80_w8a16"
# Up to this many rows weights are multiplied as they are stored, and seldom decoded.
FEW_ROWS = 256
# The same for values of e4m3, of which it takes no more.
FEW_FLOAT8_ROWS = 16
# Up to so many rows, which are one tile or two, weights are read in whatever order their axes are
# stored. With more, each tile reads them again, and paths with larger tiles need the usual order.
_ROWS_IN_PLACE = 64
# Nor with a larger batch: its outer axis is one of the grid.
_BATCH_IN_PLACE = 65535
# Tiles of 128 columns and 128 depths, by 8 to 64 rows; and sizes that are counted in 32 bits.
TILE = 128
MOST = (2**31 - 1) // 2
# How far the scale of a column may lie from that of the first, which is counted in 32 bits.
_MOST_SCALES = 2**31 - 1

# How many blocks run at once on the largest GPU without clusters; and how many may share an output.
_BLOCKS = 3 * 128
_MOST_SHARING = 8
_SHARE_OF_WEIGHT = 10


@dataclasses.dataclass(frozen=True)
class WeightOnly:
    """A canonical product that the path takes: values by 8-bit weights.

    Attributes:
      weights: the name of their side, lhs or rhs.
      batch: of the output.
      stored: bytes of the weights.
      rows: of values; `columns` of weights.
      depth: that is summed over.
      folded: whether accumulators are scaled along the depth, which halves the largest tile.
    """

    weights: str
    batch: int
    stored: int
    rows: int
    columns: int
    depth: int
    folded: bool

    @classmethod
    def of(cls, spec: ScaledDotSpec) -> WeightOnly | None:
        """None where the kernel does not take it."""
        sides = (spec.lhs, spec.rhs)
        values, weights = sides[::-1] if _are_weights_left(spec) else sides
        if not _multiplies(values, weights) or spec.epilogue.out_dtype == "int32":
            return None
        if values.zero_point:
            return None
        scaled = weights.scale or weights.zero_point
        folded = scaled and weights.scale_varies
        if values.scale and values.scale_varies:
            return None
        if folded and weights.tiles[weights.contracting[0]] % TILE != 0:
            return None
        if scaled and not _are_scales_countable(weights):
            return None
        made = cls(
            weights="rhs" if weights is spec.rhs else "lhs",
            batch=math.prod(spec.out_shape[:-2]),
            stored=math.prod(weights.shape),
            rows=_lines(values),
            columns=_lines(weights),
            depth=weights.depth,
            folded=folded,
        )
        return made if made._is_countable() else None

    def is_certain(self, kernel: str) -> bool:
        """Whether the path computes it on every device, where `kernel` is asked for ("": none)."""
        return kernel == NAME or (kernel == "" and self.rows <= FEW_ROWS)

    def is_read_in_place(self, kernel: str) -> bool:
        """Whether it takes weights whose batch axes stand anywhere but last."""
        few = self.rows <= _ROWS_IN_PLACE and self.batch <= _BATCH_IN_PLACE
        return few and self.is_certain(kernel)

    def scratch(self) -> int:
        """Sums of every block, where several blocks share an output."""
        outputs, sums = max(1, self._outputs()), 4 * min(self.rows, self._tile()) * TILE
        room = self.stored // _SHARE_OF_WEIGHT // outputs // max(1, sums)
        sharing = min(_MOST_SHARING, _BLOCKS // outputs, self._depth_tiles(), room)
        return sharing * outputs * sums if sharing > 1 else 0

    def _tile(self) -> int:
        tile, most = 8, 32 if self.folded else 64
        while tile < most and self.rows > tile:
            tile *= 2
        return tile

    def _row_tiles(self) -> int:
        return -(-self.rows // self._tile())

    def _depth_tiles(self) -> int:
        return -(-self.depth // TILE)

    def _outputs(self) -> int:
        return self.batch * self._row_tiles() * -(-self.columns // TILE)

    def _is_countable(self) -> bool:
        sizes = (self.batch, self.rows, self.columns, self.depth, self._outputs())
        return max(sizes) <= MOST and self._depth_tiles() <= MOST // max(1, self._outputs())


def _lines(side: OperandSpec) -> int:
    return side.shape[side.free[0]]


def _are_scales_countable(weights: OperandSpec) -> bool:
    (free,), counts = weights.free, weights.scale_shape
    stride = math.prod(counts[free + 1 :]) if counts[free] > 1 else 0
    return _lines(weights) * stride <= _MOST_SCALES


def _are_weights_left(spec: ScaledDotSpec) -> bool:
    """Of two 8-bit sides the one with more lines is the weights."""
    if not dtypes.is_eight_bit(spec.lhs.dtype):
        return False
    return not dtypes.is_eight_bit(spec.rhs.dtype) or _lines(spec.lhs) > _lines(spec.rhs)


def _multiplies(values: OperandSpec, weights: OperandSpec) -> bool:
    """Whether it multiplies such types."""
    if values.dtype == "float8_e4m3fn":
        return dtypes.is_float8(weights.dtype) and _lines(values) <= FEW_FLOAT8_ROWS
    return values.dtype in ("bfloat16", "float16") and dtypes.is_eight_bit(weights.dtype)
