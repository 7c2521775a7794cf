"""Merged axes of a scaled dot on a GPU, and their order in memory.

Axes of a side are grouped: one or two groups of the batch, then the free axes, then the contracted
ones. Weights are read as they are stored where their groups are contiguous there; any other side
is transposed into the usual order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape

SIDES = ("lhs", "rhs")
Groups = tuple[Shape, ...]  # of axes: one or two of the batch, free, depth

FREE, DEPTH = -2, -1  # in `Groups`


@dataclasses.dataclass(frozen=True)
class Layout:
    """The groups of axes of each side and of the output, and how they lie.

    A batch axis that one side lacks counts as a free axis of the other, so the shared matrix is
    read once.

    Attributes:
      lhs, rhs: the groups of each side.
      out: those of the output: batch, rows, columns.
      orders: of the groups of each side in memory, by its name.
    """

    lhs: Groups
    rhs: Groups
    out: Groups
    orders: dict[str, Shape]

    def parted(self, at: int) -> Layout:
        """With a batch of two groups, the second from the axis of that number on."""
        lhs, rhs, out = (
            (batch[:at], batch[at:], *rest) for batch, *rest in (self.lhs, self.rhs, self.out)
        )
        orders = {name: (0, *(g + 1 for g in order)) for name, order in self.orders.items()}
        return Layout(lhs, rhs, out, orders)


def usual(spec: ScaledDotSpec) -> Layout:
    """The layout that every path takes: one group of the batch, which comes first."""
    lhs, rhs = spec.lhs, spec.rhs
    pairs = list(zip(lhs.batch, rhs.batch, strict=True))
    rows = [i for i, (left, r) in enumerate(pairs) if rhs.shape[r] == 1 != lhs.shape[left]]
    columns = [i for i, (left, r) in enumerate(pairs) if lhs.shape[left] == 1 != rhs.shape[r]]
    both = [i for i in range(len(pairs)) if i not in rows and i not in columns]
    number = len(pairs)
    middle = number + len(lhs.free)
    contracting = _contracting(spec)
    left_groups = (
        tuple(lhs.batch[i] for i in both + columns),
        tuple(lhs.batch[i] for i in rows) + lhs.free,
        tuple(left for left, _ in contracting),
    )
    right_groups = (
        tuple(rhs.batch[i] for i in both + rows),
        tuple(rhs.batch[i] for i in columns) + rhs.free,
        tuple(r for _, r in contracting),
    )
    out = (
        tuple(both),
        (*rows, *range(number, middle)),
        (*columns, *range(middle, len(spec.out_shape))),
    )
    orders = {"lhs": _order(lhs, left_groups, spec), "rhs": _order(rhs, right_groups, spec)}
    return Layout(left_groups, right_groups, out, orders)


def _contracting(spec: ScaledDotSpec) -> list[tuple[int, int]]:
    """Pairs of contracted axes in the order in which the larger side has them."""
    pairs = list(zip(spec.lhs.contracting, spec.rhs.contracting, strict=True))
    larger = math.prod(spec.lhs.shape) > math.prod(spec.rhs.shape)
    return sorted(pairs, key=lambda pair: pair[0 if larger else 1])


def _order(side: OperandSpec, groups: Groups, whole: ScaledDotSpec) -> Shape:
    """The order of the groups that needs no transpose; K-contiguous if that does not decide.

    Tensor cores multiply 8-bit data by 8-bit data only if K is contiguous.
    """
    batch, free, depth = range(3)
    eight_bit = all(dtypes.is_eight_bit(s.dtype) for s in (whole.lhs, whole.rhs))
    moved = tuple(a for g in (batch, depth, free) for a in groups[g] if side.shape[a] != 1)
    if eight_bit or list(moved) != sorted(moved):
        return batch, free, depth
    matrix = all(math.prod(side.sizes(groups[g])) != 1 for g in (free, depth))
    return (batch, depth, free) if matrix else (batch, free, depth)


def in_place(spec: ScaledDotSpec, layout: Layout, name: str) -> Layout | None:
    """The layout in which a side is read as it is stored, though its batch does not come first.

    Args:
      spec: the scaled dot.
      layout: the usual one.
      name: of the side.

    Returns:
      None where the batch comes first, or comes last, or groups are not contiguous in memory.
    """
    side, groups = getattr(spec, name), getattr(layout, name)
    kept = [axis for axis, size in enumerate(side.shape) if size != 1]
    parts = _parts(groups[0], kept)
    if len(parts) > 2 or not any(axis in kept for axis in groups[0]):
        return None
    groups = (*parts, *groups[1:])
    order = sorted(range(len(groups)), key=lambda g: _first(groups[g], kept))
    in_memory = [axis for g in order for axis in groups[g] if axis in kept]
    first, last = (next(g for g in order if kept[i] in groups[g]) for i in (0, -1))
    if in_memory != kept or last < len(parts) or (len(parts) == 1 and first == 0):
        return None
    if len(parts) == 2:
        layout = layout.parted(len(parts[0]))
    return dataclasses.replace(layout, orders=layout.orders | {name: tuple(order)})


def _parts(batch: Shape, kept: list[int]) -> list[Shape]:
    """The batch axes in pieces that are contiguous in memory; axes of size 1 are anywhere."""
    numbers = [i for i, axis in enumerate(batch) if axis in kept]
    begins = [
        j
        for i, j in itertools.pairwise(numbers)
        if kept.index(batch[j]) != kept.index(batch[i]) + 1
    ]
    return [batch[i:j] for i, j in itertools.pairwise([0, *begins, len(batch)])]


def _first(group: Shape, kept: list[int]) -> int:
    """Where a group begins in memory; before all others if its axes have size 1."""
    return min((kept.index(axis) for axis in group if axis in kept), default=-1)
