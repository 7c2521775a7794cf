"""The call for ragged dots on the CPU: one custom call, a scaled dot of each group inside.

Order of this file: whether it takes a problem, the call, its form.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxfp8._call.library import ffi
from jaxfp8._call.ops import lowering
from jaxfp8._call.ops.ragged_reference import RaggedSpec, for_each, one_of
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, is_known
from jaxfp8._value.tiles import repeated

_FACTORS = ("scale", "zero_point")


def why_not(spec: RaggedSpec) -> str | None:
    """Why the library does not multiply these groups here, or None if it does."""
    if not is_known((*spec.lhs.shape, *spec.rhs.shape, spec.groups)):
        return "its sizes are not known when the program is lowered"
    if spec.rows * spec.columns * spec.groups * spec.lhs.depth == 0:
        return "there is nothing to multiply"
    return lowering.why_not(_dot(_form(spec.lhs, spec), _form(spec.rhs, spec), spec), "cpu")


def call(*operands: jax.Array, spec: RaggedSpec, split: bool) -> list[jax.Array]:
    """The call of docs/custom_call.md, of arrays with their groups first."""
    del split
    ffi.ensure_registered("cpu")
    named = dict(zip(spec.operand_names(), operands, strict=True))
    arrays: dict[str, jax.Array] = {}
    for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
        of_side = (name, *(f"{name}_{factor}" for factor in _FACTORS))
        arrays |= {n: _array(named[n], side, spec) for n in of_side if n in named}
    dot = _dot(_form(spec.lhs, spec), _form(spec.rhs, spec), spec)
    out = jax.ShapeDtypeStruct(spec.out_shape, np.dtype(spec.out_dtype))
    return [
        jax.ffi.ffi_call(ffi.RAGGED_TARGET, out)(
            *(arrays[name] for name in dot.operand_names()),
            named["group_sizes"],
            **dot.attributes(),
            grouping=spec.grouping,
            kernel="",
        )
    ]


def _dot(lhs: OperandSpec, rhs: OperandSpec, spec: RaggedSpec) -> ScaledDotSpec:
    """The scaled dot of one group with all rows, or all of K."""
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=spec.epilogue, precision=spec.precision)


def _order(side: OperandSpec, spec: RaggedSpec) -> tuple[int, ...]:
    """Axes of a side as the call takes them: groups first, then an axis in groups."""
    (free,), (contracted,) = side.free, side.contracting
    if spec.grouping == "contracted":
        return contracted, free
    if side is spec.lhs:
        return (*side.batch, free, contracted)
    return (*side.batch, *sorted((free, contracted)))


def _form(side: OperandSpec, spec: RaggedSpec) -> OperandSpec:
    """A side of one group."""
    order = [axis for axis in _order(side, spec) if axis not in side.batch]
    cut = _axis_with_starts(side, spec)
    tiles = [1 if _is_repeated(side, axis, cut) else side.tiles[axis] for axis in order]
    return dataclasses.replace(
        one_of(side) if side.batch else side,
        shape=tuple(side.shape[axis] for axis in order),
        tiles=tuple(tiles),
        contracting=(order.index(side.contracting[0]),),
    )


def _axis_with_starts(side: OperandSpec, spec: RaggedSpec) -> int | None:
    """The axis along which groups begin anywhere, inside tiles of scales too."""
    if spec.grouping == "contracted":
        return side.contracting[0]
    return side.free[0] if spec.grouping == "rows" and side is spec.lhs else None


def _is_repeated(side: OperandSpec, axis: int, cut: int | None) -> bool:
    return axis == cut and side.tiles[axis] < side.shape[axis]


def _array(x: jax.Array, side: OperandSpec, spec: RaggedSpec) -> jax.Array:
    """The values or a factor of a side, as `_form` says. What lies so already is not copied."""
    order = _order(side, spec)
    if order != tuple(range(x.ndim)) and dtypes.is_float8(x.dtype):
        x = jax.lax.bitcast_convert_type(x, np.uint8)  # XLA:CPU changes FP8 in some copies
    if side.batch:
        x = for_each(x, side)
    cut = _axis_with_starts(side, spec)
    if cut is not None and _is_repeated(side, cut, cut) and x.shape[cut] != side.shape[cut]:
        x = repeated(x, cut, side.tiles[cut], side.shape[cut])
    return x.transpose(order)
