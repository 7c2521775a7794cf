"""Quantized operands of FP8 training, and their product: one scaled dot.

Codes have no derivative. A product to be differentiated twice keeps its operands in floats as well,
and rounding is differentiated as if it were the identity.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._ops.quantize import dequantize
from jaxfp8._ops.straight_through import straight_through
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import DimensionNumbers, EpilogueSpec, OperandSpec, ScaledDotSpec, Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """A quantized operand. FP8 as bytes: XLA:CPU widens float8 arrays stacked by a scan."""

    values: jax.Array  # the codes, as uint8
    scale: jax.Array  # float32, one per tile
    # The operand in floats, if the product is to be differentiated. The value of the product does
    # not depend on it.
    wide: jax.Array | None = None
    # Size of the tile by axis of the values.
    tiles: Shape = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})  # logical dtype of the values
    # The axes of the operand in the order of the values.
    order: Shape = dataclasses.field(metadata={"static": True})

    def spec(self, contracting: Shape, batch: Shape) -> OperandSpec:
        """The operand of a product over some of its axes."""
        return OperandSpec(
            dtype=self.dtype,
            shape=self.values.shape,
            contracting=tuple(map(self.order.index, contracting)),
            batch=tuple(map(self.order.index, batch)),
            tiles=self.tiles,
            scale=True,
            zero_point=False,
        )


def multiply(
    lhs: Codes,
    rhs: Codes,
    numbers: DimensionNumbers,
    out_dtype: np.dtype,
    precision: jax.lax.Precision,
    out_sharding: PartitionSpec | None = None,
) -> jax.Array:
    """One scaled dot. With floats of both operands it has derivatives of any order."""
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = numbers
    spec = ScaledDotSpec(
        lhs=lhs.spec(lhs_axes, lhs_batch),
        rhs=rhs.spec(rhs_axes, rhs_batch),
        epilogue=EpilogueSpec(out_dtype=out_dtype.name),
        precision="default" if precision == jax.lax.Precision.DEFAULT else "highest",
    )
    y, _ = scaled_dot(
        spec,
        lhs.values,
        rhs.values,
        lhs_scale=lhs.scale,
        rhs_scale=rhs.scale,
        out_sharding=out_sharding,
    )
    if lhs.wide is None or rhs.wide is None:
        return y
    # Second derivatives are rare, so a product of floats gives them. Under jit its value is not
    # computed.
    values = _straight(lhs, lhs.wide), _straight(rhs, rhs.wide)
    highest = jax.lax.Precision.HIGHEST
    wide = jax.lax.dot_general(*values, numbers, highest, out_sharding=out_sharding)
    return straight_through(y, wide)


def _straight(codes: Codes, wide: jax.Array) -> jax.Array:
    """The values of codes, in float32 and the operand's order of axes, as if not rounded."""
    values = jax.lax.bitcast_convert_type(codes.values, jnp.dtype(codes.dtype))
    q = QArray(values, codes.scale, tiles=codes.tiles)
    axes = [codes.order.index(axis) for axis in range(q.ndim)]
    return straight_through(dequantize(q, jnp.float32).transpose(axes), wide)
