"""Facts about what comes out of a region: 8-bit data and scales come out beside the wide value.

A residual that a scan keeps for its backward pass, or a weight that a branch picks, is known inside
as bytes and scales. Told outside, that fact lets a dot there read the bytes; the wide output is
then read by nobody. What a region was given from outside is not given back: the fact outside
speaks of the outer values themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.facts import Factor, Scaled
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.regions.borders import Border
from jaxfp8._rewrite.rules import choices
from jaxfp8._value.spec import Shape

_UNSET = ("empty", "empty2")  # from JAX 0.12 on

Given = Callable[[Value], Value]  # from an extra output inside to the value that it is outside


@dataclasses.dataclass(eq=False)
class Exit:
    """One output of a region and what is known about it inside.

    Attributes:
      fact: what is known inside; None if nothing.
      extra: what the region has to give out beside it.
      length: of the stack that the output is a slice of; None for an output that leaves whole.
      spec: how the shards of it are put together, if it is one.
    """

    border: Border
    fact: Scaled | None
    length: int | None = None
    spec: Any = None

    @property
    def extra(self) -> list[Value]:
        """Parts of the fact that the region itself makes."""
        if self.fact is None:
            return []
        return [part for part in _parts(self.fact) if self._outer(part) is None]

    def shape(self, part: Value) -> Shape:
        """The shape that an extra output has outside."""
        return part.shape if self.length is None else (self.length, *part.shape)

    def outside(self, given: Given) -> Scaled | None:
        """The fact about the value outside."""
        if self.fact is None:
            return None
        fact, zero = self.fact, self.fact.zero_point
        return Scaled(
            self._value(fact.q, given),
            fact.dtype,
            None if zero is None else self._factor(zero, given),
            tuple(self._factor(f, given) for f in fact.factors),
            fact.origin,
        )

    def _outer(self, part: Value) -> Value | None:
        """The value outside that a part is, where the region was given it."""
        if part.literal is not None:
            return part
        value, how = self.border.links.get(part, (None, None))
        wanted = ("whole",) if self.length is None else ("slice",)
        return value if how in wanted else None

    def _value(self, part: Value, given: Given) -> Value:
        outer = self._outer(part)
        return given(part) if outer is None else outer

    def _factor(self, factor: Factor, given: Given) -> Factor:
        value = self._value(factor.small, given)
        if self.length is None:
            return Factor(value, factor.tiles)
        if factor.small.literal is not None:
            stacked = graph.reshape(value, (1, *factor.small.shape))
            return Factor(stacked, (max(self.length, 1), *factor.tiles))
        return Factor(value, (1, *factor.tiles))


def _parts(fact: Scaled) -> list[Value]:
    zero = () if fact.zero_point is None else (fact.zero_point,)
    return [fact.q, *(f.small for f in (*fact.factors, *zero))]


def exits(border: Border, outputs: Sequence[Value], length: int | None = None) -> list[Exit]:
    """What is known about the outputs of a region with one body."""
    return [Exit(border, _known(border.inner, value), length) for value in outputs]


def branch_exits(borders: Sequence[Border], outputs: Sequence[Sequence[Value]]) -> list[list[Exit]]:
    """What is known about the outputs of each branch, in one form where it is in all of them."""
    rows = []
    for column in zip(*outputs, strict=True):
        facts = [_known(b.inner, v) for b, v in zip(borders, column, strict=True)]
        rows.append(_agreed(facts, column))
    columns = list(zip(*rows, strict=True)) or [() for _ in borders]
    return [
        [BranchExit(border, fact) for fact in facts]
        for border, facts in zip(borders, columns, strict=True)
    ]


@dataclasses.dataclass(eq=False)
class ShardExit(Exit):
    """One output of a shard_map: parts are put together from shards as the output is, by `spec`."""

    mesh: Any = None

    def shape(self, part: Value) -> Shape:
        """The shape of all shards together."""
        pairs = zip(part.shape, self._shards(len(part.shape)), strict=True)
        return tuple(size * shards for size, shards in pairs)

    def _shards(self, rank: int) -> list[int]:
        """Into how many shards each axis is cut."""
        parts = [*self.spec, *[None] * (rank - len(self.spec))]
        names = [(p,) if isinstance(p, str) else tuple(p or ()) for p in parts]
        return [math.prod(self.mesh.shape[name] for name in group) for group in names]

    def _outer(self, part: Value) -> Value | None:
        return part if part.literal is not None and part.size == 1 else None

    def _factor(self, factor: Factor, given: Given) -> Factor:
        value, shards = self._value(factor.small, given), self._shards(len(factor.tiles))
        if factor.small.literal is None or factor.small.size > 1:
            return Factor(value, factor.tiles)
        tiles = tuple(tile * count for tile, count in zip(factor.tiles, shards, strict=True))
        return Factor(value, tiles)


def shard_exits(
    border: Border, outputs: Sequence[Value], specs: Sequence[Any], mesh: Any
) -> list[Exit]:
    """What is known about the outputs of a shard_map."""
    leaving: list[Exit] = []
    for value, spec in zip(outputs, specs, strict=True):
        exit_ = ShardExit(border, _known(border.inner, value), None, spec, mesh)
        if exit_.fact is not None and not _fits(exit_.fact, exit_._shards(len(value.shape))):
            exit_.fact = None
        leaving.append(exit_)
    return leaving


def _fits(fact: Scaled, shards: Sequence[int]) -> bool:
    """Whether scales of the shards, side by side, are tiles of the whole."""
    zero = () if fact.zero_point is None else (fact.zero_point,)
    rows = [
        zip(fact.q.shape, f.tiles, f.small.shape, shards, strict=True)
        for f in (*fact.factors, *zero)
    ]
    return not any(n > 1 and count > 1 and size % tile for r in rows for size, tile, count, n in r)


class BranchExit(Exit):
    """One output of a branch: its parts leave beside it even if they were given to the branch."""

    def _outer(self, part: Value) -> Value | None:
        return None


def _known(walk: Context, value: Value) -> Scaled | None:
    """The fact about an output, if it holds whatever the data is."""
    fact = walk.dequantised(value)
    return fact if fact is not None and not fact.guards else None


def _agreed(facts: Sequence[Scaled | None], values: Sequence[Value]) -> Sequence[Scaled | None]:
    """Facts of branches in one form, if all of them give 8-bit data of one dtype.

    Zeros will do: a branch gives them for what only another one keeps for its derivative.
    """
    scaled = [fact for fact in facts if fact is not None]
    if scaled:
        pairs = zip(facts, values, strict=True)
        scaled = [
            fact if fact is not None else choices.zeros(value, scaled[0].dtype)
            for fact, value in pairs
            if fact is not None or _is_filler(value)
        ]
    agreed = choices.agree(scaled, values[0].shape) if len(scaled) == len(facts) else None
    return [None] * len(facts) if agreed is None else agreed


def _is_filler(value: Value) -> bool:
    """Whether a value is zero throughout, or memory that nobody set."""
    spread = graph.producer(value, "broadcast_in_dim")
    source = None if spread is None else spread.inputs[0].op
    return graph.number(value) == 0 or (source is not None and source.name in _UNSET)
