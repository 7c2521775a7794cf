"""What the kernels of a device want of a weight, made once instead of at every product."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value import checks, compat
from jaxfp8._value.dtypes import INT32, is_int8
from jaxfp8._value.errors import FallbackWarning, message
from jaxfp8._value.operators import MatmulOperator
from jaxfp8._value.qarray import QArray, adopt, check_qarray, given_tiles
from jaxfp8._value.spec import Shape, tile_counts
from jaxfp8._value.transposed import TransposedArray

# Columns side by side, and K values of each that are contiguous.
COLUMNS, QUAD = 64, 4

ON_GPU = "the kernels of a GPU read it as it is"
_OPERATION = "jaxfp8.prepare"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PreparedArray(MatmulOperator):
    """A weight with what the kernels of a device want of it; `jaxfp8.prepare` makes it.

    It stands for the same values, and can be the right operand of `dot_general`, `matmul`, `einsum`
    and `recipe_dot_general`.

    It is a pytree of its arrays, and transformations count their axes. `vmap` and `scan` may map
    over axes before the last two of `shape`, if products sum over one of those two. To save it,
    save `restore()`.

    Attributes:
      packed: on a CPU, values and scales in the order in which kernels read them,
        `[..., N / 64, K / 4, 64, 4]` for K the contracted axis, N the last of the others. With
        `sums` the array as it was.
      contracting: the contracted axis, counted from the last one of `shape`.
      sums: None, or the sums of the codes over the contracted axis, int32, which has size 1 there.
        Their axes are those of the arrays as they lie.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.prepare(jaxfp8.quantize(jnp.ones((8, 64)), channelwise_axes=(1,)))
      >>> w, w.packed.shape
      (PreparedArray(float8_e4m3fn[8,64], contracting=-2), (1, 2, 64, 4))
    """

    packed: Any
    contracting: int = dataclasses.field(metadata={"static": True})
    sums: jax.Array | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the values, as it was before they were prepared."""
        if self.sums is not None:
            return self.packed.shape
        return logical_shape(self.packed.shape, self.contracting)

    @property
    def ndim(self) -> int:
        """Number of axes of the values."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return self.packed.size

    @property
    def dtype(self) -> np.dtype:
        """The float dtype this array stands for, as that of a `QArray`."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales, zero points and sums."""
        return self.packed.nbytes + (0 if self.sums is None else 4 * math.prod(self.sums.shape))

    def restore(self) -> Any:
        """The array that was prepared, bit for bit, without `tiles` where they can be derived.

        A view is a `QArray` afterwards if it was packed, and a view if it got sums.

        Example:
          >>> import jax.numpy as jnp, jaxfp8
          >>> q = jaxfp8.quantize(jnp.ones((8, 64)), channelwise_axes=(1,))
          >>> jaxfp8.prepare(q).restore()
          QArray(float8_e4m3fn[8,64], scale=float32[1,64])
        """
        if self.sums is not None:
            return self.packed
        return _unpack(self.packed, self.contracting)

    def __repr__(self) -> str:
        """Dtype and shape, never the values."""
        rest = f"contracting={self.contracting}{'' if self.sums is None else ', with sums'}"
        codes: Any = getattr(stored(self.packed), "qvalue", None)
        if not hasattr(codes, "dtype"):
            return f"PreparedArray({self.packed}, {rest})"
        values = f"{np.dtype(codes.dtype).name}[{','.join(map(str, self.shape))}]"
        return f"PreparedArray({values}, {rest})"


