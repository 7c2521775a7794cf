"""The devices of a call that XLA splits, and the mesh axes of each factor.

The table follows XLA's shardings of the arrays; XLA moves an array with another split.

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

# The number of large operands: the two sides of a product.
_LARGE = 2


def choose_shards(mesh: Mesh, factors: Factors, arrays: Sequence[Any]) -> tuple[Shards, list[str]]:
    """Gives each mesh axis to the factor with the most bytes already split along it.

    Returns the shards, and those mesh axes of the operands that can split no factor.
    """
    votes: dict[str, collections.Counter[str]] = {}
    wanted: dict[str, list[str]] = {}  # by mesh axis, its factors in the results
    operands: set[str] = set()  # mesh axes of the multiplied or quantized operands
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
    """The devices by axes of prime size: XLA may split an array by part of a mesh axis."""

    local: Mesh  # the devices of the split call, in XLA's numbering
    # The program's devices, for sums over devices. It has the axes of `local` and others.
    whole: Mesh


def grid_of(place: compat.Place, compass: Sequence[Any], arrays: Sequence[Any]) -> Grid:
    """The grid with the most bytes split along its axes.

    The order of axes matters: 2 x 3 devices are not 3 x 2.
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
    left = len(place.devices)  # consecutive devices, not yet told apart by an axis
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
    """The stride of numbers along each axis of an array; None unless all are constant."""
    steps = [
        int(np.take(numbers, 1, axis).flat[0] - numbers.flat[0]) for axis in range(numbers.ndim)
    ]
    places = np.indices(numbers.shape)
    steady = numbers.flat[0] + np.tensordot(np.array(steps, int), places, 1)
    return tuple(steps) if np.array_equal(numbers, steady) else None


@functools.lru_cache(maxsize=1024)
def _splits(sharding: Sharding, rank: int, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes of each array axis, outermost first; None if others split it."""
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
    """An array with one element for each device of a split call.

    Each automatic axis of the mesh splits one of its axes. Its sharding therefore gives XLA's
    number of each device of the mesh.
    """
    if not place.axes:
        return []
    with jax.sharding.use_abstract_mesh(place.mesh):
        needle = jax.lax.broadcast(np.int8(0), place.sizes)
        return [jax.lax.with_sharding_constraint(needle, PartitionSpec(*place.axes))]


def _numbers(place: compat.Place, compass: Sharding) -> tuple[int, ...]:
    """By XLA's number of a device, its distance in the program from the first one."""
    indices = compass.devices_indices_map(place.sizes)
    return tuple(
        sum(
            index.indices(size)[0] * stride
            for index, size, stride in zip(indices[d], place.sizes, place.strides, strict=True)
        )
        for d in place.asked
    )
