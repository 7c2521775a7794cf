"""The value: 8-bit numbers and their scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value.checks import as_index, has_data, has_dtype, is_array, type_error, value_error
from jaxfp8._value.dtypes import (
    EIGHT_BIT,
    INT32,
    SCALE,
    WIDE_FLOAT,
    is_eight_bit,
    is_float8,
    names,
    of_exponents,
)
from jaxfp8._value.errors import message
from jaxfp8._value.indexing import part
from jaxfp8._value.operators import MatmulOperator
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import matrix_transposed, permutation, view

Tiles = tuple[int | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QArray(MatmulOperator):
    """An array held in 8 bits: `value = (qvalue - zero_point) * scale`.

    A scale multiplies to dequantize. The values of a tile share one scale: along each axis the
    scale has size 1 (one tile), the size of `qvalue` (tiles of one), or one entry per tile. A
    `QArray` is a pytree, and transformations may put anything in place of its leaves. The
    constructor therefore checks nothing. Every function of a `QArray` checks these invariants:

    - `qvalue` is float8_e4m3fn, float8_e5m2, int8 or uint8.
    - `scale` is float32, bfloat16, float16 or float8_e8m0fnu, and of shape () or the rank of
      `qvalue`, each axis having `ceil(size / tile)` entries.
    - The size of a tile is `size // entries`, unless `tiles` states it. It must be stated if the
      entries do not divide the size.
    - `zero_point` is None, or `qvalue` is int8 or uint8 and the zero point has that dtype or int32.
      Its shape is () or the scale's, but each axis may be 1. If the scale has 1, the zero point may
      have more entries: its tiles then count.

    Attributes:
      qvalue: the 8-bit values.
      scale: their factors.
      zero_point: the code that means 0, or None.
      tiles: sizes of the tiles along the last `len(tiles)` axes, None if derivable. They count from
        the last axis, so `vmap` and `scan` over leading axes keep them; sizes left without an axis
        are 1 or None.

    Example:
      >>> import jax.numpy as jnp
      >>> QArray(jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.ones((1, 8)))
      QArray(float8_e4m3fn[4,8], scale=float32[1,8])
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    tiles: Tiles | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        """Makes `tiles` hashable: they are the static part of the pytree."""
        if isinstance(self.tiles, list):
            object.__setattr__(self, "tiles", tuple(self.tiles))

    @classmethod
    def of(cls, other: Any) -> QArray:
        """The same array from another library's class with these fields, such as `qwix.QArray`.

        Args:
          other: anything with `qvalue`, `scale` and `zero_point`; its tiles divide their axes.

        Returns:
          `other` itself if it is a `QArray`; else a `QArray` of its arrays.

        Raises:
          TypeError: `other` has no such fields.

        Example:
          >>> import types, jax.numpy as jnp
          >>> theirs = types.SimpleNamespace(
          ...     qvalue=jnp.ones((4, 8), jnp.int8), scale=jnp.ones((1, 8)), zero_point=None
          ... )
          >>> QArray.of(theirs)
          QArray(int8[4,8], scale=float32[1,8])
        """
        adopted = adopt(other)
        if isinstance(adopted, QArray):
            return adopted
        got = f"is of type {type(other).__name__}"
        needs, remedy = "`qvalue` and `scale` are needed", "use `jaxfp8.quantize` to make a QArray"
        raise TypeError(message("jaxfp8.QArray.of", "`other`", got, needs, remedy))

    def to(self, kind: Callable[..., Any]) -> Any:
        """The same array as another library's class with these fields, such as `qwix.QArray`.

        Args:
          kind: called with `qvalue`, `scale` and `zero_point` by name.

        Returns:
          The result of `kind`.

        Raises:
          ValueError: a tile is partial; other classes cannot state that.

        Example:
          >>> import jax.numpy as jnp
          >>> sorted(QArray(jnp.ones((4, 8), jnp.int8), jnp.ones((1, 8))).to(dict))
          ['qvalue', 'scale', 'zero_point']
        """
        pairs = zip(self.shape, _entries(self), self.tile_sizes, strict=True)
        if any(size != count * tile for size, count, tile in pairs if count > 1):
            got, needs = f"has tiles {self.tiles}", "tiles that divide their axis are needed"
            remedy = "quantize with a tile size that divides it"
            raise ValueError(message("jaxfp8.QArray.to", f"shape {self.shape}", got, needs, remedy))
        return kind(qvalue=self.qvalue, scale=self.scale, zero_point=self.zero_point)

    @property
    def shape(self) -> Shape:
        """Shape of the values."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the values."""
        return len(self.qvalue.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.qvalue.shape)

    @property
    def dtype(self) -> np.dtype:
        """The float dtype this array stands for: the scale's, or float32 for float8_e8m0fnu."""
        dtype = np.dtype(self.scale.dtype)
        return dtype if dtype in WIDE_FLOAT else np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales and zero points."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    @property
    def tile_sizes(self) -> Shape:
        """Size of the tile along every axis; at least 1."""
        entries = _entries(self)
        return tuple(
            tile or (max(size, 1) if count == 1 else size // count if count else 1)
            for size, count, tile in zip(self.shape, entries, given_tiles(self), strict=True)
        )

    @property
    def T(self) -> Any:
        """The axes in reverse, as a view without a copy; see `TransposedArray`."""
        return self.transpose()

    @property
    def mT(self) -> Any:
        """The last two axes exchanged, as such a view: each matrix of a stack transposed."""
        return matrix_transposed(self)

    def transpose(self, axes: Sequence[int] | None = None) -> Any:
        """The axes in another order, as a view; itself if the order is the same.

        Args:
          axes: by axis of the result, the axis of this array; by default in reverse.

        Returns:
          A `TransposedArray`; no value is moved.

        Raises:
          ValueError: it is no order of the axes.
        """
        return view(self, permutation("jaxfp8.QArray.transpose", axes, self.ndim))

    def __getitem__(self, index: Any) -> QArray:
        """A part, indexed as a JAX array if the scales allow it.

        Codes stay as they are. Along an axis of tiles an index takes one place or whole tiles.
        Along an axis with one scale, or with one for each index, it may be any of these.

        Args:
          index: for each axis an int (traced ones too), a slice, `...`, None for a new axis, or one
            array of ints.

        Raises:
          IndexError: there is no such place, or it cuts a tile.
          TypeError: it is something else.

        Example:
          >>> import jax.numpy as jnp, jaxfp8
          >>> stack = jaxfp8.quantize(jnp.ones((3, 4, 8)), channelwise_axes=(0, 2))
          >>> stack[1]
          QArray(float8_e4m3fn[4,8], scale=float32[1,8])
        """
        return part(self, index, self.tile_sizes)

    def __repr__(self) -> str:
        """Dtypes and shapes, never the values."""
        parts = [_brief(self.qvalue), f"scale={_brief(self.scale)}"]
        if self.zero_point is not None:
            parts.append(f"zero_point={_brief(self.zero_point)}")
        if self.tiles is not None:
            parts.append(f"tiles={self.tiles}")
        return f"QArray({', '.join(parts)})"


def adopt(value: Any) -> Any:
    """A `QArray` from another class with its fields; anything else as it is."""
    if isinstance(value, QArray) or not (hasattr(value, "qvalue") and hasattr(value, "scale")):
        return value
    return QArray(value.qvalue, value.scale, getattr(value, "zero_point", None))


def scale_and_zero_point(q: QArray) -> tuple[jax.Array, jax.Array | None, Shape]:
    """As `stored_factors`, with the scale as float32 and the zero point as int32."""
    scale, zero_point, tiles = stored_factors(q)
    wide = None if zero_point is None else zero_point.astype(jnp.int32)
    of_powers = scale.dtype == np.uint8
    return of_exponents(scale) if of_powers else scale.astype(jnp.float32), wide, tiles


def stored_factors(q: QArray) -> tuple[jax.Array, jax.Array | None, Shape]:
    """Scale and zero point of a checked `q`, both with one entry per tile, and the tiles by axis.

    They have their own dtypes. The gradient of the scale passes; a float8_e8m0fnu scale has none,
    and becomes its bytes.
    """
    entries = tuple(min(n, size) for n, size in zip(_entries(q), q.shape, strict=True))
    scale = jnp.asarray(q.scale)
    if scale.dtype not in WIDE_FLOAT:
        scale = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(scale), jnp.uint8)
    elif scale.size != math.prod(entries):  # its cotangents will be summed
        scale = scale.astype(jnp.float32)
    scale = _spread(scale, entries)
    zero_point = q.zero_point
    if zero_point is not None:
        zero_point = _spread(jnp.asarray(zero_point), entries)
    return scale, zero_point, q.tile_sizes


