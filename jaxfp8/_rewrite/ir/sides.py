"""The two operands of a scaled dot: their data, axes and scales."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import Factor, Factors, full_tiles
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._value.spec import Shape, tile_counts


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledSide:
    """One operand of a scaled dot, with the axes of its stored array."""

    value: Value  # the data: bytes, or an array of float32, bfloat16 or float16
    dtype: np.dtype  # the logical dtype of the data
    # contracting, batch: axes of `value`; the i-th one pairs with the other side's i-th one.
    contracting: Shape
    batch: Shape
    output: Shape  # for each axis of `value` the axis of the output, or -1 for a contracting axis
    # zero_point, factors: the zero point and the scales of `value`.
    zero_point: Factor | None = None
    factors: Factors = ()
    scaled: Scaled | None = None  # the fact about 8-bit data; None for a float operand
    multiplied: bool = False  # whether scales along the sum were multiplied into `value`

    def from_output(self, factor: Factor) -> Factor:
        """A factor of the output as one of this operand, constant along contracting axes."""
        sources = [axis if axis >= 0 else None for axis in self.output]
        return factor.placed(sources, self.value.shape)


def shared(lhs: ScaledSide, rhs: ScaledSide) -> tuple[ScaledSide, ScaledSide]:
    """The sides, with scales along contracting axes moved to the other side if that helps.

    An operand with a scale by row and a scale by column needs one number for each element. A scale
    along contracting axes only can scale the other operand instead.
    """
    if is_elementwise(rhs):
        rhs, lhs = _hand_over(rhs, lhs)
    if is_elementwise(lhs):
        lhs, rhs = _hand_over(lhs, rhs)
    return lhs, rhs


def _hand_over(giver: ScaledSide, taker: ScaledSide) -> tuple[ScaledSide, ScaledSide]:
    contracted = set(giver.contracting)
    moving = [f for f in giver.factors if f.varying() and set(f.varying()) <= contracted]
    staying = tuple(f for f in giver.factors if f not in moving)
    moved = tuple(across(f, giver, taker) for f in moving)
    after = (
        dataclasses.replace(giver, factors=staying),
        dataclasses.replace(taker, factors=taker.factors + moved),
    )
    return after if not any(map(is_elementwise, after)) else (giver, taker)


def across(factor: Factor, giver: ScaledSide, taker: ScaledSide) -> Factor:
    """A factor along contracting and batch axes, moved to the paired axes of the other side."""
    theirs, ours = taker.contracting + taker.batch, giver.contracting + giver.batch
    source = dict(zip(theirs, ours, strict=True))
    shape = taker.value.shape
    return factor.placed([source.get(axis) for axis in range(len(shape))], shape)


def is_elementwise(side: ScaledSide, more: Factors = ()) -> bool:
    """Whether the product of the scales has about one number for each element.

    It then varies element by element along every contracting axis and along some free axis.
    """
    tiles = _common_tiles(side, more)
    fine = [axis for axis, size in enumerate(side.value.shape) if size > 1 == tiles[axis]]
    free = [a for a in fine if a not in side.contracting and a not in side.batch]
    summed = [a for a in side.contracting if side.value.shape[a] > 1]
    return bool(free) and bool(summed) and all(axis in fine for axis in summed)


def saves_nothing(side: ScaledSide, more: Factors = ()) -> bool:
    """Whether elementwise scales, in float32, take more memory than the data."""
    counts = tile_counts(side.value.shape, _common_tiles(side, more))
    return is_elementwise(side, more) and 4 * math.prod(counts) > side.value.size


def grows_too_fine(side: ScaledSide, more: Factors) -> bool:
    """Whether further scales make the scales of a side elementwise."""
    return saves_nothing(side, more) or is_elementwise(side, more) > is_elementwise(side)


def _common_tiles(side: ScaledSide, more: Factors) -> Shape:
    return _tiles.common(side.value.shape, [f.tiles for f in side.factors + more])


def peel(side: ScaledSide) -> ScaledSide:
    """The side before its transposes; its axes are renumbered instead.

    A transpose stays if it changes the order of the free axes.
    """
    while (op := graph.producer(side.value, "transpose")) is not None:
        moved = _transposed(side, op.inputs[0], tuple(int(a) for a in op.params["permutation"]))
        free = [axis for i, axis in enumerate(moved.output) if axis >= 0 and i not in moved.batch]
        if free != sorted(free):
            return side
        side = moved
    return side


def _transposed(side: ScaledSide, source: Value, permutation: Shape) -> ScaledSide:
    """The side before a transpose: axis `permutation[i]` of `source` is axis i of the value."""
    inverse = tuple(int(axis) for axis in np.argsort(permutation))

    def move(factor: Factor) -> Factor:
        return factor.placed(inverse, source.shape)

    return dataclasses.replace(
        side,
        value=source,
        contracting=tuple(permutation[a] for a in side.contracting),
        batch=tuple(permutation[a] for a in side.batch),
        output=tuple(side.output[a] for a in inverse),
        zero_point=move(side.zero_point) if side.zero_point is not None else None,
        factors=tuple(move(f) for f in side.factors),
    )


def tiles_of(side: ScaledSide, factors: Factors) -> Shape:
    """The common tiles of the scales and the zero point of a side."""
    parts = [f.tiles for f in factors]
    if side.zero_point is not None:
        parts.append(side.zero_point.tiles)
    return _tiles.common(side.value.shape, parts) if parts else full_tiles(side.value.shape)
