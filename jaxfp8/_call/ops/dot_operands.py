"""Shapes and dtypes of the operands of a scaled dot."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import AS_STORED, ScaledDotSpec


def check_operands(spec: ScaledDotSpec, avals: Sequence[jax.core.ShapedArray]) -> None:
    """Refuses operands with another shape or dtype than their spec says."""
    for (name, shape), aval in zip(spec.operand_shapes.items(), avals, strict=True):
        dtypes = _dtypes_of(spec, name)
        if aval.shape != shape or aval.dtype not in dtypes:
            raise TypeError(
                f"`scaled_dot`: {name} is {aval.dtype}{list(aval.shape)}, but its spec says "
                f"{_dtypes.names(dtypes)} of shape {list(shape)}; make the spec from the operands."
            )


def _dtypes_of(spec: ScaledDotSpec, name: str) -> tuple[np.dtype, ...]:
    """The allowed dtypes of an operand: FP8 values as themselves too, others as stored."""
    if name in ("lhs", "rhs"):
        logical = getattr(spec, name).dtype
        return tuple(dict.fromkeys((_dtypes.storage(logical), np.dtype(logical))))
    if name == "residual":
        return (np.dtype(spec.epilogue.residual_dtype),)
    if spec.has_exponents(name):
        return (np.dtype(np.uint8),)
    plain = np.dtype(np.int32 if name.endswith("_sums") else np.float32)
    dtype, others = AS_STORED.get(name, (plain, ()))
    return (dtype,) if spec.rounds(name) else (dtype, *others)
