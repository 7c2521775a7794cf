"""Which axes of a call are split together, and how they are split over the devices of a mesh.

The axes of operands and results belong to **factors**: the rows of a product are a factor of the
left side, of the output and of the residual. A call on shards is right if every array is split
along its factors alike, so one table says everything: which mesh axes split which factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]  # the factor of each axis of an array, None where it is never split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Which axes of a call are split together.

    Attributes:
      operands, results: the factor of each axis of each array.
      pieces: into how many equal parts each factor can be cut.
      behind: how many operands, the last ones, follow the sum, as all results do.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    pieces: Mapping[str, int]
    behind: int = 0

    def summed(self, name: str) -> bool:
        """Whether a factor is summed over: no result has it."""
        return not any(name in names for names in self.results)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a call is split: each device has one part of each factor.

    Attributes:
      mesh: the devices.
      mesh_axes: by factor, the mesh axes that split it.
      scattered: by factor, the mesh axes that split it behind the sum only: a sum over devices
        along such an axis is a reduce-scatter.
    """

    mesh: Mesh | AbstractMesh
    mesh_axes: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def behind(self) -> Shards:
        """How what follows the sum is split."""
        merged = {name: self.axes(name) for name in self.mesh_axes}
        for name, axes in self.scattered.items():
            merged[name] = (*merged.get(name, ()), *axes)
        return Shards(self.mesh, merged)

    def placements(self, factors: Factors) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where the shards of operands and of results lie."""
        first = len(factors.operands) - factors.behind
        sides, others = factors.operands[:first], factors.operands[first:]
        operands = [*map(self.sharding, sides), *map(self.behind.sharding, others)]
        return operands, list(map(self.behind.sharding, factors.results))

    def give(self, name: str, axis: str) -> Shards:
        """The same, and a mesh axis that splits a factor."""
        split = {**self.mesh_axes, name: (*self.axes(name), axis)}
        return dataclasses.replace(self, mesh_axes=split)

    def scatter(self, factors: Factors, axis: str, names: Iterable[str]) -> Shards:
        """The same; if the axis splits a sum, it splits one of some factors behind that."""
        owner = next((name for name, axes in self.mesh_axes.items() if axis in axes), "")
        if not owner or not factors.summed(owner):
            return self
        for name in names:
            parts = self.behind.parts(name) * self.mesh.shape[axis]
            if not factors.summed(name) and factors.pieces[name] % parts == 0:
                own = (*self.scattered.get(name, ()), axis)
                return dataclasses.replace(self, scattered={**self.scattered, name: own})
        return self

    def axes(self, *names: str | None) -> tuple[str, ...]:
        """The mesh axes that split some factors."""
        return tuple(axis for name in names if name for axis in self.mesh_axes.get(name, ()))

    def parts(self, name: str | None) -> int:
        """Into how many parts a factor is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def shape(self, shape: tuple[int, ...], names: Names) -> tuple[int, ...]:
        """The shape of one shard of an array."""
        return tuple(size // self.parts(n) for size, n in zip(shape, names, strict=True))

    def sharding(self, names: Names) -> NamedSharding:
        """Where the shards of an array lie."""
        return NamedSharding(self.mesh, PartitionSpec(*(self.axes(n) or None for n in names)))


# From the types of its operands and its parameters, the factors of a call and the call on shards.
Parts = tuple[Factors, Callable[[Shards], Callable[..., Sequence[Any]]]]
