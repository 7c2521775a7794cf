"""Finds the weight among the operands of a dot, from facts about the origin of values.

A weight is data from before the run of the function. Each float array among its arguments and
closures gets a fact, as if it were 8-bit data with scales along its axes. The rules of the rewrite
carry that fact through casts, views, scales and into regions. At a dot the fact names the array,
and maps its axes to those of the operand. Nothing is computed from these facts.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.factors import Factor, Factors
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

_STANDS_IN = np.dtype(np.int8)
Kind = Literal["held", "given", "computed"]


@dataclasses.dataclass(frozen=True, eq=False)
class Role:
    """The origin of an operand of a dot."""

    kind: Kind  # "held" in 8 bits already, "given" to the function, or "computed" in it
    source: Value | None = None  # the given array; None for another kind
    axes: tuple[Shape, ...] = ()  # for each axis of the source, its axes in the operand


_COMPUTED = Role("computed")
_RANKS = {"computed": 0, "given": 1, "held": 2}


def mark(walk: Walk, value: Value) -> None:
    """State that a value was given to the function."""
    if value.dtype not in dtypes.WIDE_FLOAT or not value.shape or value.size == 0:
        return
    factors = tuple(_up_to(value, axis) for axis in range(len(value.shape)))
    stand_in = Value(value.shape, _STANDS_IN)
    # No part of this fact can be computed. A guard keeps it from leaving its region.
    guards = (graph.literal(True),)
    walk.facts[value] = Scaled(stand_in, _STANDS_IN, None, factors, value, guards)


def role_of(walk: Walk, value: Value) -> Role:
    """The role of an operand."""
    fact = walk.scaled(value)
    if fact is None:
        return _COMPUTED
    source = fact.origin
    if source is None or source.dtype in dtypes.EIGHT_BIT:
        return Role("held")
    own, later = fact.factors[: len(source.shape)], fact.factors[len(source.shape) :]
    if not _is_all_of(value, source) or any(f.small.size == value.size for f in later):
        return _COMPUTED
    return Role("given", source, _images(own))


def _is_all_of(value: Value, source: Value) -> bool:
    """Whether a value has all elements of a source, or all at one index of its first axis.

    A parameter broadcast over activations is no weight, and neither is a looked-up row.
    """
    return value.size in (source.size, source.size // max(source.shape[0], 1))


def weight_index(roles: tuple[Role, Role]) -> int | None:
    """The index of the weight: 8-bit data before a given array, and the right one at a tie."""
    left, right = (_RANKS[role.kind] for role in roles)
    if left == right == 0:
        return None
    return 1 if right >= left else 0


def _up_to(value: Value, last: int) -> Factor:
    """A factor varying along the axes up to `last`. It survives a reshape that merges axes."""
    shape, rank = value.shape, len(value.shape)
    counts = tuple(shape[i] if i <= last else 1 for i in range(rank))
    tiles = tuple(1 if i <= last else shape[i] for i in range(rank))
    return Factor(Value(counts, np.dtype(np.float32)), tiles)


def _images(factors: Factors) -> tuple[Shape, ...]:
    """For each axis of a source its axes in the operand.

    Factor i varies along the axes up to axis i of the source. If it varies along no new axis, axis
    i was merged with the one before it.
    """
    images: list[Shape] = []
    before: set[int] = set()
    for factor in factors:
        new = tuple(axis for axis in factor.varying() if axis not in before)
        images.append(new or (images[-1] if images else ()))
        before |= set(new)
    return tuple(images)


def source_axes(role: Role, contracting: Shape, batch: Shape) -> tuple[Shape, Shape]:
    """The contracted axes and the batch axes of the source.

    An axis split by a view into contracting and other axes counts as contracting, since the
    elements of a sum share a scale.
    """
    contracted = [i for i, axes in enumerate(role.axes) if set(axes) & set(contracting)]
    shared = [
        i for i, axes in enumerate(role.axes) if i not in contracted and set(axes) & set(batch)
    ]
    return tuple(contracted), tuple(shared)
