"""8-bit parameters as variables of nnx: one for the codes, one for the scale, one for a zero point.

They are no `nnx.Param`: codes have no gradient, so `nnx.grad` and optimisers, which select
`nnx.Param`, ignore them. Each holds one plain array, for checkpoints, shardings and scans.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value.dtypes import EIGHT_BIT
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import COLUMNS, QUAD, PreparedArray, prepare, why_not_layer
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape

_SHARDING = "out_sharding"


class QParam(nnx.Variable):
    """Codes, scale or zero point of an 8-bit parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter in 8 bits, as a layer stores it.

    Attributes:
      codes: the 8-bit values; or the float parameter, if the recipe leaves it wide.
      scale, zero_point: of the codes, or None.
      tiles: as in `QArray`.
      prepared: the contracted axis of a prepared weight, counted from the end; None if it is not
        prepared.
    """

    codes: nnx.Variable
    scale: QParam | None = None
    zero_point: QParam | None = None
    tiles: tuple[int | None, ...] | None = None
    prepared: int | None = None


def hold(param: nnx.Variable, recipe: Recipe, contracting: Shape, batch: Shape) -> Held:
    """A float parameter in 8 bits. Each array gets its metadata and sharding.

    Args:
      param: float32, bfloat16 or float16.
      recipe: how it is held.
      contracting: axes that the layer's product sums over.
      batch: its batch axes, those of stacked layers among them.
    """
    if recipe.weight is None:
        return Held(codes=param)
    values = param[...]
    q = recipe.weight.quantize(values, contracting, batch, operand="weight")
    zero = None if q.zero_point is None else _variable(param, values, q.zero_point)
    return Held(
        codes=_variable(param, values, q.qvalue),
        scale=_variable(param, values, q.scale),
        zero_point=zero,
        tiles=q.tiles,
    )


def as_qarray(held: Held) -> Any:
    """The parameter for a product: in 8 bits, or a float array if it is wide."""
    if held.scale is None:
        return held.codes[...]
    zero = None if held.zero_point is None else held.zero_point[...]
    q = QArray(held.codes[...], held.scale[...], zero, tiles=held.tiles)
    return q if held.prepared is None else PreparedArray(q, held.prepared)


def why_not_prepared(held: Held, contracting: Shape, rank: int) -> str:
    """Why a parameter is not prepared; `contracting` are axes of the unstacked weight."""
    q = as_qarray(held)
    if isinstance(q, PreparedArray):
        return "it is prepared already"
    if not isinstance(q, QArray):
        return "it is not in 8 bits"
    if held.codes.get_metadata().get(_SHARDING) is not None:
        return "it is sharded by the names of its axes"
    return why_not_layer(q, contracting, rank)


def prepared(held: Held, contracting: int) -> Held:
    """The parameter prepared, with its metadata."""
    q = prepare(as_qarray(held), contracting)
    return _with_arrays(held, q.packed, q.contracting)


def restored(held: Held) -> Held:
    """A prepared parameter in its former layout, with its metadata."""
    return _with_arrays(held, as_qarray(held).restore(), None)


def _with_arrays(held: Held, q: QArray, contracting: int | None) -> Held:
    def variable(array: Any) -> Any:
        return QParam(jnp.asarray(array), **held.codes.get_metadata())

    return Held(
        codes=variable(q.qvalue),
        scale=variable(q.scale),
        zero_point=None if q.zero_point is None else variable(q.zero_point),
        tiles=q.tiles,
        prepared=contracting,
    )


def check_held(held: Held, shape: Shape, operation: str, operand: str) -> None:
    """Refuses arrays that other code put in place of those of a parameter.

    Args:
      held: the parameter.
      shape: of the weight of a layer that is not stacked.
      operation, operand: what the error says.
    """
    if held.scale is None:
        return
    codes = held.codes[...]
    if codes.dtype not in EIGHT_BIT:
        got, needs = f"is {codes.dtype}", "the layer holds codes, over which something wrote floats"
        remedy = (
            "leave a layer whose weight something else computes in floats: by `where` of "
            "`jaxfp8.nnx.quantize`, or by a `sample`, which shows who reads weights"
        )
        raise TypeError(message(operation, operand, got, needs, remedy))
    plain, last = codes.shape[-len(shape) :] == shape, codes.shape[-2:]
    packed = codes.ndim >= len(shape) + 2 and last == (COLUMNS, QUAD) and not plain
    if packed != (held.prepared is not None):
        as_it_lies = "as `jaxfp8.nnx.prepare` lays it out" if packed else "as it is if not prepared"
        needs = f"the layer is {'not ' if packed else ''}prepared"
        remedy = "save what `jaxfp8.nnx.unprepare` gives, and prepare a model once it is loaded"
        got = f"has shape {codes.shape}, {as_it_lies}"
        raise ValueError(message(operation, operand, got, needs, remedy))


def release(held: Held, dtype: Any) -> nnx.Variable:
    """The parameter as an `nnx.Param` of floats, with the metadata that it had."""
    if held.scale is None:
        return held.codes
    values = dequantize(as_qarray(held), jnp.float32).astype(dtype)
    return _variable(held.codes, held.codes[...], values, kind=nnx.Param)


def nbytes(*variables: nnx.Variable | None) -> int:
    """Bytes of the arrays."""
    return sum(v[...].size * v[...].dtype.itemsize for v in variables if v is not None)


def _variable(
    like: nnx.Variable, values: jax.Array, array: jax.Array, kind: type[nnx.Variable] = QParam
) -> Any:
    """A variable of an array that belongs to `like`, whose values are `values`."""
    metadata = dict(like.get_metadata())
    if metadata.get(_SHARDING) is not None:
        metadata[_SHARDING] = _axes(metadata[_SHARDING], array.shape)
    # The array is placed already. Eager sharding would need the mesh as a context.
    eager = metadata.pop("eager_sharding", None)
    variable = kind(_placed(values, array), eager_sharding=False, **metadata)
    if eager is not None:
        variable.set_metadata(eager_sharding=eager)
    return variable


def _placed(values: jax.Array, array: jax.Array) -> jax.Array:
    """An array sharded like the values, along the axes that are larger than 1."""
    if isinstance(values, jax.core.Tracer) or not isinstance(values, jax.Array):
        return array
    sharding = values.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    spec = PartitionSpec(*_axes(tuple(sharding.spec), array.shape))
    return jax.device_put(array, NamedSharding(sharding.mesh, spec))


def _axes(names: Any, shape: Shape) -> tuple[Any, ...]:
    """Names of mesh axes for an array; None for an axis of size 1."""
    padded = [*names, *[None] * (len(shape) - len(names))]
    return tuple(n if size > 1 else None for n, size in zip(padded, shape, strict=True))
