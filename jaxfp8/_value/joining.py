"""8-bit arrays joined: codes stay as they are, and each keeps its scales.

Tiles of the result have one size per axis. So a scale may be repeated. No code is rounded again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value.checks import as_index
from jaxfp8._value.dtypes import INT32, as_bytes, bits_as
from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray, adopt, check_qarray
from jaxfp8._value.scales import granularity
from jaxfp8._value.spec import Shape
from jaxfp8._value.tiles import repeated
from jaxfp8._value.transposed import TransposedArray, view

_ALIKE = "quantize all of them alike, or join what `jaxfp8.dequantize` gives"


def concatenate(arrays: Sequence[Any], axis: int = 0) -> QArray | TransposedArray:
    """8-bit arrays as one along an axis, as `jnp.concatenate` does it with arrays.

    `dequantize(concatenate(arrays)) == jnp.concatenate(map(dequantize, arrays))`, value by value.
    Along `axis` tiles keep their size if all begin at a multiple of it. Scales per tensor become
    scales per channel of `axis`; other tiles become as small as needed. Along the other axes a
    scale shared by all values is repeated to match finer tiles.

    Args:
      arrays: `QArray`s, or views of them, of one 8-bit dtype; their shapes may differ along `axis`
        alone.
      axis: the axis that grows.

    Returns:
      A `QArray`; a view if all arrays are views of one order. `jnp.promote_types` decides the dtype
      of mixed scales.

    Raises:
      TypeError: one of them is no 8-bit array.
      ValueError: their dtypes differ, or shapes, or tiles along another axis; there is none.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> q, k = (jaxfp8.quantize(jnp.ones((n, 32))) for n in (64, 16))  # one scale each
      >>> concatenate([q, k])
      QArray(float8_e4m3fn[80,32], scale=float32[80,1])
    """
    operation, operand = "jaxfp8.concatenate", "arrays"
    held = _held(operation, operand, arrays)
    return joined(operation, operand, held, _place(operation, axis, held[0].ndim))


def stack(arrays: Sequence[Any], axis: int = 0) -> QArray | TransposedArray:
    """8-bit arrays of one shape as one with a new axis, as `jnp.stack` does it with arrays.

    Args:
      arrays: as for `concatenate`, of one shape.
      axis: the place of the new axis. Each array has its own scales along it.

    Returns:
      As `concatenate`.

    Raises:
      TypeError, ValueError: as `concatenate`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> layers = [jaxfp8.quantize(jnp.ones((8, 4)), channelwise_axes=(0,)) for _ in range(3)]
      >>> stack(layers)
      QArray(float8_e4m3fn[3,8,4], scale=float32[3,8,1])
    """
    operation, operand = "jaxfp8.stack", "arrays"
    held = _held(operation, operand, arrays)
    return stacked(operation, operand, held, _place(operation, axis, held[0].ndim + 1))


def joined(operation: str, operand: str, held: Sequence[Any], axis: int) -> Any:
    """`concatenate` of arrays held in 8 bits; errors name the operation and operand."""
    if len(held) == 1:
        return held[0]
    order = _order(held)
    if order is None:
        return _joined(operation, operand, [_contiguous(q) for q in held], axis)
    return view(_joined(operation, operand, [q.stored for q in held], order[axis]), order)


def stacked(operation: str, operand: str, held: Sequence[Any], axis: int) -> Any:
    """`stack` of arrays held in 8 bits."""
    order = _order(held)
    if order is None:
        new = (slice(None),) * axis + (None,)
        return joined(operation, operand, [_contiguous(q)[new] for q in held], axis)
    whole = joined(operation, operand, [q.stored[None] for q in held], 0)
    grown = [stored + 1 for stored in order]
    return view(whole, (*grown[:axis], 0, *grown[axis:]))


def _held(operation: str, operand: str, arrays: Any) -> list[Any]:
    """The arrays, checked."""
    if isinstance(arrays, QArray | TransposedArray) or not isinstance(arrays, Sequence):
        got, needs = f"is of type {type(arrays).__name__}", "a list of 8-bit arrays is needed"
        raise TypeError(message(operation, f"`{operand}`", got, needs, "write it like `[a, b]`"))
    if not arrays:
        needs = "one array at least is needed"
        raise ValueError(message(operation, f"`{operand}`", "is empty", needs, "give some"))
    held = [adopt(array) for array in arrays]
    for number, array in enumerate(held):
        name = f"{operand}[{number}]"
        if not isinstance(array, QArray | TransposedArray):
            got, needs = f"is of type {type(array).__name__}", "a QArray or a view is needed"
            remedy = "quantize it, or join what `jaxfp8.dequantize` gives of the others"
            if hasattr(array, "unprepare"):  # no import: joined arrays are below prepared ones
                remedy = "join what `unprepare()` gives of each, and prepare the result"
            raise TypeError(message(operation, f"`{name}`", got, needs, remedy))
        check_qarray(getattr(array, "stored", array), operation, name)
    return held


def _place(operation: str, axis: Any, rank: int) -> int:
    """An axis counted from the first."""
    place = as_index(axis)
    if place is None or not -rank <= place < rank:
        needs = f"an int from {-rank} to {rank - 1} is needed" if rank else "a scalar has no axis"
        remedy = "name an axis that there is" if rank else "use `jaxfp8.stack`"
        raise ValueError(message(operation, "`axis`", f"is {axis!r}", needs, remedy))
    return place % rank


def _order(held: Sequence[Any]) -> Shape | None:
    """The axes of views if they all have one order, else None."""
    orders = {q.axes if isinstance(q, TransposedArray) else None for q in held}
    return orders.pop() if len(orders) == 1 else None


def _contiguous(q: Any) -> Any:
    return q.contiguous() if isinstance(q, TransposedArray) else q


def _joined(operation: str, operand: str, parts: Sequence[QArray], axis: int) -> QArray:
    _check_alike(operation, operand, parts, axis)
    size = sum(q.shape[axis] for q in parts)
    shape = (*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :])
    tiles = _tiles(operation, operand, parts, axis)
    grain = granularity(shape, {a: t for a, t in enumerate(tiles) if t < shape[a]})
    counts = [_counts(q, grain.counts, axis, tiles[axis]) for q in parts]
    pairs = list(zip(parts, counts, strict=True))
    dtype = _scale_dtype(parts)
    scales = [_spread(q, q.scale, tiles, count, dtype) for q, count in pairs]
    zeros = None
    if any(q.zero_point is not None for q in parts):
        kind = _zero_dtype(parts)
        none = np.zeros((), kind)
        all_zeros = [none if q.zero_point is None else q.zero_point for q in parts]
        zeros = concatenated(
            [
                _spread(q, z, tiles, count, kind)
                for (q, count), z in zip(pairs, all_zeros, strict=True)
            ],
            axis,
        )
    codes = concatenated([q.qvalue for q in parts], axis)
    return QArray(codes, concatenated(scales, axis), zeros, tiles=grain.stated_tiles)


def _check_alike(operation: str, operand: str, parts: Sequence[QArray], axis: int) -> None:
    """Refuses codes of several dtypes, and shapes unequal along another axis."""
    dtypes = list(dict.fromkeys(np.dtype(q.qvalue.dtype).name for q in parts))
    if len(dtypes) > 1:
        got, needs = f"hold codes of {' and '.join(dtypes)}", "one dtype is needed"
        raise ValueError(message(operation, f"`{operand}`", got, needs, _ALIKE))
    others = {(*q.shape[:axis], *q.shape[axis + 1 :]) for q in parts}
    if len(others) > 1 or len({q.ndim for q in parts}) > 1:
        got = f"have shapes {', '.join(str(tuple(q.shape)) for q in parts)}"
        needs = f"they may differ along axis {axis} alone"
        raise ValueError(message(operation, f"`{operand}`", got, needs, "cut or reshape them"))


def _tiles(operation: str, operand: str, parts: Sequence[QArray], axis: int) -> Shape:
    """The tiles of the result: the pieces' own, except along `axis`."""
    shape = parts[0].shape
    tiles = [tiles_within(q) for q in parts]
    sizes: list[int] = []
    for other in range(len(shape)):
        if other == axis:
            sizes.append(0)
            continue
        given = sorted({t[other] for t in tiles if t[other] < shape[other]})
        if len(given) > 1:
            got = f"have tiles of {' and '.join(map(str, given))} along axis {other}"
            needs = "one size, or one scale for the whole axis, is needed"
            raise ValueError(message(operation, f"`{operand}`", got, needs, _ALIKE))
        sizes.append(given[0] if given else max(shape[other], 1))
    is_shared = any(a != axis and 1 < shape[a] == t for a, t in enumerate(sizes))
    sizes[axis] = _tile_along(
        [(q.shape[axis], t[axis]) for q, t in zip(parts, tiles, strict=True)], is_shared
    )
    return tuple(sizes)


