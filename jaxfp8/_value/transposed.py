"""A view of a `QArray` with its axes in another order, without a copy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value.checks import as_index
from jaxfp8._value.errors import message
from jaxfp8._value.indexing import axes_of, entries
from jaxfp8._value.operators import MatmulOperator
from jaxfp8._value.spec import Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TransposedArray(MatmulOperator):
    """A `QArray` with its axes read in another order: `q.T`, `q.mT`, `q.transpose(axes)`.

    Nothing is moved: products read the stored array through their dimension numbers. An [N, K]
    weight, as torch stores it, multiplies as `x @ w.T`. It is an operand of `dot_general`,
    `matmul`, `einsum` and `recipe_dot_general`, and the weight of a layer.

    It is a pytree of the arrays of `stored`. The order counts axes from the last, so `vmap` and
    `scan` may split and stack it along the leading axes. Later `out_axes` would put the new axis
    into `stored`.

    Attributes:
      stored: the `QArray` as it lies in memory.
      order: the last `len(order)` axes are these of `stored`, counted from its last: (-1, -2) for
        a transposed matrix.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.ones((4, 8)), channelwise_axes=(0,))
      >>> w.T, (jnp.ones((2, 8)) @ w.T).shape
      (TransposedArray(QArray(float8_e4m3fn[4,8], scale=float32[4,1]), order=(-1, -2)), (2, 4))
    """

    stored: Any
    order: Shape = dataclasses.field(metadata={"static": True})

    @property
    def axes(self) -> Shape:
        """By axis, the same axis in `stored`, counted from the first."""
        rank = self.stored.ndim
        return (*range(rank - len(self.order)), *(rank + axis for axis in self.order))

    @property
    def shape(self) -> Shape:
        """Shape of the values, in the order of the view."""
        return tuple(self.stored.shape[axis] for axis in self.axes)

    @property
    def ndim(self) -> int:
        """Number of axes of the values."""
        return self.stored.ndim

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.stored.shape)

    @property
    def dtype(self) -> np.dtype:
        """The float dtype this array stands for, as for a `QArray`."""
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales and zero points."""
        return self.stored.nbytes

    @property
    def tile_sizes(self) -> Shape:
        """Size of the tile along every axis, in the order of the view."""
        return tuple(self.stored.tile_sizes[axis] for axis in self.axes)

    @property
    def T(self) -> Any:
        """The axes in reverse; of a transposed matrix, the stored `QArray`."""
        return self.transpose()

    @property
    def mT(self) -> Any:
        """The last two axes exchanged."""
        return matrix_transposed(self)

    def transpose(self, axes: Sequence[int] | None = None) -> Any:
        """The axes in another order, by default in reverse.

        Args:
          axes: by axis of the result, the axis of this view.
        """
        order = permutation("jaxfp8.TransposedArray.transpose", axes, self.ndim)
        return view(self.stored, tuple(self.axes[axis] for axis in order))

    def contiguous(self) -> Any:
        """A copy as a `QArray`, stored in the order of the view.

        Example:
          >>> import jax.numpy as jnp, jaxfp8
          >>> jaxfp8.quantize(jnp.ones((4, 8)), channelwise_axes=(0,)).T.contiguous()
          QArray(float8_e4m3fn[8,4], scale=float32[1,4])
        """
        q = self.stored
        given = (q.tiles or ())[-self.ndim :]
        tiles = [*[None] * (self.ndim - len(given)), *given]
        moved = [tiles[axis] for axis in self.axes]
        return dataclasses.replace(
            q,
            qvalue=jnp.transpose(q.qvalue, self.axes),
            scale=self._moved(q.scale),
            zero_point=None if q.zero_point is None else self._moved(q.zero_point),
            tiles=None if q.tiles is None else tuple(moved),
        )

    def _moved(self, leaf: jax.Array) -> jax.Array:
        return jnp.transpose(leaf, self.axes) if leaf.ndim else leaf

    def __getitem__(self, index: Any) -> Any:
        """As `QArray.__getitem__`, without new axes.

        Raises:
          IndexError: it has a new axis, or as there.
        """
        along = entries(self, index)
        if any(entry is None for entry in along):
            got, needs = "has a new axis", f"{self!r} is read through the axes of `stored`"
            remedy = "index `stored`, or what `contiguous` gives"
            raise IndexError(message("jaxfp8.TransposedArray", "index", got, needs, remedy))
        by_stored = [along[self.axes.index(axis)] for axis in range(self.ndim)]
        ends = list(itertools.accumulate(map(axes_of, by_stored), initial=0))
        order = [a for axis in self.axes for a in range(ends[axis], ends[axis + 1])]
        return view(self.stored[tuple(by_stored)], tuple(order))

    def __repr__(self) -> str:
        """The stored array, and the order of its axes."""
        return f"TransposedArray({self.stored!r}, order={self.order})"


def is_view(leaf: Any) -> TypeGuard[TransposedArray]:
    """Whether a leaf is such a view."""
    return isinstance(leaf, TransposedArray)


def view(stored: Any, axes: Shape) -> Any:
    """`stored` with its axes in an order, counted from the first; itself if they are in order."""
    rank = len(axes)
    lead = 0
    while lead < rank and axes[lead] == lead:
        lead += 1
    if lead == rank:
        return stored
    return TransposedArray(stored, tuple(axis - rank for axis in axes[lead:]))


def matrix_transposed(array: Any) -> Any:
    """The last two axes exchanged."""
    rank = array.ndim
    if rank < 2:
        got, needs = f"has {rank} axes", "two at least are needed"
        raise ValueError(message("jaxfp8.QArray.mT", "the array", got, needs, "reshape it first"))
    return array.transpose((*range(rank - 2), rank - 1, rank - 2))


def permutation(operation: str, axes: Sequence[int] | None, rank: int) -> Shape:
    """A checked order of axes, counted from the first; in reverse if none is given."""
    if axes is None:
        return tuple(reversed(range(rank)))
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    order = [axis for axis in map(as_index, given) if axis is not None and -rank <= axis < rank]
    order = [axis % rank for axis in order]
    if sorted(order) != list(range(rank)) or len(given) != rank:
        needs = f"each of {rank} axes is needed once"
        remedy = "give their order, such as (1, 0)"
        raise ValueError(message(operation, "`axes`", f"is {given}", needs, remedy))
    return tuple(order)