def prepare(q: Any, contracting: int = -2) -> Any:
    """Makes what products make of a weight at every call, once and without loss.

    Prepare once, after a model is loaded. What is made depends on where the weight lies.

    - On a CPU, the layout that kernels read: groups of 64 columns by 4 values of K. A product
      rearranges any other layout. With few rows a prepared weight is up to 2x faster. The gradient
      with respect to the left operand is slower with it.
    - On a GPU, the sums of an int8 or uint8 weight over K. A product whose left operand has zero
      points needs them, `sum_k (l - z) w = sum_k l w - z sum_k w`, and otherwise reads the weight
      once more. Other weights stay as they are.

    Args:
      q: a `QArray`, or a pytree; its `QArray`s are prepared.
      contracting: the axis that products sum over; the last of the other axes are the columns.
        Dense layers of Flax have it at -2.

    Returns:
      A `PreparedArray` for each `QArray`: on a CPU if its contracted axis is a multiple of 4, its
      columns are a multiple of 64, and no tile cuts these groups. Any other `QArray` there stays
      as it is, and a `FallbackWarning` says why.

    Raises:
      TypeError: `contracting` is no int, or `q` holds no `QArray`.
      ValueError: a `QArray` contradicts itself, or has no such axis.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.prepare(jaxfp8.quantize(jnp.eye(64), jnp.int8))
      >>> jaxfp8.matmul(jnp.arange(64.0), w).astype(int)[:5].tolist()
      [0, 1, 2, 3, 4]
    """
    axis = checks.as_index(contracting)
    if axis is None:
        got = f"is {contracting!r}"
        remedy = "name the one axis that products sum over"
        raise TypeError(message(_OPERATION, "`contracting`", got, "an int is needed", remedy))
    if not any(is_held(adopt(leaf)) for leaf in jax.tree.leaves(q, is_leaf=is_whole)):
        got, needs = f"is of type {type(q).__name__}", "a QArray, or a pytree with one, is needed"
        remedy = "make it with `jaxfp8.quantize`"
        raise TypeError(message(_OPERATION, "`q`", got, needs, remedy))
    left: list[str] = []
    prepared = jax.tree_util.tree_map_with_path(
        functools.partial(_prepare_leaf, axis, left), q, is_leaf=is_whole
    )
    for text in left:
        warnings.warn(text, FallbackWarning, stacklevel=2)
    return prepared


# A whole 8-bit array: as it is, a view of one, or prepared.
EightBitArray = QArray | TransposedArray | PreparedArray


def is_held(leaf: Any) -> TypeGuard[EightBitArray]:
    """Whether a leaf is a whole 8-bit array."""
    return isinstance(leaf, EightBitArray)


def stored(q: QArray | TransposedArray) -> QArray:
    """The `QArray` whose arrays lie in memory."""
    return q.stored if isinstance(q, TransposedArray) else q


def is_whole(leaf: Any) -> bool:
    """As `is_held`, for an array of qwix too."""
    return is_held(adopt(leaf))


def check_prepared(p: PreparedArray, operation: str, operand: str) -> None:
    """Checks the invariants of a `PreparedArray`.

    Raises:
      TypeError, ValueError: as `check_qarray`; or its axes are not those that `prepare` makes, as
        after slicing one that has no axis to spare.
    """
    check_qarray(stored(p.packed), operation, operand)
    shape, axis = p.packed.shape, p.contracting
    if p.sums is not None:
        _check_sums(p, p.sums, operation, operand)
        return
    if shape[-2:] != (COLUMNS, QUAD) or len(shape) < 4 or not -len(shape) + 2 <= axis < 0:
        got = f"is packed as {shape} for products over axis {axis}"
        needs = f"(..., columns / {COLUMNS}, depth / {QUAD}, {COLUMNS}, {QUAD}) is needed"
        remedy = "make it with `jaxfp8.prepare`; take apart only axes before the last two"
        raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))


def _check_sums(p: PreparedArray, sums: jax.Array, operation: str, operand: str) -> None:
    rank, axis = p.packed.ndim, p.contracting
    if not -rank <= axis < 0:
        got, needs = f"has sums over axis {axis}", f"an axis of shape {p.packed.shape} is needed"
    else:
        kept = list(stored(p.packed).shape)
        kept[_stored_axis(p.packed, axis)] = 1
        shape, dtype = tuple(sums.shape), np.dtype(sums.dtype)
        if shape == tuple(kept) and dtype == INT32 and is_int8(stored(p.packed).qvalue.dtype):
            return
        got, needs = f"has sums {dtype.name}{list(shape)}", f"int32{kept} of integers is needed"
    remedy = "make it with `jaxfp8.prepare`"
    raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))


