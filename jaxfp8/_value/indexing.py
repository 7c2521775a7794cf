"""A part of a `QArray`: its codes at an index, and the entries of its scale for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._value.checks import as_index
from jaxfp8._value.dtypes import is_byte_float
from jaxfp8._value.errors import message
from jaxfp8._value.picking import bytes_to_pick
from jaxfp8._value.spec import Shape

_OPERATION = "jaxfp8.QArray"
_REMEDY = "index along whole tiles, or dequantize it first"


def part(q: Any, index: Any, tiles: Shape) -> Any:
    """`q[index]` of a `QArray` with tiles of these sizes, as for a JAX array if scales allow it."""
    along, axis = [], 0
    for entry in entries(q, index):
        along.append(None if entry is None else _Along(entry, axis, q.shape[axis], tiles[axis]))
        axis += entry is not None
    _check_arrays([one for one in along if one])
    given = (q.tiles or ())[-q.ndim :] if q.ndim else ()
    padded = [*[None] * (q.ndim - len(given)), *given]
    kept = [tile for one in along for tile in (one.tiles(padded) if one else [None])]

    def shared(leaf: Any) -> Any:
        return _taken(leaf, [one and one.of_scale(leaf) for one in along])

    return dataclasses.replace(
        q,
        qvalue=_taken(q.qvalue, [one and one.index for one in along]),
        scale=shared(q.scale),
        zero_point=None if q.zero_point is None else shared(q.zero_point),
        tiles=None if q.tiles is None else tuple(kept),
    )


def entries(q: Any, index: Any) -> list[Any]:
    """An index with an entry for every axis, and None for each new one."""
    given = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, entry in enumerate(given) if entry is Ellipsis]
    named = sum(entry is not None and entry is not Ellipsis for entry in given)
    if named > q.ndim:
        got, needs = f"has {named} axes", f"{q!r} has {q.ndim}"
        raise IndexError(message(_OPERATION, "index", got, needs, "name fewer"))
    if len(places) > 1:
        got, needs = f"has {len(places)} ellipses", "one stands for all axes that are left"
        raise IndexError(message(_OPERATION, "index", got, needs, "leave one out"))
    at = places[0] if places else len(given)
    return [*given[:at], *[slice(None)] * (q.ndim - named), *given[at + 1 :]]


def axes_of(entry: Any) -> int:
    """The number of result axes from an index."""
    return 1 if entry is None or isinstance(entry, slice) else getattr(entry, "ndim", 0)


def _check_arrays(along: list[Any]) -> None:
    """Refuses an array with other arrays or ints: its axes would move elsewhere."""
    arrays = [one for one in along if one.is_array]
    if arrays and (len(arrays) > 1 or any(one.drops for one in along)):
        got, needs = "has an array beside other arrays or ints", "one array of ints is taken"
        raise IndexError(message(_OPERATION, "index", got, needs, "index one after the other"))


class _Along:
    """An index along one axis of a size, with tiles of a size."""

    def __init__(self, index: Any, axis: int, size: int, tile: int) -> None:
        self.axis, self.size, self.tile = axis, size, tile
        self.is_array = not isinstance(index, slice) and getattr(index, "ndim", 0) > 0
        self.drops = not (isinstance(index, slice) or self.is_array)
        self.is_tiled = 1 < tile < size
        self.index: Any = (self._slice if isinstance(index, slice) else self._place)(index)

    def _place(self, index: Any) -> Any:
        place = None if isinstance(index, jax.core.Tracer) else as_index(index)
        if place is None or self.is_array:
            return self._places(index)
        if not -self.size <= place < self.size:
            got, needs = f"is {place}", f"the axis has {self.size}"
            raise IndexError(message(_OPERATION, "index", got, needs, "name one that there is"))
        return place % self.size

    def _places(self, index: Any) -> Any:
        """Traced ints, and arrays of ints."""
        if not hasattr(index, "dtype") or not jnp.issubdtype(index.dtype, jnp.integer):
            got = f"is {index!r}" if not self.is_array else f"is an array of {index.dtype}"
            needs = "an int or a slice, None, `...` or an array of ints is needed"
            raise TypeError(message(_OPERATION, "index", got, needs, _REMEDY))
        if self.is_array and self.is_tiled:
            self._refuse("is an array")
        return jnp.where(index < 0, index + self.size, index)

    def _slice(self, index: slice) -> slice:
        start, stop, step = index.indices(self.size)
        if not self.is_tiled:
            return index
        if not range(start, stop, step):
            return slice(0, 0)
        if step != 1 or start % self.tile or (stop % self.tile and stop != self.size):
            self._refuse(f"is {index}")
        return slice(start, stop)

    def _refuse(self, got: str) -> None:
        needs = f"tiles of {self.tile} have to be whole, in steps of 1"
        raise IndexError(message(_OPERATION, "index", got, needs, _REMEDY))

    def tiles(self, given: list[int | None]) -> list[int | None]:
        """The field `QArray.tiles` for the axes of the result."""
        if self.is_array:
            return [None] * self.index.ndim
        return [] if self.drops else [given[self.axis]]

    def of_scale(self, scale: Any) -> Any:
        """The same along an axis of a scale: its entries are tiles, or one shared entry."""
        if not len(scale.shape) or scale.shape[self.axis] == 1:
            if self.is_array:
                return jnp.zeros((1,) * self.index.ndim, jnp.int32)
            return 0 if self.drops else slice(None)
        if not isinstance(self.index, slice):
            return self.index // self.tile
        if not self.is_tiled:
            return self.index
        return slice(self.index.start // self.tile, -(-self.index.stop // self.tile))


def _taken(leaf: Any, indices: list[Any]) -> Any:
    """A part of an array. XLA:CPU widens float8 to slice it, so one-byte dtypes go as bytes."""
    if not leaf.ndim:
        return leaf
    if not is_byte_float(leaf.dtype):
        return leaf[tuple(indices)]
    places = [index for index in indices if isinstance(index, jax.core.Tracer)]
    codes = bytes_to_pick(leaf, places)[tuple(indices)]
    return jax.lax.bitcast_convert_type(codes, leaf.dtype)
