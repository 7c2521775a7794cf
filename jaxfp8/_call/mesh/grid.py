"""The devices among which XLA splits a call, and which of them split which factor.

The table follows the shardings that XLA chose for the arrays; XLA moves an array split otherwise.

Inside a `shard_map` over some axes of a mesh, XLA splits a call over the other axes. It numbers the
devices of those by the sharding of the result, and does not say how. `compass` shows the numbering.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxfp8._call.mesh.shards import Factors, Shards
from jaxfp8._value import compat

# How many operands are not scales or what follows a sum: those of a product.
_LARGE = 2


def choose_shards(mesh: Mesh, factors: Factors, arrays: Sequence[Any]) -> tuple[Shards, list[str]]:
    """Gives each mesh axis to the factor by which it splits the most bytes already.

    Args:
      mesh: the devices.
      factors: which axes are split together.
      arrays: operands and results, with shape, dtype and the sharding in which XLA has them.

    Returns:
      How the call is split, and the mesh axes that split its operands but can split no factor.
    """
    votes: dict[str, collections.Counter[str]] = {}
    wanted: dict[str, list[str]] = {}  # by mesh axis the factors of the results that it splits
    operands: set[str] = set()  # the mesh axes that split what is multiplied or quantised
    number = len(factors.operands)
    for i, (array, names) in enumerate(
        zip(arrays, factors.operands + factors.results, strict=True)
    ):
        splits = _splits(array.sharding, len(array.shape), mesh)
        if splits is None:
            continue
        for name, size, axes in zip(names, array.shape, splits, strict=True):
            if i < _LARGE and size > 1:
                operands.update(axes)
            if name is not None:
                for axis in axes:
                    votes.setdefault(axis, collections.Counter())[name] += _bytes(array)
                    if i >= number:
                        wanted.setdefault(axis, []).append(name)
    shards, owned = Shards(mesh, {}), set()
    for axis, count in votes.items():
        for name, _ in count.most_common():
            if factors.fits(name, shards.parts(name) * mesh.shape[axis]):
                shards = shards.give(name, axis)
                owned.add(axis)
                break
    for axis, kept in wanted.items():
        shards = shards.scatter(factors, axis, kept)
    return shards, sorted(operands - owned)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Grid:
    """The devices by axes of prime size: XLA may split an array by part of a mesh axis.

    Attributes:
      local: those among which XLA splits the call, as it numbers them.
      whole: those of the program, for sums over devices. It has the axes of `local` and others.
    """

    local: Mesh
    whole: Mesh


def grid_of(place: compat.Place, compass: Sequence[Any], arrays: Sequence[Any]) -> Grid:
    """The grid by whose axes the most bytes are split.

    With axes of 2 and 3 devices it matters which of them comes first.
    """
    number = len(place.asked)
    numbers = _numbers(place, compass[0].sharding) if compass else tuple(range(number))
    grids = [grid for sizes in _orders(number) if (grid := _of_order(place, numbers, sizes))]

    def understood(grid: Grid) -> int:
        known = (_splits(a.sharding, len(a.shape), grid.local) is not None for a in arrays)
        return sum(_bytes(a) for a, yes in zip(arrays, known, strict=True) if yes)

    return max(grids, key=understood)


def _orders(number: int) -> list[tuple[int, ...]]:
    """The prime factors of a number in each order."""
    primes = [
        n for n in range(2, number + 1) if number % n == 0 and all(n % k for k in range(2, n))
    ]
    return [(p, *rest) for p in primes for rest in _orders(number // p)] or [()]


@functools.lru_cache(maxsize=1024)
def _of_order(place: compat.Place, numbers: tuple[int, ...], sizes: tuple[int, ...]) -> Grid | None:
    """The grid of axes of these sizes; None if they do not lie along axes of the program."""
    names = tuple(f"d{i}" for i in range(len(sizes)))
    strides = _strides(np.reshape(numbers, sizes))
    if strides is None:
        return None
    axes = sorted(zip(strides, sizes, names, strict=True), reverse=True)
    whole: list[tuple[str, int]] = []
    left = len(place.devices)  # consecutive devices that the axes so far do not tell apart
    for stride, size, name in axes:
        whole += [(f"other{len(whole)}", left // (stride * size)), (name, size)]
        left = stride
    whole.append((f"other{len(whole)}", left))
    return Grid(
        Mesh(np.reshape(np.array(place.asked), sizes), names),
        Mesh(
            np.reshape(np.array(place.devices), [size for _, size in whole]),
            tuple(name for name, _ in whole),
        ),
    )


def _strides(numbers: np.ndarray) -> tuple[int, ...] | None:
    """By how much numbers grow along each axis of an array; None unless they do so steadily."""
    steps = [
        int(np.take(numbers, 1, axis).flat[0] - numbers.flat[0]) for axis in range(numbers.ndim)
    ]
    places = np.indices(numbers.shape)
    steady = numbers.flat[0] + np.tensordot(np.array(steps, int), places, 1)
    return tuple(steps) if np.array_equal(numbers, steady) else None


@functools.lru_cache(maxsize=1024)
def _splits(sharding: Sharding, rank: int, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes that split each axis of an array, outermost first; None where others do."""
    # In an array of so many elements along each axis all shards are equal.
    indices = sharding.devices_indices_map((mesh.size,) * rank)
    result = []
    for axis in range(rank):
        slices = [indices[device][axis].indices(mesh.size) for device in mesh.devices.flat]
        strides = _strides(np.reshape([start for start, _, _ in slices], mesh.devices.shape))
        if strides is None:
            return None
        steps = dict(zip(mesh.axis_names, strides, strict=True))
        result.append(tuple(sorted((n for n in steps if steps[n]), key=lambda n: -steps[n])))
    return tuple(result)


# The compass


def compass_type(place: compat.Place) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(place.sizes, np.dtype(np.int8))] if place.axes else []


def compass(place: compat.Place) -> list[jax.Array]:
    """An array of an element for each device among which XLA splits a call.

    Each automatic axis of the mesh splits one of its axes. So its sharding says which device of the
    mesh has which of XLA's numbers.
    """
    if not place.axes:
        return []
    with jax.sharding.use_abstract_mesh(place.mesh):
        needle = jax.lax.broadcast(np.int8(0), place.sizes)
        return [jax.lax.with_sharding_constraint(needle, PartitionSpec(*place.axes))]


def _numbers(place: compat.Place, compass: Sharding) -> tuple[int, ...]:
    """For each device that XLA numbers, how far in the program it is behind the first one."""
    indices = compass.devices_indices_map(place.sizes)
    return tuple(
        sum(
            index.indices(size)[0] * stride
            for index, size, stride in zip(indices[d], place.sizes, place.strides, strict=True)
        )
        for d in place.asked
    )
