"""A part of a `QArray` along leading axes: its codes, and the entries of its scale for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._value.checks import as_index
from jaxfp8._value.errors import message
from jaxfp8._value.picking import bytes_to_pick
from jaxfp8._value.spec import Shape

_OPERATION = "jaxfp8.QArray"
_REMEDY = "index along whole tiles, or dequantise it first"


def part(q: Any, index: Any, tiles: Shape) -> Any:
    """`q[index]`: an int drops a leading axis, a slice of whole tiles keeps it.

    Args:
      q: a `QArray`.
      index: an int (a traced scalar, too) or a slice for each leading axis.
      tiles: size of the tile by axis.

    Raises:
      IndexError: there is no such axis or place, or a slice cuts a tile.
      TypeError: an index is something else.
    """
    indices = list(index) if isinstance(index, tuple) else [index]
    if len(indices) > q.ndim:
        got, needs = f"has {len(indices)} axes", f"{q!r} has {q.ndim}"
        raise IndexError(message(_OPERATION, "index", got, needs, "name fewer"))
    along = [_Along(i, q.shape[a], tiles[a]) for a, i in enumerate(indices)]
    kept = [a for a, axis in enumerate(along) if not axis.drops] + [*range(len(along), q.ndim)]
    given = (q.tiles or ())[-q.ndim :] if q.ndim else ()
    padded = [*[None] * (q.ndim - len(given)), *given]
    zero = q.zero_point
    return dataclasses.replace(
        q,
        qvalue=_taken(q.qvalue, [axis.of_values() for axis in along]),
        scale=_taken(q.scale, [axis.of_scale(q.scale, a) for a, axis in enumerate(along)]),
        zero_point=None
        if zero is None
        else _taken(zero, [axis.of_scale(zero, a) for a, axis in enumerate(along)]),
        tiles=None if q.tiles is None else tuple(padded[a] for a in kept),
    )


class _Along:
    """An index along one axis of a size, with tiles of a size."""

    def __init__(self, index: Any, size: int, tile: int) -> None:
        self.size, self.tile = size, tile
        self.drops = not isinstance(index, slice)
        self.index: Any = self._slice(index) if isinstance(index, slice) else self._place(index)

    def _place(self, index: Any) -> Any:
        place = None if isinstance(index, jax.core.Tracer) else as_index(index)
        if place is None:
            is_scalar = getattr(index, "ndim", None) == 0
            if not is_scalar or not jnp.issubdtype(index.dtype, jnp.integer):
                got, needs = f"is {index!r}", "an int or a slice for each leading axis is needed"
                raise TypeError(message(_OPERATION, "index", got, needs, _REMEDY))
            return jnp.where(index < 0, index + self.size, index)
        if not -self.size <= place < self.size:
            got, needs = f"is {place}", f"the axis has {self.size}"
            raise IndexError(message(_OPERATION, "index", got, needs, "name one that there is"))
        return place % self.size

    def _slice(self, index: slice) -> slice:
        start, stop, step = index.indices(self.size)
        stop = max(start, stop)
        cut = start % self.tile or (stop % self.tile and stop != self.size)
        if step != 1 or (cut and self.tile < self.size):
            got, needs = f"is {index}", f"tiles of {self.tile} have to be whole, in steps of 1"
            raise IndexError(message(_OPERATION, "index", got, needs, _REMEDY))
        return slice(start, stop)

    def of_values(self) -> Any:
        return self.index

    def of_scale(self, scale: Any, axis: int) -> Any:
        """The same along an axis of a scale, whose entries are tiles, or one that is shared."""
        if not len(scale.shape) or scale.shape[axis] == 1:
            return 0 if self.drops else slice(None)
        if self.drops:
            return self.index // self.tile
        return slice(self.index.start // self.tile, -(-self.index.stop // self.tile))


def _taken(leaf: Any, indices: list[Any]) -> Any:
    """A part of an array; one byte wide, as bytes, for XLA:CPU widens float8 that it slices."""
    if not leaf.ndim:
        return leaf
    if leaf.dtype.itemsize > 1 or jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf[tuple(indices)]
    places = [index for index in indices if isinstance(index, jax.core.Tracer)]
    codes = bytes_to_pick(leaf, places)[tuple(indices)]
    return jax.lax.bitcast_convert_type(codes, leaf.dtype)
