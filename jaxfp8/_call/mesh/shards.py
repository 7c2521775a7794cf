"""Factors, the axes of a call that are split together, and their split over a mesh.

The axes of operands and results belong to **factors**: the rows of a product are a factor of the
left side, of the output and of the residual. A call on shards is right if all arrays split a factor
the same way. One table therefore says everything: the mesh axes of each factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxfp8._value.dtypes import as_bytes, bits_as

Names = tuple[str | None, ...]  # the factor of each axis of an array, None if it is never split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """The axes of a call that are split together."""

    # operands, results: the factor of each axis of each array.
    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    pieces: Mapping[str, int]  # the number of equal parts each factor can be cut into
    # Factors free to be cut into any number of parts. XLA pads arrays to equal parts. Results of
    # the padding are dropped with it, or are zero.
    ragged: frozenset[str] = frozenset()
    # The number of epilogue operands, the last ones. All results follow the sum too.
    behind: int = 0

    def fits(self, name: str, parts: int) -> bool:
        """Whether XLA can cut a factor into so many parts."""
        return name in self.ragged or self.pieces[name] % parts == 0

    def summed(self, name: str) -> bool:
        """Whether a factor is summed over: no result has it."""
        return not any(name in names for names in self.results)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The split of a call: each device has one part of each factor."""

    mesh: Mesh | AbstractMesh  # the devices
    mesh_axes: Mapping[str, tuple[str, ...]]  # by factor, its mesh axes
    # By factor, its mesh axes after the sum only: a sum over devices along such an axis is a
    # reduce-scatter.
    scattered: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def behind(self) -> Shards:
        """The split of the epilogue."""
        merged = {name: self.axes(name) for name in self.mesh_axes}
        for name, axes in self.scattered.items():
            merged[name] = (*merged.get(name, ()), *axes)
        return Shards(self.mesh, merged)

    def placements(self, factors: Factors) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of operands and of results."""
        first = len(factors.operands) - factors.behind
        sides, others = factors.operands[:first], factors.operands[first:]
        operands = [*map(self.sharding, sides), *map(self.behind.sharding, others)]
        return operands, list(map(self.behind.sharding, factors.results))

    def give(self, name: str, axis: str) -> Shards:
        """The same, and a mesh axis for a factor."""
        split = {**self.mesh_axes, name: (*self.axes(name), axis)}
        return dataclasses.replace(self, mesh_axes=split)

    def scatter(self, factors: Factors, axis: str, names: Iterable[str]) -> Shards:
        """The same; if the axis splits a sum, it splits one of some factors after the sum."""
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
        """The mesh axes of some factors."""
        return tuple(axis for name in names if name for axis in self.mesh_axes.get(name, ()))

    def parts(self, name: str | None) -> int:
        """The number of parts of a factor."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def shape(self, shape: tuple[int, ...], names: Names) -> tuple[int, ...]:
        """The shape of one shard of an array, with its padding."""
        return tuple(-(-size // self.parts(n)) for size, n in zip(shape, names, strict=True))

    def sharding(self, names: Names) -> NamedSharding:
        """The sharding of an array."""
        return NamedSharding(self.mesh, PartitionSpec(*(self.axes(n) or None for n in names)))


# From the types of its operands and its parameters, the factors of a call and the call on shards.
Parts = tuple[Factors, Callable[[Shards], Callable[..., Sequence[Any]]]]


def without_padding(x: jax.Array, axis: int, size: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """A shard with zeros in its padding. Equal shards may be longer than an array of `size`."""
    if mesh_axes == () or x.shape[axis] * jax.lax.axis_size(mesh_axes) == size:
        return x
    values = as_bytes(x)
    here = jax.lax.axis_index(mesh_axes) * x.shape[axis]
    place = here + jax.lax.broadcasted_iota(np.int32, x.shape, axis)
    kept = jax.lax.select(place < size, values, jax.lax.full_like(values, 0))
    return bits_as(kept, x.dtype)