def _prepare_leaf(axis: int, left: list[str], path: Any, leaf: Any) -> Any:
    q = adopt(leaf)
    if not isinstance(q, QArray | TransposedArray):
        return leaf
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "q"
    check_qarray(stored(q), _OPERATION, name)
    if not -q.ndim <= axis < q.ndim:
        got, needs = f"has shape {q.shape}", f"an axis {axis} is needed"
        remedy = "give the axis that products sum over"
        raise ValueError(message(_OPERATION, f"`{name}`", got, needs, remedy))
    contracting = axis - q.ndim if axis >= 0 else axis
    reason = why_not(q, contracting)
    if not reason and _platform(stored(q)) == "gpu":
        codes, along = stored(q).qvalue, _stored_axis(q, contracting)
        return PreparedArray(q, contracting, _sums(codes, along))
    if not reason:
        return PreparedArray(_pack(stored(q), _stored_axis(q, contracting)), contracting)
    if reason != ON_GPU:
        left.append(message(_OPERATION, f"`{name}`", f"is {q}", reason, "it is left as it is"))
    return leaf


def _stored_axis(q: QArray | TransposedArray, axis: int) -> int:
    """The axis, counted from the last, of what is stored."""
    return q.axes[axis] - q.ndim if isinstance(q, TransposedArray) else axis


def _platform(q: QArray) -> str:
    """Where the values are, or where they will be."""
    if isinstance(q.qvalue, jax.Array) and not isinstance(q.qvalue, jax.core.Tracer):
        return next(iter(q.qvalue.devices())).platform
    return jax.default_backend()


def why_not(q: QArray | TransposedArray, contracting: int) -> str:
    """Why an array is not prepared for products over an axis; "" if it is."""
    if isinstance(q, TransposedArray):
        # What is packed is columns by depths, whichever of both is stored last.
        if q.order != (-1, -2):
            return "more of its axes are permuted than the last two"
        return why_not(q.stored, _stored_axis(q, contracting))
    platform = _platform(q)
    if platform != "cpu":
        return "" if platform == "gpu" and is_int8(q.qvalue.dtype) else ON_GPU
    if compat.is_laid_out(q.qvalue):
        return "it is sharded over explicit mesh axes; prepare it before it is placed"
    if q.ndim < 2:
        return "columns are needed beside the axis that is summed over"
    *_, columns, depth = _last(q.shape, contracting)
    if not q.size:
        return "it is empty"
    if depth % QUAD or columns % COLUMNS:
        needed = f"multiples of {COLUMNS} columns and of {QUAD} values are needed"
        return f"it has {columns} columns of {depth} values, and {needed}"
    *_, wide, deep = _last(q.tile_sizes, contracting)
    if split_tile(wide, columns, COLUMNS) is None or split_tile(deep, depth, QUAD) is None:
        return f"its tiles of {deep} by {wide} columns cut groups of {QUAD} by {COLUMNS}"
    return ""


def why_not_layer(
    q: QArray | TransposedArray, contracting: Shape, rank: int, *, meets_zero_points: bool
) -> str:
    """The same for a layer.

    Args:
      q: its weight.
      contracting: the axes that its product sums over, of the weight of a layer that is not
        stacked.
      rank: of that weight.
      meets_zero_points: whether the product's other side has zero points.
    """
    if not meets_zero_points and _platform(stored(q)) != "cpu":
        return ON_GPU
    if len(contracting) != 1:
        return f"it is summed over {len(contracting)} axes, and one can be prepared"
    return why_not(q, contracting[0] - rank)


