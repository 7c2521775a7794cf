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


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The epilogue arguments of a product, as given by the user and in the order of equations."""

    bias: ArrayLike | None
    residual: ArrayLike | None
    activation: str | None
    out_scale: ArrayLike | None
    return_amax: bool


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

    `out_shape[i]` is axis `order[i]` of the dot's output.
    """
    _check_activation(operation, epilogue.activation)
    _check_scale_is_given(operation, epilogue, out_dtype)
    inverse = tuple(int(i) for i in np.argsort(order))
    operands = {}
    for name in ("residual", "bias", "out_scale"):
        value = getattr(epilogue, name)
        if value is not None:
            array = check_addend(operation, name, value, out_shape)
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
        got = f"is to be {preferred if dtype is None else dtype}"
        needs = f"{_dtypes.names(allowed)} is needed"
        remedy = "set `preferred_element_type`, for 8 bits together with `out_scale`"
        raise TypeError(message(operation, "the output", got, needs, remedy))
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
        needs = (
            "that is the bare sum of two integer operands without scale, bias, residual, "
            "activation, out_scale or amax"
        )
        remedy = "pass the integer arrays themselves (`q.qvalue`), or ask for float32"
        raise TypeError(message(operation, "an int32 output", "was asked for", needs, remedy))
    largest = contracting_size * sides[0].max_abs * sides[1].max_abs
    if largest >= 2**31:
        got = f"sums {contracting_size} products and may reach {largest}"
        remedy = "ask for float32 (`preferred_element_type=jnp.float32`), or split the contraction"
        needs = "int32 ends at 2147483647"
        raise ValueError(message(operation, "an int32 output", got, needs, remedy))


def _check_activation(operation: str, activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        got, remedy = f"is {shown(activation)}", "apply another one to the result"
        needs = f"None or one of {', '.join(map(repr, ACTIVATIONS))} is needed"
        raise ValueError(message(operation, "`activation`", got, needs, remedy))


def _check_scale_is_given(operation: str, epilogue: Epilogue, out_dtype: np.dtype) -> None:
    eight_bit = _dtypes.is_eight_bit(out_dtype)
    if eight_bit == (epilogue.out_scale is not None):
        return
    if eight_bit:
        got = f"is missing for the output of {out_dtype}"
        needs = "an 8-bit output is `saturate(y / out_scale)`"
        remedy = "pass `out_scale`, a scalar or one per row or column "
        remedy += "(`amax / jnp.finfo(dtype).max` fills the range)"
    else:
        got, needs = f"is given for an output of {out_dtype}", "it scales an 8-bit output"
        remedy = "set `preferred_element_type` to an 8-bit type, or divide the result"
    raise ValueError(message(operation, "`out_scale`", got, needs, remedy))


def _check_out_scale_value(operation: str, out_scale: Any) -> None:
    if isinstance(out_scale, int | float) and not 0 < np.float32(out_scale) < np.inf:
        got, needs = f"is {out_scale}", "a positive, finite float32 is needed"
        remedy = "`amax / jnp.finfo(dtype).max` fills the range of the output"
        raise ValueError(message(operation, "`out_scale`", got, needs, remedy))


def check_addend(
    operation: str, name: str, value: ArrayLike, out_shape: Shape, over: str = "the output"
) -> jax.Array:
    """An array that broadcasts over the output, or what else has the shape, at its rank."""
    array = as_array(operation, name, value)
    if array.dtype not in _dtypes.WIDE_FLOAT:
        got, needs = f"is a {array.dtype} array", f"{_dtypes.names(_dtypes.WIDE_FLOAT)} is needed"
        remedy = "cast it with `.astype(jnp.float32)`"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy))
    missing = len(out_shape) - array.ndim
    shape = (1,) * missing + array.shape
    if missing < 0 or any(s not in (1, o) for s, o in zip(shape, out_shape, strict=True)):
        got = f"has shape {array.shape}"
        needs = f"it broadcasts over {over} of shape {out_shape}"
        remedy = "give it the last of these axes, each of size 1 or full"
        raise ValueError(message(operation, f"`{name}`", got, needs, remedy))
    return array.reshape(shape)