def check_qarray(q: Any, operation: str, operand: str) -> None:
    """Checks the type of `q`, a `QArray` of data, and its invariants, as `check_shapes` does."""
    check_shapes(q, operation, operand)
    for name, leaf in (("qvalue", q.qvalue), ("scale", q.scale), ("zero_point", q.zero_point)):
        if leaf is not None and not has_data(leaf):
            got, needs = f"is of type {type(leaf).__name__}", "an array of numbers is needed"
            remedy = "pass a jax.Array (inside `jax.eval_shape` for shapes alone)"
            type_error(operation, operand, name, got, needs, remedy)


def check_shapes(q: Any, operation: str, operand: str) -> None:
    """Checks the invariants of `QArray` as far as shapes and dtypes show them.

    Errors name the public `operation` and its `operand`: a TypeError for types and dtypes, a
    ValueError for shapes and tiles that contradict each other.
    """
    _check_leaves(q, operation, operand)
    _check_dtypes(q, operation, operand)
    _check_rank(q, operation, operand)
    _check_tiles(q, operation, operand)
    _check_scale_shape(q, operation, operand)
    _check_zero_point_shape(q, operation, operand)


def _check_leaves(q: Any, operation: str, operand: str) -> None:
    if not isinstance(q, QArray):
        got = f"is of type {type(q).__name__}"
        remedy = "use `jaxfp8.quantize` to make one"
        raise TypeError(message(operation, f"`{operand}`", got, "a QArray is needed", remedy))
    for name in ("qvalue", "scale", "zero_point"):
        leaf = getattr(q, name)
        if not (name == "zero_point" and leaf is None) and not is_array(leaf):
            got = f"is of type {type(leaf).__name__}"
            type_error(
                operation, operand, name, got, "an array is needed", "pass it as a `jax.Array`"
            )