def _last(axes: tuple[Any, ...], contracting: int) -> tuple[Any, ...]:
    """The entries of each axis, with that of the contracted axis last."""
    rest = list(axes)
    moved = rest.pop(contracting)
    return (*rest, moved)


def logical_shape(packed: Shape, contracting: int) -> Shape:
    """The shape of what was packed."""
    *lead, groups, quads, _, _ = packed
    shape = [*lead, groups * COLUMNS]
    shape.insert(len(shape) + 1 + contracting, quads * QUAD)
    return tuple(shape)


def split_tile(tile: int, size: int, inner: int) -> tuple[int, int] | None:
    """The tile of an axis of `size` once it is two axes, the second of size `inner`.

    None where no tile of two axes is the same.
    """
    if tile >= size:
        return size // inner, inner
    if tile % inner == 0:
        return tile // inner, inner
    return (1, tile) if inner % tile == 0 else None


def _split_entries(entries: int, tile: int, size: int, inner: int) -> Shape:
    """The two sizes of an axis of a scale once that axis is split in two."""
    tiles = split_tile(tile, size, inner)
    assert tiles is not None
    return (1, 1) if entries == 1 else tile_counts((size // inner, inner), tiles)


@functools.partial(jax.jit, static_argnums=1)
def _sums(codes: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(codes, axis, dtype=jnp.int32, keepdims=True)


@functools.partial(jax.jit, static_argnums=1)
def _pack(q: QArray, contracting: int) -> QArray:
    *_, columns, depth = _last(q.shape, contracting)
    *_, wide, deep = _last(q.tile_sizes, contracting)

    def pack(array: jax.Array | None, wide: int = 1, deep: int = 1) -> jax.Array | None:
        if array is None or array.ndim == 0:
            return array
        codes = jnp.moveaxis(_as_codes(array), contracting, -1)
        *lead, across, along = codes.shape
        parts = _split_entries(across, wide, columns, COLUMNS)
        parts += _split_entries(along, deep, depth, QUAD)
        return _from_codes(codes.reshape(*lead, *parts).swapaxes(-3, -2), array.dtype)

    *lead, _, _ = _last(given_tiles(q), contracting)
    tiles = [split_tile(wide, columns, COLUMNS), split_tile(deep, depth, QUAD)]
    outer, inner = zip(*(tile for tile in tiles if tile), strict=True)
    return QArray(
        jnp.asarray(pack(q.qvalue)),
        jnp.asarray(pack(q.scale, wide, deep)),
        pack(q.zero_point, wide, deep),
        tiles=(*lead, *outer, *inner),
    )


@functools.partial(jax.jit, static_argnums=1)
def _unpack(packed: QArray, contracting: int) -> QArray:
    def unpack(array: jax.Array | None) -> jax.Array | None:
        if array is None or array.ndim == 0:
            return array
        codes = _as_codes(array).swapaxes(-3, -2)
        *lead, groups, columns, quads, depth = codes.shape
        codes = codes.reshape(*lead, groups * columns, quads * depth)
        return _from_codes(jnp.moveaxis(codes, -1, contracting), array.dtype)

    qvalue, scale = jnp.asarray(unpack(packed.qvalue)), jnp.asarray(unpack(packed.scale))
    plain = QArray(qvalue, scale, unpack(packed.zero_point))
    *lead, groups, quads, columns, depth = packed.tile_sizes
    tiles = [*lead, groups * columns]
    tiles.insert(plain.ndim + contracting, quads * depth)
    derived = plain.tile_sizes
    given = tuple(None if a == b else a for a, b in zip(tiles, derived, strict=True))
    return dataclasses.replace(plain, tiles=given) if any(given) else plain


def _as_codes(x: jax.Array) -> jax.Array:
    """The array; 8-bit values and float8_e8m0fnu scales as bytes, which XLA does not convert."""
    if x.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(x, jnp.uint8)
    return jnp.asarray(x)


def _from_codes(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    return codes if codes.dtype == dtype else jax.lax.bitcast_convert_type(codes, dtype)
