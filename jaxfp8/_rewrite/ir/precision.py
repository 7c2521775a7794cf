"""What a dot asks of the arithmetic, and whether a scaled dot gives it.

A scaled dot multiplies its operands as they are, and sums in float32. So it is at least as precise
as an algorithm that rounds operands first, or sums in float32 or less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jaxfp8._value import dtypes

_Preset = lax.DotAlgorithmPreset
# Those that let a device sum 8-bit products in less than float32.
_FAST = (
    _Preset.DEFAULT,
    _Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    _Preset.ANY_F8_ANY_F8_ANY_FAST_ACCUM,
)
# What float32 sums, exact in int32 where both sides are integers, are as good as.
_SUMS = (*dtypes.WIDE_FLOAT, *dtypes.FLOAT8, dtypes.INT32)


def asked(precision: Any) -> str:
    """`default` or `highest`, as a scaled dot has it, for the `precision` of a dot."""
    if isinstance(precision, lax.DotAlgorithmPreset):
        return "default" if precision in _FAST else "highest"
    if isinstance(precision, lax.DotAlgorithm):
        return "default" if precision.allow_imprecise_accumulation else "highest"
    both = precision if isinstance(precision, tuple) else (precision,)
    return "highest" if lax.Precision.HIGHEST in both else "default"


def why_not(precision: Any) -> str | None:
    """Why a scaled dot is not as precise as that, or None if it is."""
    if not isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    sums = precision.accumulation_type
    if sums is None or np.dtype(sums) in _SUMS:
        return None
    return f"precision {precision} sums in {np.dtype(sums)}"