def _check_dtypes(q: QArray, operation: str, operand: str) -> None:
    dtype, scale = np.dtype(q.qvalue.dtype), np.dtype(q.scale.dtype)
    if not is_eight_bit(dtype):
        remedy = "use `jaxfp8.quantize` to make a QArray of wide values"
        type_error(
            operation, operand, "qvalue", has_dtype(dtype), f"{names(EIGHT_BIT)} is needed", remedy
        )
    if scale not in SCALE:
        remedy = "convert it with `.astype(jax.numpy.float32)`"
        type_error(
            operation, operand, "scale", has_dtype(scale), f"{names(SCALE)} is needed", remedy
        )
    if q.zero_point is None:
        return
    zero = np.dtype(q.zero_point.dtype)
    if is_float8(dtype):
        needs, remedy = f"{dtype.name} has none", "leave it out, or quantize to int8 or uint8"
        type_error(operation, operand, "zero_point", "is given", needs, remedy)
    if zero not in (dtype, INT32):
        needs = f"qvalue of dtype {dtype.name} needs {names((dtype, INT32))}"
        remedy = "round it and convert it with `.astype(jax.numpy.int32)`"
        type_error(operation, operand, "zero_point", has_dtype(zero), needs, remedy)


def _check_rank(q: QArray, operation: str, operand: str) -> None:
    for name in ("scale", "zero_point"):
        leaf = getattr(q, name)
        if leaf is not None and len(leaf.shape) not in (0, q.ndim):
            needs = f"qvalue of shape {q.shape} needs shape () or rank {q.ndim}"
            remedy = "keep an axis of size 1 where tiles are shared, as in `s.reshape(1, -1)`"
            value_error(operation, operand, name, f"has shape {leaf.shape}", needs, remedy)


