"""Weights in the form of a device's kernels, made once instead of at every product."""

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
from jaxfp8._value.dtypes import INT32, as_bytes, bits_as, is_int8
from jaxfp8._value.errors import FallbackWarning, message, shown
from jaxfp8._value.operators import MatmulOperator
from jaxfp8._value.packing import (
    COLUMNS,
    QUAD,
    logical_shape,
    pack_columns,
    split_tile,
    unpack_columns,
    with_last,
)
from jaxfp8._value.qarray import QArray, adopt, check_qarray
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import TransposedArray

ON_GPU = "kernels of a GPU read it as it lies"
ELSEWHERE = "only kernels of a CPU or a GPU read prepared weights"
IN_PLACE = (ON_GPU, ELSEWHERE)  # reasons without a warning
_OPERATION = "jaxfp8.prepare"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PreparedArray(MatmulOperator):
    """A weight in the form of a device's kernels; `jaxfp8.prepare` makes it.

    It stands for the same values, and can be the right operand of `dot_general`, `matmul`, `einsum`
    and `recipe_dot_general`.

    It is a pytree of its arrays, and transformations count their axes. `vmap` and `scan` may map
    over axes before the last two of `shape`, if products sum over one of those two. To save it,
    save `unprepare()`.

    Attributes:
      packed: on a CPU a `QArray` in the kernels' layout, `[..., N / 64, K / 4, 64, 4]`, for K the
        contracted axis, N the last of the others. On a GPU a view of a K-contiguous copy or, with
        `sums`, the array itself.
      contracting: the contracted axis, counted from the last one of `shape`.
      sums: None, or the int32 sums of the codes over the contracted axis, of size 1 there. Their
        axes follow the stored arrays.
      turned: whether `packed` is a view because `prepare` moved the contracted axis.
      terms: the number of codes in each sum. A slice of the contracted axis has other sums, and is
        refused.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.prepare(jaxfp8.quantize(jnp.ones((8, 64)), channelwise_axes=(1,)))
      >>> w, w.packed.shape
      (PreparedArray(float8_e4m3fn[8,64], contracting=-2), (1, 2, 64, 4))
    """

    packed: Any
    contracting: int = dataclasses.field(metadata={"static": True})
    sums: jax.Array | None = None
    turned: bool = dataclasses.field(default=False, metadata={"static": True})
    terms: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def is_whole(self) -> bool:
        """Whether `packed` has the axes of the original array, as on a GPU."""
        return self.sums is not None or isinstance(self.packed, TransposedArray)

    @property
    def shape(self) -> Shape:
        """Shape of the values, as it was before they were prepared."""
        if self.is_whole:
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
        """The float dtype this array stands for, as for a `QArray`."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales, zero points and sums."""
        return self.packed.nbytes + (0 if self.sums is None else 4 * math.prod(self.sums.shape))

    def unprepare(self) -> Any:
        """The array that was prepared, bit for bit, without `tiles` where they can be derived.

        A view packed for a CPU becomes a `QArray`.

        Example:
          >>> import jax.numpy as jnp, jaxfp8
          >>> q = jaxfp8.quantize(jnp.ones((8, 64)), channelwise_axes=(1,))
          >>> jaxfp8.prepare(q).unprepare()
          QArray(float8_e4m3fn[8,64], scale=float32[1,64])
        """
        if self.turned:
            return _contiguous(self.packed)
        if self.is_whole:
            return self.packed
        return unpack_columns(self.packed, self.contracting)

    def __repr__(self) -> str:
        """Dtype and shape, never the values."""
        rest = f"contracting={self.contracting}"
        rest += ", turned" if self.turned else ""
        rest += "" if self.sums is None else ", with sums"
        codes: Any = getattr(stored(self.packed), "qvalue", None)
        if not hasattr(codes, "dtype"):
            return f"PreparedArray({self.packed}, {rest})"
        values = f"{np.dtype(codes.dtype).name}[{','.join(map(str, self.shape))}]"
        return f"PreparedArray({values}, {rest})"


