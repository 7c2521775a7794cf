"""8-bit parameters as variables of nnx: one for the codes, one for the scale, one for a zero point.

They are no `nnx.Param`: codes have no gradient, and `nnx.grad` and optimisers select `nnx.Param`,
so they ignore them. Each holds one plain array, for checkpoints, shardings and scans; a weight
prepared for a GPU is one variable of a whole `PreparedArray`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value.dtypes import EIGHT_BIT
from jaxfp8._value.errors import message
from jaxfp8._value.packing import COLUMNS, QUAD
from jaxfp8._value.prepared import PreparedArray, prepare, stored, why_not_layer
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import TransposedArray

_SHARDING = "out_sharding"


class QParam(nnx.Variable):
    """Codes, scale or zero point of an 8-bit parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter in 8 bits, as a layer stores it.

    Attributes:
      codes: the 8-bit values; or the float parameter, if the recipe leaves it wide; or, prepared
        for a GPU, a whole `PreparedArray`: no part of it can be replaced without the others.
      scale, zero_point: of the codes, or None.
      tiles: as in `QArray`.
      order: the axes of the arrays as they are read, as in `TransposedArray`; None as they lie.
      prepared: the contracted axis of a prepared weight, counted from the end; None if it is not
        prepared.
    """

    codes: nnx.Variable
    scale: QParam | None = None
    zero_point: QParam | None = None
    tiles: tuple[int | None, ...] | None = None
    order: Shape | None = None
    prepared: int | None = None


def hold(param: nnx.Variable, recipe: Recipe, contracting: Shape, batch: Shape) -> Held:
    """A float parameter in 8 bits. Each array gets its metadata and sharding.

    Args:
      param: float32, bfloat16 or float16.
      recipe: how it is held.
      contracting: axes of the sum of the layer's product.
      batch: its batch axes, those of stacked layers among them.
    """
    if recipe.weight is None:
        return Held(codes=param)
    values = param[...]
    q: Any = recipe.quantize_weight(values, contracting, batch)
    return _held(q, lambda array: _variable(param, values, array))


def _held(q: QArray, variable: Callable[[Any], Any], **more: Any) -> Held:
    """The arrays of a `QArray`, each in a variable of its own."""
    zero = None if q.zero_point is None else variable(q.zero_point)
    codes, scale = variable(q.qvalue), variable(q.scale)
    return Held(codes=codes, scale=scale, zero_point=zero, tiles=q.tiles, **more)


def as_qarray(held: Held) -> Any:
    """The parameter for a product: in 8 bits, or a float array if it is wide."""
    if held.scale is None:
        return held.codes.get_value()
    zero = None if held.zero_point is None else held.zero_point[...]
    q = QArray(held.codes[...], held.scale[...], zero, tiles=held.tiles)
    if held.prepared is not None:
        return PreparedArray(q, held.prepared)
    return q if held.order is None else TransposedArray(q, held.order)


def why_not_prepared(held: Held, contracting: Shape, rank: int, recipe: Recipe) -> str:
    """Why a parameter is not prepared; `contracting` are axes of the unstacked weight."""
    q = as_qarray(held)
    if isinstance(q, PreparedArray):
        return "it is prepared already"
    if not isinstance(q, QArray | TransposedArray):
        return "it is not in 8 bits"
    if held.codes.get_metadata().get(_SHARDING) is not None:
        return "it is sharded by the names of its axes"
    return why_not_layer(q, contracting, rank, meets_8_bits=recipe.activation is not None)


def prepared(held: Held, contracting: int) -> Held:
    """The parameter prepared, with its metadata."""
    q = prepare(as_qarray(held), contracting)
    if q.is_whole:
        whole: Any = QParam(q, **held.codes.get_metadata())
        return Held(codes=whole, prepared=q.contracting)
    return _with_arrays(held, q.packed, q.contracting)


def restored(held: Held) -> Held:
    """A prepared parameter in its former layout, with its metadata."""
    q, axis = as_qarray(held), held.prepared
    if q.is_whole:
        was = q.unprepare()
        order = was.order if isinstance(was, TransposedArray) else None
        return _with_arrays(dataclasses.replace(held, order=order), stored(was), None)
    if held.order is not None and axis is not None:
        q = PreparedArray(q.packed, held.order[axis])  # the axis as stored
    return _with_arrays(held, q.unprepare(), None)


def _with_arrays(held: Held, q: QArray, contracting: int | None) -> Held:
    def variable(array: Any) -> Any:
        return QParam(jnp.asarray(array), **held.codes.get_metadata())

    return _held(q, variable, order=held.order, prepared=contracting)


def holding(held: Held, q: QArray | TransposedArray) -> Held:
    """A parameter with another array in its place, in the order of its axes; metadata is kept.

    Names of mesh axes follow their axes.
    """
    arrays, order = stored(q), q.order if isinstance(q, TransposedArray) else None
    metadata = dict(held.codes.get_metadata())
    metadata.pop("eager_sharding", None)
    if metadata.get(_SHARDING) is not None:
        metadata[_SHARDING] = _reordered(metadata[_SHARDING], held.order, order, q.ndim)

    def variable(array: Any) -> Any:
        own = dict(metadata)
        if own.get(_SHARDING) is not None:
            own[_SHARDING] = _axes(own[_SHARDING], array.shape) if array.shape else ()
        return QParam(array, eager_sharding=False, **own)

    return _held(arrays, variable, order=order)


def _reordered(names: Any, before: Shape | None, after: Shape | None, rank: int) -> tuple[Any, ...]:
    """Names of stored axes in one order, of the axes as they are stored in another."""
    padded = [*names, *[None] * (rank - len(names))]
    logical = [padded[axis] for axis in _axes_of(before, rank)]
    moved = dict(zip(_axes_of(after, rank), logical, strict=True))
    return tuple(moved[axis] for axis in range(rank))


def _axes_of(order: Shape | None, rank: int) -> Shape:
    """The stored axis of each axis as it is read."""
    order = order or ()
    return (*range(rank - len(order)), *(rank + axis for axis in order))


def check_held(held: Held, shape: Shape, operation: str, operand: str) -> None:
    """Refuses arrays of other code in place of those of a parameter.

    Args:
      held: the parameter.
      shape: of the weight of an unstacked layer.
      operation, operand: for the error.
    """
    codes, rank = held.codes.get_value(), len(shape)
    whole = isinstance(codes, PreparedArray)
    if held.scale is None and held.prepared is None and not whole:
        return
    if whole != (held.scale is None) or (whole and held.prepared is None):
        got = f"is {codes}" if whole else f"is {codes.dtype}{list(codes.shape)}"
        _refuse_layout(operation, operand, got, packed=whole)
    if whole:
        return
    inverse = dict(zip(_axes_of(held.order, rank), shape, strict=True))
    lies = tuple(inverse[axis] for axis in range(rank))
    if codes.dtype not in EIGHT_BIT:
        got, needs = f"is {codes.dtype}", "the layer holds codes, over which something wrote floats"
        remedy = (
            "leave a layer whose weight something else computes in floats: by `where` of "
            "`jaxfp8.nnx.quantize`, or by a `sample`, which shows who reads weights"
        )
        raise TypeError(message(operation, operand, got, needs, remedy))
    plain, last = codes.shape[-rank:] == lies, codes.shape[-2:]
    packed = codes.ndim >= rank + 2 and last == (COLUMNS, QUAD) and not plain
    if packed != (held.prepared is not None):
        as_it_lies = "as `jaxfp8.nnx.prepare` lays it out" if packed else "as it is if not prepared"
        _refuse_layout(operation, operand, f"has shape {codes.shape}, {as_it_lies}", packed=packed)


def _refuse_layout(operation: str, operand: str, got: str, *, packed: bool) -> NoReturn:
    needs = f"the layer is {'not ' if packed else ''}prepared so"
    remedy = "save what `jaxfp8.nnx.unprepare` gives, and prepare a model once it is loaded"
    raise ValueError(message(operation, operand, got, needs, remedy))


def release(held: Held, dtype: Any) -> nnx.Variable:
    """The parameter as an `nnx.Param` of floats, with its metadata."""
    if isinstance(held.codes.get_value(), PreparedArray):
        held = restored(held)
    if held.scale is None:
        return held.codes
    values = dequantize(as_qarray(held), jnp.float32).astype(dtype)
    return _variable(held.codes, held.codes[...], values, kind=nnx.Param, order=held.order)


def _variable(
    like: nnx.Variable,
    values: jax.Array,
    array: jax.Array,
    kind: type[nnx.Variable] = QParam,
    order: Shape | None = None,
) -> Any:
    """A variable for an array of the parameter `like`, with the values `values`.

    The order, if there is one, is that of reading the axes of both.
    """
    metadata = dict(like.get_metadata())
    if metadata.get(_SHARDING) is not None:
        names = _reordered(metadata[_SHARDING], order, None, array.ndim)
        metadata[_SHARDING] = _axes(names, array.shape)
    # The array is placed already. Eager sharding would need the mesh as a context.
    eager = metadata.pop("eager_sharding", None)
    variable = kind(_placed(values, array, order), eager_sharding=False, **metadata)
    if eager is not None:
        variable.set_metadata(eager_sharding=eager)
    return variable


def _placed(values: jax.Array, array: jax.Array, order: Shape | None) -> jax.Array:
    """An array sharded like the values, along axes larger than 1."""
    if isinstance(values, jax.core.Tracer) or not isinstance(values, jax.Array):
        return array
    sharding = values.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    names = _reordered(tuple(sharding.spec), order, None, values.ndim)
    spec = PartitionSpec(*_axes(names, array.shape))
    return jax.device_put(array, NamedSharding(sharding.mesh, spec))


def _axes(names: Any, shape: Shape) -> tuple[Any, ...]:
    """Names of mesh axes for an array; None for an axis of size 1."""
    padded = [*names, *[None] * (len(shape) - len(names))]
    return tuple(n if size > 1 else None for n, size in zip(padded, shape, strict=True))