def _check_tiles(q: QArray, operation: str, operand: str) -> None:
    tiles, got = q.tiles, f"is {q.tiles}"
    if tiles is None:
        return
    if not isinstance(tiles, tuple):
        needs, remedy = "a tuple is needed", "give a size or None for each of the last axes"
        type_error(operation, operand, "tiles", got, needs, remedy)
    if any(tile is not None and (as_index(tile) or 0) < 1 for tile in tiles):
        needs, remedy = "a tile is an int of at least 1, or None", "give its size"
        value_error(operation, operand, "tiles", got, needs, remedy)
    # vmap over an axis leaves its size at the start: 1 or None, as every index had its own scale.
    if any(tile not in (None, 1) for tile in tiles[: max(len(tiles) - q.ndim, 0)]):
        needs = f"qvalue of shape {q.shape} has {q.ndim} axes"
        value_error(operation, operand, "tiles", got, needs, "give no more sizes than axes")


def _check_scale_shape(q: QArray, operation: str, operand: str) -> None:
    for axis, (size, count) in enumerate(zip(q.shape, _entries(q), strict=True)):
        tile = given_tiles(q)[axis]
        if count == 1 and (tile is None or tile >= size):
            continue
        if tile is None and (count == size or (count and size % count == 0)):
            continue
        if tile is not None and count == -(-size // tile):
            continue
        _bad_scale(q, axis, tile, operation, operand)


def _bad_scale(q: QArray, axis: int, tile: int | None, operation: str, operand: str) -> NoReturn:
    shape, which = q.qvalue.shape, "scale"
    if q.zero_point is not None and q.zero_point.shape and _axis(q.scale, axis) == 1:
        which = "zero_point"
    got = f"has shape {getattr(q, which).shape}"
    if tile is None:
        needs = f"qvalue of shape {shape} needs 1, {shape[axis]} or a divisor of it on axis {axis}"
        remedy = "give `tiles` if the last tile is partial, or use `jaxfp8.quantize` to make it"
    else:
        count = -(-shape[axis] // tile)
        needs = f"qvalue of shape {shape} in tiles of {tile} needs {count} on axis {axis}"
        remedy = "give the tile sizes that it was made with"
    value_error(operation, operand, which, got, needs, remedy)


def _check_zero_point_shape(q: QArray, operation: str, operand: str) -> None:
    if q.zero_point is None or not q.zero_point.shape or not q.scale.shape:
        return
    pairs = zip(q.zero_point.shape, q.scale.shape, strict=True)
    if any(zero != scale and 1 not in (zero, scale) for zero, scale in pairs):
        got = f"has shape {q.zero_point.shape}"
        needs = f"scale of shape {q.scale.shape} needs as many or 1 on each axis"
        value_error(
            operation, operand, "zero_point", got, needs, "use one for each entry of the scale"
        )


def _entries(q: QArray) -> Shape:
    """Number of tiles along each axis: the larger of the sizes of scale and zero point."""
    leaves = [leaf for leaf in (q.scale, q.zero_point) if leaf is not None]
    sizes = ([_axis(leaf, axis) for leaf in leaves] for axis in range(q.ndim))
    return tuple(next((size for size in own if size != 1), 1) for own in sizes)


def _axis(leaf: Any, axis: int) -> int:
    """Size of a scale along an axis; 1 for a scalar."""
    return leaf.shape[axis] if leaf.shape else 1


def given_tiles(q: QArray) -> Tiles:
    """The field `tiles` with an entry per axis; None if the tile follows from the shapes."""
    given = (q.tiles or ())[-q.ndim :] if q.ndim else ()
    return (None,) * (q.ndim - len(given)) + tuple(tile and int(tile) for tile in given)


def _spread(values: jax.Array, entries: Shape) -> jax.Array:
    """A scalar or full-rank scale with one entry per tile; an empty axis has no tile."""
    values = values.reshape((1,) * len(entries)) if values.ndim == 0 else values
    return jnp.broadcast_to(values, entries)


def _brief(leaf: Any) -> str:
    """A leaf as `float32[1,8]`, or as itself if it is not an array."""
    if not is_array(leaf):
        return repr(leaf)
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
