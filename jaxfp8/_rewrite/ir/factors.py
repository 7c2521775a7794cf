"""Factors: small arrays in place of large ones, such as scales and zero points."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfp8._rewrite.ir import casts, constants, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A large array in compact form: each entry of `small` fills a tile.

    Invariant: `small.shape == tile_counts(shape, tiles)`, for the `shape` of the large array.
    """

    small: Value
    tiles: Shape

    @property
    def is_mask(self) -> bool:
        """Whether it is a mask (`rules/masks`), and no scale."""
        return self.small.dtype == np.dtype(bool)

    def at(self, shape: Shape) -> Factor:
        """The factor broadcast to `shape`, of the same rank; one of rank 0 fits any shape."""
        if not self.tiles and shape:
            return Factor(graph.reshape(self.small, (1,) * len(shape)), full_tiles(shape))
        stretched = [
            size if count == 1 else tile
            for size, count, tile in zip(shape, self.small.shape, self.tiles, strict=True)
        ]
        return Factor(self.small, tuple(max(t, 1) for t in stretched))

    def varying(self) -> Shape:
        """Axes along which the factor is not constant."""
        return tuple(axis for axis, count in enumerate(self.small.shape) if count > 1)

    def placed(self, sources: Sequence[int | None], shape: Shape) -> Factor:
        """The factor of an array of `shape`: its axis i is axis `sources[i]` here.

        It is constant along an axis without a source. An axis in no source has one entry.
        """
        kept = [axis for axis in sources if axis is not None]
        small = self.small
        if kept != sorted(kept):
            small = graph.reshape(small, tuple(small.shape[axis] for axis in sorted(kept)))
            small = graph.transpose(small, tuple(sorted(kept).index(axis) for axis in kept))
        counts = tuple(1 if axis is None else self.small.shape[axis] for axis in sources)
        tiles = tuple(
            max(size, 1) if axis is None else self.tiles[axis]
            for axis, size in zip(sources, shape, strict=True)
        )
        return Factor(graph.reshape(small, counts), tiles)

    def reshaped(self, shape: Shape, new_shape: Shape) -> Factor | None:
        """The factor after a reshape of its large array; None if a tile would be cut."""
        tiled = _tiles.reshape(shape, self.tiles, new_shape)
        return Factor(graph.reshape(self.small, tiled[0]), tiled[1]) if tiled else None

    def map_small(self, function: Callable[[Value], Value]) -> Factor:
        """The factor with `function` applied to its small array."""
        return Factor(function(self.small), self.tiles)


Factors = tuple[Factor, ...]


def full_tiles(shape: Shape) -> Shape:
    """The tiles of a constant factor over `shape`."""
    return tuple(max(size, 1) for size in shape)


def factor_of(value: Value) -> Factor:
    """A value as a factor with tiles of one element."""
    return Factor(value, (1,) * len(value.shape))


def constant(number: float, shape: Shape) -> Factor:
    """A number as a factor of a value of `shape`."""
    return Factor(graph.literal(number, np.float32), ()).at(shape)


def combine(factors: Factors, shape: Shape) -> Factor:
    """The product of one or more factors, as one factor in float32."""
    tiles = _tiles.common(shape, [f.tiles for f in factors])
    smalls = [casts.cast(refine(f, shape, tiles), np.float32) for f in factors]
    total = functools.reduce(graph.multiply, smalls)
    return Factor(fill(total, tile_counts(shape, tiles)), tiles)


def each(op: Op, inputs: Sequence[Factors]) -> Factors | None:
    """An elementwise op on products of factors, as one factor with the rounding of the op.

    None if the result has more entries than the largest factor.
    """
    out = op.outputs[0]
    factors = [f for product in inputs for f in product]
    tiles = _tiles.common(out.shape, [f.tiles for f in factors])
    counts = tile_counts(out.shape, tiles)
    if math.prod(counts) > max(f.small.size for f in factors):
        return None
    given = list(zip(inputs, op.inputs, strict=True))
    numbers = [_known(product, x.dtype) for product, x in given]
    if all(number is not None for number in numbers):
        with np.errstate(all="ignore"):
            result = _IN_NUMPY[op.name](*numbers).astype(out.dtype)
        return (Factor(graph.literal(result), ()).at(out.shape),)
    small = [_as_read(on_tiles(as_one(f, out.shape), out.shape, tiles), x) for f, x in given]
    return (Factor(graph.replay(op, small, counts, out.dtype), tiles),)


def _as_read(small: Value, value: Value) -> Value:
    """The entries of `value` in its dtype, with the roundings of the function."""
    small = casts.cast(small, value.dtype)
    return casts.rounded(small) if casts.was_spread(value) else small


# The operations of `each` in NumPy. Tracing a function must not run anything on a device.
_IN_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "convert_element_type": np.asarray,
    "mul": np.multiply,
    "div": np.divide,
}


def _known(factors: Factors, dtype: np.dtype) -> np.ndarray | None:
    """The product of factors computed in float32, if all are known numbers; else None."""
    numbers = [constants.number(f.small) for f in factors]
    known = [np.float32(number) for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    with np.errstate(all="ignore"):
        return np.prod(known, dtype=np.float32).astype(dtype)


def as_one(factors: Factors, shape: Shape) -> Factor:
    """The product of factors as one factor: in float32, or as it is if there is only one."""
    is_one = len(factors) == 1 and factors[0].small.dtype in dtypes.WIDE_FLOAT
    return factors[0] if is_one else combine(factors, shape)


def total(factors: Factors, shape: Shape) -> Factor:
    """The product of any number of factors, as one factor in float32."""
    return combine((*factors, constant(1.0, shape)), shape)


def refine(factor: Factor, shape: Shape, tiles: Shape) -> Value:
    """The small array of a factor for finer tiles; its constant axes keep size 1."""
    counts = tuple(
        1 if count == 1 else -(-size // tile)
        for size, tile, count in zip(shape, tiles, factor.small.shape, strict=True)
    )
    times = tuple(old // new for old, new in zip(factor.tiles, tiles, strict=True))
    return graph.repeat(factor.small, times, counts)


def on_tiles(factor: Factor, shape: Shape, tiles: Shape) -> Value:
    """The small array of a factor with an entry for each of the finer tiles."""
    return fill(refine(factor, shape, tiles), tile_counts(shape, tiles))


def fill(small: Value, counts: Shape) -> Value:
    """The small array with axes of size 1 stretched to `counts`."""
    if small.shape == counts:
        return small
    times = tuple(max(counts, default=1) for _ in counts)
    return graph.repeat(small, times, counts)


def all_moved(parts: Sequence[Any], move: Callable[[Any], Factor | None]) -> Factors | None:
    """The factors made of parts, such as factors moved; None if one of them cannot be."""
    moved = tuple(own for part in parts if (own := move(part)) is not None)
    return moved if len(moved) == len(parts) else None
