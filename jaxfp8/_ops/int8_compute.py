"""`compute="int8"`: a product of FP8 or float operands, computed in int8.

    l' = round(l / t_l),  r' = round(r / t_r)           int8; t = max |line| / 127
    y  = activation(t_l t_r s_l s_r sum_k l' r' + residual + bias)

`l` and `r` are the operands as stored, and `s` their scales. A line holds the values of one sum: a
row of the left operand, a column of the right one. Each index of a free axis therefore has a `t` of
its own. If an operand's scale changes along the sum, its values are multiplied by the scale first:
`l` is then the product, and `s` is 1. FP8 data is rounded a second time. An operand of int8 or
uint8 stays as it is, with its zero point. Sums are exact in int32.

Rounding is as in `jaxfp8.quantize`: to nearest, ties to even, in float32. NaN counts as 0,
infinities as the largest finite value of their line, and neither affects the choice of a scale. A
NaN or infinite scale follows the sum, unless it changes along it.

The product is composed of operations that exist: two of `quantize`, and a scaled dot of int8. With
few rows a GPU computes it in one call (`_call/ops/int8_form`). Its
derivative is that of the product as written, straight through the roundings to int8.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.ops.int8_form import (
    IN_INT8,
    in_one_call,
    is_rounded,
    narrowed,
    requantized,
    rounded,
)
from jaxfp8._value import dtypes
from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape, is_known

INT8 = "int8"
_LARGEST_SUM = 2**31 - 1
# A rounded operand has no -128: the scale maps its largest value to 127.
_LARGEST_CODE = 127
# An int32 holds the sum of so many products of two rounded operands.
MOST_TERMS = _LARGEST_SUM // _LARGEST_CODE**2
# A report warns if a larger share of a line's values becomes 0. A line of 4096 normal values loses
# 1 %; with values 20 times larger in it, it loses 20 %.
MANY_LOST = 0.1


def check_compute(operation: str, compute: Any) -> str | None:
    """`compute` as an argument of `operation`: None, or "int8"."""
    if compute is None or compute == INT8:
        return compute
    got, needs = f"is {shown(compute)}", 'None or "int8" is needed'
    remedy = "leave it out to multiply operands as they are stored"
    raise ValueError(message(operation, "`compute`", got, needs, remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objection:
    """Why a product cannot be computed in int8: the operand, its form, the needed form."""

    operand: str
    got: str
    needs: str
    remedy: str

    @property
    def reason(self) -> str:
        """As a reason in a report."""
        return f"it is to be computed in int8: {self.operand} {self.got}, but {self.needs}"


def why_not(spec: ScaledDotSpec) -> Objection | None:
    """Why a product cannot be computed in int8; None if it can."""
    sides = {"`lhs`": spec.lhs, "`rhs`": spec.rhs}
    for name, side in sides.items():
        if is_rounded(side) or not (side.scale or side.zero_point) or not side.scale_varies:
            continue
        return Objection(
            operand=name,
            got=f"is {side.dtype} with a scale or zero point that changes along a contracted axis",
            needs="integers are multiplied as they are, and a sum has one scale",
            remedy="leave `compute` out, or pass `jaxfp8.dequantize` of it, which is rounded anew",
        )
    largest = _largest(spec.lhs) * _largest(spec.rhs)
    size = spec.contracting_size
    if is_known(spec.lhs.shape) and size * largest > _LARGEST_SUM:
        return Objection(
            operand="the contracted axis",
            got=f"has {size} terms",
            needs=f"an int32 holds the sum of {_LARGEST_SUM // largest} such products",
            remedy="leave `compute` out, or add up products of parts of it",
        )
    return None


def int8_dot(
    operation: str, spec: ScaledDotSpec, values: dict[str, Any], out_sharding: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """The scaled dot of `spec`, computed in int8; operands and results as of `scaled_dot`."""
    if (objection := why_not(spec)) is not None:
        parts = (objection.operand, objection.got, objection.needs, objection.remedy)
        raise ValueError(message(f'{operation}, compute="int8"', *parts))
    named = {name: values[name] for name in spec.operand_names()}
    return _product(spec, out_sharding, named)


def lost(x: jax.Array, contracting: Shape) -> jax.Array:
    """The share of each line's values rounded from nonzero to 0 in int8."""
    x = x.astype(jnp.float32)
    codes, _ = rounded(x, contracting)
    is_value = (x != 0) & jnp.isfinite(x)
    count = jnp.sum(is_value, contracting)
    return jnp.sum(is_value & (codes == 0), contracting) / jnp.maximum(count, 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    spec: ScaledDotSpec, out_sharding: Any, named: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    if in_one_call(spec, list(named.values())):
        stored: dict[str, Any] = named
        return scaled_dot(spec, **stored, kernel=IN_INT8, out_sharding=out_sharding)
    made: dict[str, Any] = requantized(spec, named)
    return scaled_dot(narrowed(spec), **made, out_sharding=out_sharding)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(
    spec: ScaledDotSpec, out_sharding: Any, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    """The derivative of the product as written. Codes have none."""
    (named,), (dots,) = primals, tangents
    moving = {
        name: dot
        for name, dot in dots.items()
        if not isinstance(dot, SymbolicZero) and dot.dtype in dtypes.WIDE_FLOAT
    }

    def as_written(some: dict[str, jax.Array]) -> Any:
        every: dict[str, Any] = {**named, **some}
        return scaled_dot(spec, **every, out_sharding=out_sharding)

    points = {name: named[name] for name in moving}
    _, moved = jax.jvp(as_written, (points,), (moving,))
    return _product(spec, out_sharding, named), moved


def _largest(side: OperandSpec) -> int:
    """Bound on the magnitude of an operand's codes, zero point subtracted."""
    if is_rounded(side):
        return _LARGEST_CODE
    return 255 if side.zero_point or side.dtype == "uint8" else 128
