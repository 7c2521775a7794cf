"""Facts at the exit of a region: 8-bit data and scales come out next to the wide value.

A scan keeps residuals for its backward pass, and a branch may pick a weight. Inside, these are
known as bytes and scales. If the fact leaves too, a dot outside reads the bytes, and nobody reads
the wide output. An input of the region does not come out as a part: the fact outside names the
outer value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, constants, graph
from jaxfp8._rewrite.ir.factors import Factor
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.regions.borders import Border
from jaxfp8._rewrite.rules import choices
from jaxfp8._value import dtypes
from jaxfp8._value.shards import mesh_axes
from jaxfp8._value.spec import Shape

# Primitives of JAX 0.12 and later with uninitialised memory as their output.
_UNSET = ("empty", "empty2")

# From an extra output inside to the value outside.
Given = Callable[[Value], Value]


@dataclasses.dataclass(eq=False)
class Exit:
    """One output of a region and the fact about it inside."""

    border: Border  # the border of the region
    fact: Scaled | None  # the fact inside; None if there is none
    # For a slice of a stack the length of the stack; None if the output leaves whole.
    length: int | None = None
    # For an output of a shard_map, how its shards are put together.
    spec: PartitionSpec | None = None

    @property
    def extra(self) -> list[Value]:
        """The parts of the fact for the region to return as well."""
        if self.fact is None:
            return []
        return [part for part in _parts(self.fact) if self._outer(part) is None]

    def shape(self, part: Value) -> Shape:
        """The shape of an extra output outside."""
        return part.shape if self.length is None else (self.length, *part.shape)

    def outside(self, given: Given) -> Scaled | None:
        """The fact about the value outside."""
        if self.fact is None:
            return None
        return self.fact.moved(
            lambda q: self._value(q, given), lambda factor: self._factor(factor, given)
        )

    def _outer(self, part: Value) -> Value | None:
        """The same value outside, if this part is an input of the region."""
        if part.literal is not None:
            return part
        bitcast = graph.producer(part, "bitcast_convert_type")
        if bitcast is not None and bitcast.inputs[0].dtype in dtypes.FLOAT8:
            source = self._outer(bitcast.inputs[0])
            return None if source is None else casts.bitcast(source, part.dtype)
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
            own = Factor(value, factor.tiles)
            return own.placed([None, *range(len(own.tiles))], (self.length, *own.tiles))
        return Factor(value, (1, *factor.tiles))


def _parts(fact: Scaled) -> list[Value]:
    return [fact.q, *(f.small for f in fact.smalls)]


def exits(border: Border, outputs: Sequence[Value], length: int | None = None) -> list[Exit]:
    """The facts about the outputs of a region with one body."""
    return [Exit(border, _known(border.inner, value), length) for value in outputs]


def branch_exits(borders: Sequence[Border], outputs: Sequence[Sequence[Value]]) -> list[list[Exit]]:
    """The facts about the outputs of each branch, in one form if all branches have one."""
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
    """One output of a shard_map: its parts are put together from shards by its own `spec`."""

    mesh: Mesh | AbstractMesh | None = None

    def shape(self, part: Value) -> Shape:
        """The shape of all shards together."""
        pairs = zip(part.shape, self._shards(len(part.shape)), strict=True)
        return tuple(size * shards for size, shards in pairs)

    def _shards(self, rank: int) -> list[int]:
        """Into how many shards each axis is split."""
        assert self.spec is not None and self.mesh is not None
        sizes, parts = self.mesh.shape, [*self.spec, *[None] * (rank - len(self.spec))]
        return [math.prod(sizes[name] for name in mesh_axes(part)) for part in parts]

    def _outer(self, part: Value) -> Value | None:
        return part if part.literal is not None and part.size == 1 else None

    def _factor(self, factor: Factor, given: Given) -> Factor:
        value, shards = self._value(factor.small, given), self._shards(len(factor.tiles))
        if factor.small.literal is None or factor.small.size > 1:
            return Factor(value, factor.tiles)
        tiles = tuple(tile * count for tile, count in zip(factor.tiles, shards, strict=True))
        return Factor(value, tiles)


def shard_exits(
    border: Border, outputs: Sequence[Value], specs: Sequence[PartitionSpec], mesh: Mesh
) -> list[Exit]:
    """The facts about the outputs of a shard_map."""
    leaving: list[Exit] = []
    for value, spec in zip(outputs, specs, strict=True):
        exit_ = ShardExit(border, _known(border.inner, value), None, spec, mesh)
        if exit_.fact is not None and not _fits(exit_.fact, exit_._shards(len(value.shape))):
            exit_.fact = None
        leaving.append(exit_)
    return leaving


def _fits(fact: Scaled, shards: Sequence[int]) -> bool:
    """Whether the scales of the shards, side by side, are tiles of the whole."""
    shape = fact.q.shape
    rows = [zip(shape, f.tiles, f.small.shape, shards, strict=True) for f in fact.smalls]
    return not any(n > 1 and count > 1 and size % tile for r in rows for size, tile, count, n in r)


class BranchExit(Exit):
    """One output of a branch: all its parts leave, since another branch may have other ones."""

    def _outer(self, part: Value) -> Value | None:
        return None


def _known(walk: Context, value: Value) -> Scaled | None:
    """The fact about an output, if it has no guards."""
    fact = walk.dequantized(value)
    return fact if fact is not None and not fact.guards else None


def _agreed(facts: Sequence[Scaled | None], values: Sequence[Value]) -> Sequence[Scaled | None]:
    """The facts of branches in one form, if all return 8-bit data of one dtype, or zeros.

    A branch returns zeros for a residual of another branch.
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
    """Whether a value is zero everywhere, or uninitialised memory."""
    spread = graph.producer(value, "broadcast_in_dim")
    source = None if spread is None else spread.inputs[0].op
    return constants.number(value) == 0 or (source is not None and source.name in _UNSET)
