"""How vmap reaches a scaled dot: every batched axis becomes a batch axis of the spec.

An unbatched operand gets a batch axis of size 1 and is shared, never copied.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape

Named = dict[str, jax.Array]
Axes = dict[str, Any]


def batch_scaled_dot(spec: ScaledDotSpec, named: Named, axes: Axes) -> tuple[ScaledDotSpec, Named]:
    """The problem and its operands with one more batch axis, leading in every output.

    `axes` has the place of the axis in each operand, None without one.
    """
    size = next(x.shape[axes[n]] for n, x in named.items() if axes[n] is not None)
    lead = {name: _lead(x, axes[name]) for name, x in named.items()}
    _share_at_most_one_side(lead, axes, size)
    lhs = _batch_side(spec.lhs, "lhs", lead)
    rhs = _batch_side(spec.rhs, "rhs", lead)
    epilogue = dataclasses.replace(
        spec.epilogue,
        residual=_shape(lead.get("residual")),
        bias=_shape(lead.get("bias")),
        out_scale=_shape(lead.get("out_scale")),
        amax=None if spec.epilogue.amax is None else (size, *spec.epilogue.amax),
    )
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs, epilogue=epilogue), lead


def _shape(x: jax.Array | None) -> Shape | None:
    return None if x is None else x.shape


def _lead(x: jax.Array, axis: int | None) -> jax.Array:
    return x[None] if axis is None else jnp.moveaxis(x, axis, 0)


def _share_at_most_one_side(lead: Named, axes: Axes, size: int) -> None:
    """Gives the batch axis its full size on at least one side, and on a side with it in the scale.

    Only a vmap over scales alone repeats values.
    """
    for side in ("lhs", "rhs"):
        parts = (f"{side}_scale", f"{side}_zero_point", f"{side}_sums")
        if any(axes.get(part) is not None for part in parts):
            lead[side] = _repeat(lead[side], size)
    if lead["lhs"].shape[0] == lead["rhs"].shape[0] == 1 != size:
        smaller = min(("lhs", "rhs"), key=lambda side: math.prod(lead[side].shape))
        lead[smaller] = _repeat(lead[smaller], size)


def _batch_side(side: OperandSpec, name: str, lead: Named) -> OperandSpec:
    """The spec of one side with a leading batch axis; its scale and zero point get one shape."""
    parts = [
        lead_name for lead_name in (f"{name}_scale", f"{name}_zero_point") if lead_name in lead
    ]
    values = lead[name].shape[0]
    varies = values == 0 or any(lead[part].shape[0] != 1 for part in parts)
    for part in parts:
        lead[part] = _repeat_factor(lead[part], values if varies else 1)
    if (sums := f"{name}_sums") in lead:
        lead[sums] = _repeat(lead[sums], values)
    tile = 1 if varies else values
    return dataclasses.replace(
        side,
        shape=lead[name].shape,
        contracting=tuple(axis + 1 for axis in side.contracting),
        batch=(0, *(axis + 1 for axis in side.batch)),
        tiles=(tile, *side.tiles),
    )


def _repeat_factor(x: jax.Array, size: int) -> jax.Array:
    """A scale or zero point with the axis. A repeated scale is float32: cotangents are summed."""
    wide = x.dtype in dtypes.SIXTEEN_BIT_FLOATS and x.shape[0] != size
    return _repeat(x.astype(jnp.float32) if wide else x, size)


def _repeat(x: jax.Array, size: int) -> jax.Array:
    return x if x.shape[0] == size else jnp.broadcast_to(x, (size, *x.shape[1:]))
