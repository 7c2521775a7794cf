"""Casts: of 8-bit data, of dequantized values, of scales and of products."""

from __future__ import annotations

import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts
from jaxfp8._rewrite.ir.factors import each
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled, Scales
from jaxfp8._rewrite.rules import epilogue
from jaxfp8._rewrite.rules.registry import STAYS_WIDE, is_wide_float, lost, rule
from jaxfp8._rewrite.rules.scales import rounded_as_written
from jaxfp8._value import dtypes
from jaxfp8._value.picking import bytes_to_pick_p


@rule("convert_element_type")
def convert(walk: Context, op: Op) -> Fact | None:
    """A cast from 8 bits to float or int32, or between floats; its rounding is dropped."""
    source, out = op.inputs[0], op.outputs[0]
    product = walk.product(source)
    if product is not None and source.dtype not in dtypes.EIGHT_BIT:
        return epilogue.convert(product, op)
    if source.dtype in dtypes.UNSERVED_FLOAT8 and is_wide_float(out):
        return lost(op, f"from {source.dtype} is from a dtype that no kernel has", _SERVED)
    if (scaled := walk.scaled(source)) is not None:
        return _convert_scaled(scaled, op, source, out)
    scales = walk.fact(source)
    if not (isinstance(scales, Scales) and is_wide_float(out)):
        return None
    if is_wide_float(source):
        return Scales(rounded_as_written(op, [scales.factors]) or scales.factors)
    decoded = each(op, [scales.factors]) if source.dtype == dtypes.E8M0 else None
    return None if decoded is None else Scales(decoded)


def _convert_scaled(scaled: Scaled, op: Op, source: Value, out: Value) -> Fact | None:
    """The fact about 8-bit data, dequantized or not, after a cast."""
    holds = source.dtype in (*dtypes.EIGHT_BIT_INTS, np.int16) and out.dtype == np.int32
    holds |= source.dtype in dtypes.EIGHT_BIT_INTS and out.dtype == np.int16
    if holds or is_wide_float(out) or source.dtype == out.dtype:
        return scaled
    if out.dtype in dtypes.EIGHT_BIT and source.dtype not in dtypes.EIGHT_BIT:
        return None  # quantized again: a new fact begins
    what = f"from {source.dtype} to {out.dtype}"
    if out.dtype.name in _WIDER and (out.dtype.kind in "fc" or source.dtype.kind in "iu"):
        return lost(op, f"{what} is to a dtype that no kernel has", f"use {_WIDER[out.dtype.name]}")
    remedy = (
        "keep them in float32, or quantize them to 8 bit" if is_wide_float(source) else STAYS_WIDE
    )
    return lost(op, f"{what} changes the values", remedy)


_SERVED = (
    "store the values in float8_e4m3fn or float8_e5m2, with scales that keep them in their range "
    "(`jaxfp8.quantize`)"
)
# Lossless dtypes without kernels, and the dtype to use instead.
_WIDER = {"int64": "int32", "float64": "float32", "complex64": "float32", "complex128": "float32"}


@rule("reduce_precision")
def coarsen(walk: Context, op: Op) -> Fact | None:
    """Dequantized values rounded to fewer bits, as by a cast to a float dtype and back."""
    scaled = walk.dequantized(op.inputs[0])
    exponent, mantissa = op.params["exponent_bits"], op.params["mantissa_bits"]
    is_float = (exponent >= 8 and mantissa >= 7) or (exponent >= 5 and mantissa >= 10)
    return scaled if is_float else None


@rule("bitcast_convert_type", bytes_to_pick_p.name)
def bitcast(walk: Context, op: Op) -> Fact | None:
    """FP8 stored as uint8 bit patterns: the same bytes under another dtype."""
    source, out = op.inputs[0], op.outputs[0]
    scaled = walk.scaled(source)
    if scaled is None or not {source.dtype, out.dtype} <= {*dtypes.EIGHT_BIT}:
        return None
    return Scaled(casts.bitcast(scaled.q, dtypes.storage(out.dtype)), out.dtype, origin=out)
