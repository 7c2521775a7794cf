"""Tiles: the compact form of a large array, and the effect of each view on it.

An array of `shape` with `tiles` is constant over each tile, so a small array with one entry per
tile holds all of it. A tile of size 1 gives every element along the axis its own entry. A tile of
the axis' size makes the array constant along it. These functions know shapes only. They return None
if the result of a view has no tiles.
"""

from __future__ import annotations

import math

from jaxfp8._value.spec import Shape, tile_counts

Tiled = tuple[Shape, Shape]  # shape of the small array, tiles


def reshape(shape: Shape, tiles: Shape, new_shape: Shape) -> Tiled | None:
    """Tiles after a reshape: `(shape of the small array, new tiles)`."""
    groups = axis_groups(shape, new_shape)
    if groups is None:
        return None
    new_tiles: list[int] = []
    for old, new in groups:
        part = _reshape_group([(shape[a], tiles[a]) for a in old], [new_shape[a] for a in new])
        if part is None:
            return None
        new_tiles += part
    return tile_counts(new_shape, tuple(new_tiles)), tuple(new_tiles)


def axis_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]] | None:
    """The smallest groups of axes of `old` and of `new` with equal products of sizes."""
    if math.prod(old) != math.prod(new) or 0 in old:
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        size_left = size_right = 1
        if i < len(old):
            left, size_left, i = [i], old[i], i + 1
        if j < len(new) and (size_left > 1 or not left or new[j] == 1):
            right, size_right, j = [j], new[j], j + 1
        while size_left != size_right:
            if size_left < size_right:
                left.append(i)
                size_left, i = size_left * old[i], i + 1
            else:
                right.append(j)
                size_right, j = size_right * new[j], j + 1
        groups.append((left, right))
    return groups


def _reshape_group(old: list[tuple[int, int]], new: list[int]) -> list[int] | None:
    """New tiles of one group: old axes as (size, tile), new axes as sizes."""
    if len(old) == 1 and len([n for n in new if n != 1]) <= 1:
        return [old[0][1] if n == old[0][0] != 1 else 1 for n in new]
    runs: list[tuple[bool, int]] = []
    for size, tile in old:
        if size % tile:
            return None
        _append(runs, True, size // tile)
        _append(runs, False, tile)
    tiles = []
    for size in reversed(new):
        taken = _take(runs, size)
        if taken is None:
            return None
        tiles.append(taken)
    return tiles[::-1]


def _append(runs: list[tuple[bool, int]], varying: bool, size: int) -> None:
    """Add a run of `size` varying or constant entries, joined to a last run of its kind."""
    if size == 1:
        return
    if runs and runs[-1][0] == varying:
        runs[-1] = (varying, runs[-1][1] * size)
    else:
        runs.append((varying, size))


def _take(runs: list[tuple[bool, int]], size: int) -> int | None:
    """Take an axis of `size` off the end of `runs`: constant entries first, then varying ones."""
    tile, left, seen_varying = 1, size, False
    while left > 1:
        if not runs:
            return None
        varying, run = runs[-1]
        if seen_varying and not varying:
            return None
        part = math.gcd(run, left)
        if part != min(run, left):
            return None
        runs[-1] = (varying, run // part)
        if runs[-1][1] == 1:
            runs.pop()
        left //= part
        seen_varying |= varying
        tile *= 1 if varying else part
    return tile


def slice_bounds(
    size: int, tile: int, start: int, limit: int, stride: int
) -> tuple[int, ...] | None:
    """`(start, limit, stride, new tile)` of the small array's axis under a slice."""
    if tile >= size:
        return 0, 1, 1, max(-(-(limit - start) // stride), 1)
    if tile == 1:
        return start, limit, stride, 1
    if stride == 1 and start % tile == 0:
        return start // tile, -(-limit // tile), 1, tile
    return None


def common(shape: Shape, many: list[Shape]) -> Shape:
    """The coarsest common refinement of `many`: the tiles of their product."""
    out = []
    for axis, size in enumerate(shape):
        finer = [tiles[axis] for tiles in many if tiles[axis] < size]
        out.append(math.gcd(*finer) if finer else max(size, 1))
    return tuple(out)
