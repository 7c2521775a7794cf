"""The requested precision of a dot, and whether a scaled dot has it.

A scaled dot rounds no operand and accumulates in float32. It is at least as precise as any
algorithm with rounded operands or with sums in float32 or less.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from jaxfp8._value import dtypes

_Preset = lax.DotAlgorithmPreset
# The types of `precision` in `dot_general`.
Asked = (
    None
    | lax.Precision
    | tuple[lax.Precision, lax.Precision]
    | lax.DotAlgorithm
    | lax.DotAlgorithmPreset
)
# With these a device may accumulate 8-bit products in less than float32.
_FAST = (
    _Preset.DEFAULT,
    _Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    _Preset.ANY_F8_ANY_F8_ANY_FAST_ACCUM,
)
# A float32 accumulator (int32 for 8-bit integers) is as precise as one of these.
_SUMS = (*dtypes.WIDE_FLOAT, *dtypes.FLOAT8, dtypes.INT32)


def asked(precision: Asked) -> str:
    """The precision of a scaled dot, `default` or `highest`, for the precision of a dot."""
    if isinstance(precision, lax.DotAlgorithmPreset):
        return "default" if precision in _FAST else "highest"
    if isinstance(precision, lax.DotAlgorithm):
        return "default" if precision.allow_imprecise_accumulation else "highest"
    both = precision if isinstance(precision, tuple) else (precision,)
    return "highest" if lax.Precision.HIGHEST in both else "default"


def why_not(precision: Asked) -> str | None:
    """Why a scaled dot is less precise than requested; None if it is not."""
    if not isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    sums = precision.accumulation_type
    if sums is None or np.dtype(sums) in _SUMS:
        return None
    return f"precision {precision} sums in {np.dtype(sums)}"