def tiles_within(q: Any) -> Shape:
    """Sizes of the tiles, none larger than its axis."""
    return tuple(min(tile, size) for tile, size in zip(q.tile_sizes, q.shape, strict=True))


def _tile_along(pieces: Sequence[tuple[int, int]], is_shared: bool) -> int:
    """The tile of the joined axis, from each piece's size and tile.

    Pieces with one scale each get one scale per index if another axis shares it. Kernels and
    servers know this granularity. Otherwise the scale would be as large as the values.
    """
    pieces = [(size, tile) for size, tile in pieces if size]
    if is_shared and all(size == tile for size, tile in pieces):
        return 1
    ends = itertools.accumulate(size for size, _ in pieces[:-1])
    return math.gcd(*ends, *(tile for size, tile in pieces if tile < size)) or 1


def _counts(q: QArray, counts: Shape, axis: int, tile: int) -> Shape:
    """Tiles of one piece, by axis."""
    return (*counts[:axis], -(-q.shape[axis] // tile), *counts[axis + 1 :])


def _spread(q: QArray, leaf: Any, tiles: Shape, counts: Shape, dtype: np.dtype) -> jax.Array:
    """A scale or zero point of a piece with an entry for each of the new tiles."""
    leaf = jnp.asarray(leaf)
    values = as_bytes(leaf if leaf.dtype == dtype else leaf.astype(dtype))
    values = values.reshape(values.shape or (1,) * len(counts))
    for axis, (old, new) in enumerate(zip(tiles_within(q), tiles, strict=True)):
        if values.shape[axis] > 1 and old != new:
            values = repeated(values, axis, old // new, counts[axis])
    return bits_as(jnp.broadcast_to(values, counts), dtype)


def _scale_dtype(parts: Sequence[QArray]) -> np.dtype:
    """The common dtype of the scales, or one able to hold each."""
    own = {np.dtype(q.scale.dtype) for q in parts}
    if len(own) == 1:
        return own.pop()
    return np.dtype(functools.reduce(jnp.promote_types, [q.dtype for q in parts]))


def _zero_dtype(parts: Sequence[QArray]) -> np.dtype:
    """The dtype of the codes, unless a zero point has another."""
    own = {np.dtype(q.zero_point.dtype) for q in parts if q.zero_point is not None}
    return own.pop() if len(own) == 1 else INT32


def concatenated(leaves: Sequence[Any], axis: int) -> jax.Array:
    """Arrays of one dtype as one. XLA:CPU widens float8 to join it, so float8 goes as bytes."""
    dtype = np.dtype(leaves[0].dtype)
    return bits_as(jnp.concatenate([as_bytes(jnp.asarray(leaf)) for leaf in leaves], axis), dtype)
