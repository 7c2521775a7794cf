"""The product with a prepared weight: a scaled dot with K and N each split into two axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._ops.operands import PreparedSide, Side
from jaxfp8._value.errors import message
from jaxfp8._value.packing import COLUMNS, QUAD, split_tile
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape


def prepared_dot(
    operation: str,
    rhs: PreparedSide,
    spec: ScaledDotSpec,
    values: dict[str, Any],
    out_sharding: PartitionSpec | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Binds a scaled dot with a prepared right side; `spec` is in the user's axes.

    K becomes quads x 4, and the columns become groups x 64. For the call below it is a scaled dot
    like any other.
    """
    columns = len(rhs.shape) - (2 if rhs.summed == -1 else 1)  # the last free axis
    if columns in spec.rhs.batch:
        got, needs = "has its columns as a batch axis", "columns are not shared"
        raise ValueError(message(operation, "`rhs`", got, needs, "pass `unprepare()` of it"))
    lhs = _split_left(operation, spec.lhs)
    split = dataclasses.replace(
        spec,
        lhs=lhs,
        rhs=_packed_spec(rhs, spec.rhs),
        epilogue=spec.epilogue.map_shapes(_split_columns),
    )
    shapes = {
        "lhs": lhs.shape,
        "lhs_scale": lhs.scale_shape,
        "lhs_zero_point": lhs.scale_shape,
        **{name: getattr(split.epilogue, name) for name in ("residual", "bias", "out_scale")},
    }
    values = {
        name: value.reshape(shapes[name]) if name in shapes and value is not None else value
        for name, value in values.items()
    }
    if out_sharding is not None:
        out_sharding = PartitionSpec(*out_sharding, None)  # groups of columns are split, if any
    out, amax = scaled_dot(split, **values, out_sharding=out_sharding)
    out = out.reshape(spec.out_shape)
    return out, None if amax is None else amax.reshape(spec.epilogue.amax)


def check_summed(operation: str, rhs: Side, contracting: Shape) -> None:
    """Refuses a product over other axes than the weight's prepared one."""
    if rhs.summed is None or contracting == (len(rhs.shape) + rhs.summed,):
        return
    got = f"is summed over axes {contracting} of {len(rhs.shape)}"
    needs = f"it was prepared for products over axis {rhs.summed} alone"
    remedy = "prepare it with the axis that is summed over, or pass `unprepare()` of it"
    raise ValueError(message(operation, "`rhs`", got, needs, remedy))


def _packed_spec(rhs: PreparedSide, spec: OperandSpec) -> OperandSpec:
    rank = len(rhs.values.shape)
    after = len(spec.shape) + rhs.summed
    return dataclasses.replace(
        spec,
        shape=rhs.values.shape,
        tiles=rhs.tiles,
        contracting=(rank - 3, rank - 1),
        batch=tuple(axis - (axis > after) for axis in spec.batch),
    )


def _split_left(operation: str, spec: OperandSpec) -> OperandSpec:
    """The left side with K split into quads x 4."""
    (axis,) = spec.contracting
    size, tile = spec.shape[axis], spec.tiles[axis]
    tiles = split_tile(tile, size, QUAD)
    if tiles is None:
        got, needs = f"has tiles of {tile} along the contracted axis", "`rhs` is prepared"
        remedy = f"use tiles of 1, 2 or a multiple of {QUAD}, or pass `rhs.unprepare()`"
        raise ValueError(message(operation, "`lhs`", got, needs, remedy))
    return dataclasses.replace(
        spec,
        shape=_replace(spec.shape, axis, (size // QUAD, QUAD)),
        tiles=_replace(spec.tiles, axis, tiles),
        contracting=(axis, axis + 1),
        batch=tuple(other + (other > axis) for other in spec.batch),
    )


def _split_columns(shape: Shape) -> Shape:
    """The shape of an array of output elements once its last axis is split."""
    return (*shape[:-1], *((1, 1) if shape[-1] == 1 else (shape[-1] // COLUMNS, COLUMNS)))


def _replace(shape: Shape, axis: int, parts: Shape) -> Shape:
    return (*shape[:axis], *parts, *shape[axis + 1 :])
