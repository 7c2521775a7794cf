"""The call for ragged dots on the CPU: one custom call, a scaled dot of each group inside.

Order of this file: whether it takes a problem, the call, its layout.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.library import ffi
from jaxfp8._call.ops import lowering
from jaxfp8._call.ops.ragged_reference import RaggedSpec, for_each
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape, is_known
from jaxfp8._value.tiles import repeated


def why_not(spec: RaggedSpec) -> str | None:
    """Why the library does not multiply these groups here, or None if it does."""
    if not is_known((*spec.lhs.shape, *spec.rhs.shape, spec.groups)):
        return "its sizes are not known when the program is lowered"
    if spec.rows * spec.columns * spec.groups * spec.lhs.depth == 0:
        return "there is nothing to multiply"
    return lowering.why_not(_dot(spec), "cpu")


def call(*operands: jax.Array, spec: RaggedSpec) -> list[jax.Array]:
    """The call of docs/custom_call.md, of arrays with their groups first."""
    ffi.ensure_registered("cpu")
    named = dict(zip(spec.operand_names(), operands, strict=True))
    sizes, dot = named.pop("group_sizes"), _dot(spec)
    results = [jax.ShapeDtypeStruct(spec.out_shape, dtypes.storage(spec.out_dtype))]
    if dot.epilogue.amax is not None:
        results.append(jax.ShapeDtypeStruct(dot.epilogue.amax, np.dtype(np.float32)))
    found = jax.ffi.ffi_call(ffi.RAGGED_TARGET, results)(
        *(_given(named[name], name, spec) for name in dot.operand_names()),
        sizes,
        **dot.attributes(),
        grouping=spec.grouping,
        kernel="",
    )
    return [found[0], *(y.reshape(1, 1, 1) for y in found[1:])]


def _dot(spec: RaggedSpec) -> ScaledDotSpec:
    """The scaled dot of one group with all rows, or all of K."""
    lhs, rhs = _of_group("lhs", spec), _of_group("rhs", spec)
    epilogue = spec.epilogue.map_shapes(lambda shape: shape[1:])
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue, precision=spec.precision)


def _given(x: jax.Array, name: str, spec: RaggedSpec) -> jax.Array:
    """An operand in the layout of the call."""
    if name not in spec.plane_shapes:
        return _array(x, name[:3], spec)
    if name != "bias" and spec.grouping == "rows":
        return x[0]
    return jnp.broadcast_to(x, (spec.groups, *x.shape[1:]))


def _of_group(name: str, spec: RaggedSpec) -> OperandSpec:
    """A side of one group."""
    side: OperandSpec = getattr(spec, name)
    order, repeats = _layout(name, spec)
    order = order[len(side.batch) :]
    return dataclasses.replace(
        side,
        shape=tuple(side.shape[axis] for axis in order),
        tiles=tuple(1 if axis == repeats else side.tiles[axis] for axis in order),
        contracting=(order.index(side.contracting[0]),),
        batch=(),
    )


def _layout(name: str, spec: RaggedSpec) -> tuple[Shape, int | None]:
    """Axes of a side as the call takes them, and the axis with a scale for each position.

    Groups come first, then an axis in groups. Groups begin anywhere, inside tiles of scales too.
    """
    side: OperandSpec = getattr(spec, name)
    (free,), (contracted,) = side.free, side.contracting
    starts = None
    if spec.grouping == "contracted":
        order: Shape = (contracted, free)
        starts = contracted
    elif name == "lhs":
        order = (*side.batch, free, contracted)
        starts = free if spec.grouping == "rows" else None
    else:
        order = (*side.batch, *sorted((free, contracted)))
    cuts = starts is not None and side.tiles[starts] < side.shape[starts]
    return order, starts if cuts else None


def _array(x: jax.Array, name: str, spec: RaggedSpec) -> jax.Array:
    """The values or a factor of a side in that layout. What lies so already is not copied."""
    side: OperandSpec = getattr(spec, name)
    order, repeats = _layout(name, spec)
    if order != tuple(range(x.ndim)) and dtypes.is_float8(x.dtype):
        x = jax.lax.bitcast_convert_type(x, np.uint8)  # XLA:CPU changes FP8 in some copies
    if side.batch:
        x = for_each(x, side)
    if repeats is not None and x.shape[repeats] != side.shape[repeats]:
        x = repeated(x, repeats, side.tiles[repeats], side.shape[repeats])
    return x.transpose(order)
