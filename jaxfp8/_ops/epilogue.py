"""The epilogue of a product: arguments are checked and get the rank of the output."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.operands import Side, as_array
from jaxfp8._value import checks
from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import ACTIVATIONS, EpilogueSpec, Shape

_WIDE_OUT = (*_dtypes.WIDE_FLOAT, _dtypes.INT32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue arguments of a product, as given by the user."""

    bias: ArrayLike | None = None
    residual: ArrayLike | None = None
    activation: str | None = None
    out_scale: ArrayLike | None = None
    return_amax: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """An epilogue with its arrays at the rank of the output."""

    spec: EpilogueSpec
    operands: dict[str, jax.Array]


def prepare(
    operation: str,
    epilogue: Epilogue,
    out_shape: Shape,
    order: Shape,
    out_dtype: np.dtype,
) -> Prepared:
    """Checks an epilogue and lays its arrays out in the order of the dot.

    Args:
      operation: name for errors.
      epilogue: the user's arguments.
      out_shape: shape of the user's output.
      order: `out_shape[i]` is axis `order[i]` of the dot's output.
      out_dtype: dtype of the output.

    Returns:
      Its spec and the operands it adds to the call.
    """
    _check_activation(operation, epilogue.activation)
    _check_scale_is_given(operation, epilogue, out_dtype)
    inverse = tuple(int(i) for i in np.argsort(order))
    operands = {}
    for name in ("residual", "bias", "out_scale"):
        value = getattr(epilogue, name)
        if value is not None:
            array = _check_addend(operation, name, value, out_shape)
            operands[name] = array.transpose(inverse)
    _check_out_scale_value(operation, epilogue.out_scale)
    if "out_scale" in operands:
        operands["out_scale"] = operands["out_scale"].astype(jnp.float32)
    shapes = {name: array.shape for name, array in operands.items()}
    spec = EpilogueSpec(
        **shapes,
        residual_dtype=operands["residual"].dtype.name if "residual" in operands else "",
        activation=epilogue.activation or "none",
        out_dtype=out_dtype.name,
        amax=(1,) * len(out_shape) if epilogue.return_amax else None,
    )
    return Prepared(spec=spec, operands=operands)


def choose_out_dtype(
    operation: str,
    epilogue: Epilogue,
    preferred: DTypeLike | None,
    sides: tuple[Side, Side],
    contracting_size: int,
) -> np.dtype:
    """The output dtype: the one stated, else that of the float side, else that of the scales."""
    dtype = _default_out_dtype(sides) if preferred is None else checks.find_dtype(preferred)
    allowed = _WIDE_OUT + _dtypes.EIGHT_BIT
    if dtype not in allowed:
        raise TypeError(
            message(
                operation,
                "the output",
                f"is to be {preferred if dtype is None else dtype}",
                f"{_dtypes.names(allowed)} is needed",
                "set `preferred_element_type`, for 8 bits together with `out_scale`",
            )
        )
    if dtype == _dtypes.INT32:
        _check_int32(operation, epilogue, sides, contracting_size)
    return dtype


def _default_out_dtype(sides: tuple[Side, Side]) -> np.dtype:
    for side in sides:
        if side.dtype in _dtypes.WIDE_FLOAT:
            return side.dtype
    named = [side.result_dtype for side in sides if side.result_dtype is not None]
    if named:
        return np.dtype(jnp.promote_types(named[0], named[-1]))
    integers = all(_dtypes.is_int8(side.dtype) for side in sides)
    return _dtypes.INT32 if integers else np.dtype(np.float32)


def _check_int32(
    operation: str, epilogue: Epilogue, sides: tuple[Side, Side], contracting_size: int
) -> None:
    plain = all(_dtypes.is_int8(side.dtype) and side.scale is None for side in sides)
    extras = (epilogue.bias, epilogue.residual, epilogue.activation, epilogue.out_scale)
    if not plain or epilogue.return_amax or any(extra is not None for extra in extras):
        raise TypeError(
            message(
                operation,
                "an int32 output",
                "was asked for",
                "that is the bare sum of two integer operands without scale, bias, residual, "
                "activation, out_scale or amax",
                "pass the integer arrays themselves (`q.qvalue`), or ask for float32",
            )
        )
    largest = contracting_size * sides[0].max_abs * sides[1].max_abs
    if largest >= 2**31:
        raise ValueError(
            message(
                operation,
                "an int32 output",
                f"sums {contracting_size} products and may reach {largest}",
                "int32 ends at 2147483647",
                "ask for float32 (`preferred_element_type=jnp.float32`), or split the contraction",
            )
        )


def _check_activation(operation: str, activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            message(
                operation,
                "`activation`",
                f"is {shown(activation)}",
                f"None or one of {', '.join(map(repr, ACTIVATIONS))} is needed",
                "apply another one to the result",
            )
        )


def _check_scale_is_given(operation: str, epilogue: Epilogue, out_dtype: np.dtype) -> None:
    eight_bit = _dtypes.is_eight_bit(out_dtype)
    if eight_bit and epilogue.out_scale is None:
        raise ValueError(
            message(
                operation,
                "`out_scale`",
                f"is missing for the output of {out_dtype}",
                "an 8-bit output is `saturate(y / out_scale)`",
                "pass `out_scale`, a scalar or one per row or column "
                "(`amax / jnp.finfo(dtype).max` fills the range)",
            )
        )
    if not eight_bit and epilogue.out_scale is not None:
        raise ValueError(
            message(
                operation,
                "`out_scale`",
                f"is given for an output of {out_dtype}",
                "it scales an 8-bit output",
                "set `preferred_element_type` to an 8-bit type, or divide the result",
            )
        )


def _check_out_scale_value(operation: str, out_scale: Any) -> None:
    if isinstance(out_scale, int | float) and not 0 < np.float32(out_scale) < np.inf:
        raise ValueError(
            message(
                operation,
                "`out_scale`",
                f"is {out_scale}",
                "a positive, finite float32 is needed",
                "`amax / jnp.finfo(dtype).max` fills the range of the output",
            )
        )


def _check_addend(operation: str, name: str, value: ArrayLike, out_shape: Shape) -> jax.Array:
    array = as_array(operation, name, value)
    if array.dtype not in _dtypes.WIDE_FLOAT:
        raise TypeError(
            message(
                operation,
                f"`{name}`",
                f"is a {array.dtype} array",
                f"{_dtypes.names(_dtypes.WIDE_FLOAT)} is needed",
                "cast it with `.astype(jnp.float32)`",
            )
        )
    missing = len(out_shape) - array.ndim
    shape = (1,) * missing + array.shape
    if missing < 0 or any(s not in (1, o) for s, o in zip(shape, out_shape, strict=True)):
        raise ValueError(
            message(
                operation,
                f"`{name}`",
                f"has shape {array.shape}",
                f"it broadcasts over the output of shape {out_shape}",
                "give it the last axes of the output, each of size 1 or full",
            )
        )
    return array.reshape(shape)