def prepare(q: Any, contracting: int = -2) -> Any:
    """Converts a weight to the kernels' form once and without loss, instead of at every call.

    Prepare once, after a model is loaded. The form depends on the weight's device.

    - On a CPU, the packed layout: groups of 64 columns by 4 values of K. A product rearranges any
      other layout. With few rows a prepared weight is up to 2x faster. The gradient with respect to
      the left operand is slower with it.
    - On a GPU, a K-contiguous copy for kernels of 8-bit activations. Products transpose any other
      layout at each call. An int8 or uint8 weight also gets its sums over K. Zero points of the
      left operand need them, `sum_k (l - z) w = sum_k l w - z sum_k w`. Without them the product
      reads the weight once more. Views are not copied: integer views get sums, and FP8 views stay
      unchanged. Batch axes have to come first, or calls still move them.

    Args:
      q: a `QArray`, or a pytree; its `QArray`s are prepared.
      contracting: the axis summed over; the last of the other axes is the columns. Dense layers of
        Flax have it at -2.

    Returns:
      A `PreparedArray` for each `QArray`: on a CPU if its contracted axis is a multiple of 4, its
      columns are a multiple of 64, and no tile cuts these groups. Any other `QArray` there stays
      unchanged, with the reason in a `FallbackWarning`.

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
        got = f"is {shown(contracting)}"
        remedy = "name the one axis that products sum over"
        raise TypeError(message(_OPERATION, "`contracting`", got, "an int is needed", remedy))
    if not any(is_held(adopt(leaf)) for leaf in jax.tree.leaves(q, is_leaf=is_held_or_qwix)):
        got, needs = f"is of type {type(q).__name__}", "a QArray, or a pytree with one, is needed"
        remedy = "make it with `jaxfp8.quantize`"
        raise TypeError(message(_OPERATION, "`q`", got, needs, remedy))
    left: list[str] = []
    prepared = jax.tree_util.tree_map_with_path(
        functools.partial(_prepare_leaf, axis, left), q, is_leaf=is_held_or_qwix
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
    """The `QArray` as it lies in memory."""
    return q.stored if isinstance(q, TransposedArray) else q


def is_held_or_qwix(leaf: Any) -> bool:
    """As `is_held`, for an array of qwix too."""
    return is_held(adopt(leaf))


def check_prepared(p: PreparedArray, operation: str, operand: str) -> None:
    """Checks the invariants of a `PreparedArray`; slicing an axis that it needs breaks them."""
    check_qarray(stored(p.packed), operation, operand)
    if p.is_whole:
        _check_whole(p, operation, operand)
        return
    shape, axis = p.packed.shape, p.contracting
    if shape[-2:] != (COLUMNS, QUAD) or len(shape) < 4 or not -len(shape) + 2 <= axis < 0:
        got = f"is packed as {shape} for products over axis {axis}"
        needs = f"(..., columns / {COLUMNS}, depth / {QUAD}, {COLUMNS}, {QUAD}) is needed"
        remedy = "make it with `jaxfp8.prepare`; take apart only axes before the last two"
        raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))


def _check_whole(p: PreparedArray, operation: str, operand: str) -> None:
    held, rank, axis = stored(p.packed), p.packed.ndim, p.contracting
    order = p.packed.order if isinstance(p.packed, TransposedArray) else ()
    if not -rank <= axis < 0 or len(order) > rank:
        got = f"has {rank} axes and is prepared for products over axis {axis}"
        needs, remedy = "its last axes are needed", "take apart only axes before the last two"
        raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))
    if p.sums is not None:
        kept, along = list(held.shape), _stored_axis(p.packed, axis)
        terms, kept[along] = kept[along], 1
        shape, dtype = tuple(p.sums.shape), np.dtype(p.sums.dtype)
        fits = shape == tuple(kept) and dtype == INT32 and terms == p.terms
        if fits and is_int8(held.qvalue.dtype):
            return
        got = f"has sums {dtype.name}{list(shape)} of {p.terms} codes each"
        needs = f"int32{kept} of {terms} integers is needed"
        remedy = "prepare it where it is whole along that axis, or pass a part of `unprepare()`"
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
        return _prepared_for_gpu(q, contracting)
    if not reason:
        return PreparedArray(pack_columns(stored(q), _stored_axis(q, contracting)), contracting)
    if reason not in IN_PLACE:
        left.append(message(_OPERATION, f"`{name}`", f"is {q}", reason, "it is left as it is"))
    return leaf


def _stored_axis(q: QArray | TransposedArray, axis: int) -> int:
    """The axis of the stored array, counted from the last."""
    return q.axes[axis] - q.ndim if isinstance(q, TransposedArray) else axis


def _platform(q: QArray) -> str:
    """The platform of the values, present or future."""
    if isinstance(q.qvalue, jax.Array) and not isinstance(q.qvalue, jax.core.Tracer):
        return next(iter(q.qvalue.devices())).platform
    return jax.default_backend()


def why_not(q: QArray | TransposedArray, contracting: int) -> str:
    """Why an array is not prepared for products over an axis; "" if it is."""
    platform = _platform(stored(q))
    if platform == "gpu":
        stays = not _turns(q, contracting) and not is_int8(stored(q).qvalue.dtype)
        return ON_GPU if stays or q.ndim < 2 else ""
    if platform != "cpu":
        return ELSEWHERE
    if isinstance(q, TransposedArray):
        # Packing takes [N, K], whichever axis is stored last.
        if q.order != (-1, -2):
            return "more of its axes are permuted than the last two"
        return why_not(q.stored, _stored_axis(q, contracting))
    if compat.is_laid_out(q.qvalue):
        return "it is sharded over explicit mesh axes; prepare it before it is placed"
    if q.ndim < 2:
        return "columns are needed beside the axis that is summed over"
    *_, columns, depth = with_last(q.shape, contracting)
    if not q.size:
        return "it is empty"
    if depth % QUAD or columns % COLUMNS:
        needed = f"multiples of {COLUMNS} columns and of {QUAD} values are needed"
        return f"it has {columns} columns of {depth} values, and {needed}"
    *_, wide, deep = with_last(q.tile_sizes, contracting)
    if split_tile(wide, columns, COLUMNS) is None or split_tile(deep, depth, QUAD) is None:
        return f"its tiles of {deep} by {wide} columns cut groups of {QUAD} by {COLUMNS}"
    return ""


def why_not_layer(
    q: QArray | TransposedArray, contracting: Shape, rank: int, *, meets_8_bits: bool
) -> str:
    """The same for the weight of a layer; axes and rank are those of an unstacked one."""
    if not meets_8_bits and _platform(stored(q)) != "cpu":
        return ON_GPU
    if len(contracting) != 1:
        return f"it is summed over {len(contracting)} axes, and one can be prepared"
    return why_not(q, contracting[0] - rank)


def _turns(q: QArray | TransposedArray, contracting: int) -> bool:
    """Whether an array is copied, with the contracted axis last."""
    return isinstance(q, QArray) and contracting != -1


def _prepared_for_gpu(q: QArray | TransposedArray, contracting: int) -> PreparedArray:
    """With the contracted axis last in memory, and sums of integers."""
    turns = _turns(q, contracting)
    held = _with_axis_last(q, contracting) if turns else q
    codes = stored(held).qvalue
    if not is_int8(codes.dtype):
        return PreparedArray(held, contracting, turned=turns)
    sums, terms = _sums(codes, _stored_axis(held, contracting)), held.shape[contracting]
    return PreparedArray(held, contracting, sums, turns, terms)


def _with_axis_last(q: QArray | TransposedArray, axis: int) -> TransposedArray:
    """A view of the same values, stored with an axis last."""
    order = [*range(q.ndim)]
    order.append(order.pop(axis))
    moved = _contiguous(q.transpose(order))
    return moved.transpose([order.index(place) for place in range(q.ndim)])


@jax.jit
def _contiguous(view: TransposedArray) -> QArray:
    """Arrays in the order of a view; codes are moved as bytes."""
    q = view.stored
    moved = dataclasses.replace(view, stored=dataclasses.replace(q, qvalue=as_bytes(q.qvalue)))
    made = moved.contiguous()
    return dataclasses.replace(made, qvalue=bits_as(made.qvalue, q.qvalue.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _sums(codes: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(codes, axis, dtype=jnp.int32, keepdims=True)
