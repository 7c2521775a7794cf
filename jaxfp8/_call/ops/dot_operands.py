"""Shapes and dtypes of the operands of a scaled dot."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import AS_STORED, ScaledDotSpec, Shape


def check_operands(spec: ScaledDotSpec, avals: Sequence[jax.core.ShapedArray]) -> None:
    """Compares operands with their spec.

    Raises:
      TypeError: a shape or a dtype is another.
    """
    for name, aval, (shape, dtype) in zip(
        spec.operand_names(), avals, _expected(spec), strict=True
    ):
        dtypes = _dtypes_of(spec, name, dtype)
        if aval.shape != shape or aval.dtype not in dtypes:
            raise TypeError(
                f"`scaled_dot`: {name} is {aval.dtype}{list(aval.shape)}, but its spec says "
                f"{_dtypes.names(dtypes)} of shape {list(shape)}; make the spec from the operands."
            )


def _expected(spec: ScaledDotSpec) -> list[tuple[Shape, np.dtype]]:
    """Shape and dtype of each operand of the call; `_dtypes_of` allows other dtypes."""
    epilogue = spec.epilogue
    table: dict[str, tuple[Shape | None, DTypeLike]] = {
        "lhs": (spec.lhs.shape, _dtypes.storage(spec.lhs.dtype)),
        "rhs": (spec.rhs.shape, _dtypes.storage(spec.rhs.dtype)),
        "lhs_scale": (spec.lhs.scale_shape, np.float32),
        "lhs_zero_point": (spec.lhs.scale_shape, np.int32),
        "rhs_scale": (spec.rhs.scale_shape, np.float32),
        "rhs_zero_point": (spec.rhs.scale_shape, np.int32),
        "lhs_sums": (spec.lhs.sums_shape, np.int32),
        "rhs_sums": (spec.rhs.sums_shape, np.int32),
        "residual": (epilogue.residual, epilogue.residual_dtype or np.float32),
        "bias": (epilogue.bias, np.float32),
        "out_scale": (epilogue.out_scale, np.float32),
    }
    given = (table[name] for name in spec.operand_names())
    return [(shape or (), np.dtype(dtype)) for shape, dtype in given]


def _dtypes_of(spec: ScaledDotSpec, name: str, dtype: np.dtype) -> tuple[np.dtype, ...]:
    """The allowed dtypes of an operand: FP8 values as themselves too, others as stored."""
    if name in ("lhs", "rhs"):
        return tuple(dict.fromkeys((dtype, np.dtype(getattr(spec, name).dtype))))
    _, others = AS_STORED.get(name, (dtype, ()))
    return (dtype,) if spec.rounds(name) else (dtype, *others)
