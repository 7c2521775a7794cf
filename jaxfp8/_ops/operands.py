"""From an argument of a product to one side of a scaled dot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxfp8._value import checks, dtypes
from jaxfp8._value.errors import message
from jaxfp8._value.packing import logical_shape
from jaxfp8._value.prepared import PreparedArray, check_prepared
from jaxfp8._value.qarray import QArray, adopt, check_qarray, stored_factors
from jaxfp8._value.spec import OperandSpec, Shape
from jaxfp8._value.transposed import TransposedArray

Operand = ArrayLike | QArray | TransposedArray | PreparedArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One operand as the primitive takes it."""

    values: jax.Array
    dtype: np.dtype  # their logical dtype
    scale: jax.Array | None = None  # a wide float or bytes of float8_e8m0fnu, one per tile
    zero_point: jax.Array | None = None  # int32, int8 or uint8, one per tile, or None
    tiles: Shape  # tile sizes by axis
    result_dtype: np.dtype | None  # the output dtype from this side if the user states none
    axes: Shape | None = None  # by the user's axis, the axis of `values`; None if they are the same
    # The only axis a product may sum over, counted from the end of the shape; None for any.
    summed: int | None = None
    sums: jax.Array | None = None  # the sums of the values over it, of size 1 there, or None

    @property
    def shape(self) -> Shape:
        """Shape of the values, as the user knows it."""
        return tuple(self.values.shape[axis] for axis in self._axes())

    def _axes(self) -> Shape:
        return tuple(range(self.values.ndim)) if self.axes is None else self.axes

    @property
    def max_abs(self) -> int:
        """Bound on `|value - zero_point|` of an integer side."""
        return 255 if self.zero_point is not None or self.dtype == np.uint8 else 128

    def prepend(self, count: int) -> Side:
        """This side with `count` leading axes of size 1."""
        lead = (1,) * count

        def grow(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else x.reshape(lead + x.shape)

        return dataclasses.replace(
            self,
            values=self.values.reshape(lead + self.values.shape),
            scale=grow(self.scale),
            zero_point=grow(self.zero_point),
            sums=grow(self.sums),
            tiles=lead + self.tiles,
            axes=None
            if self.axes is None
            else (*range(count), *(count + axis for axis in self.axes)),
        )

    def spec(self, contracting: Shape, batch: Shape) -> OperandSpec:
        """The spec of this side, by the axes of `values`."""
        axes = self._axes()
        return OperandSpec(
            dtype=self.dtype.name,
            shape=self.values.shape,
            contracting=tuple(axes[axis] for axis in contracting),
            batch=tuple(axes[axis] for axis in batch),
            tiles=self.tiles,
            scale=self.scale is not None,
            zero_point=self.zero_point is not None,
            sums=self.sums is not None,
            scale_exponents=self._has_exponents,
        )

    @property
    def _has_exponents(self) -> bool:
        return self.scale is not None and self.scale.dtype == np.uint8

    def without_exponents(self) -> Side:
        """This side with a scale in float32 in place of bytes."""
        if self.scale is None or not self._has_exponents:
            return self
        return dataclasses.replace(self, scale=dtypes.of_exponents(self.scale))

    def free_order(self, contracting: Shape, batch: Shape) -> Shape:
        """By free axis, as the user knows them, its place among the free axes of `values`."""
        used = {*contracting, *batch}
        free = [axis for i, axis in enumerate(self._axes()) if i not in used]
        return tuple(sorted(free).index(axis) for axis in free)

    def operands(self, name: str) -> dict[str, jax.Array | None]:
        """The arrays of this side by the names of `scaled_dot`."""
        return {
            name: self.values,
            f"{name}_scale": self.scale,
            f"{name}_zero_point": self.zero_point,
            f"{name}_sums": self.sums,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSide(Side):
    """A side with the arrays and tiles of `PreparedArray.packed`, in the CPU's order."""

    summed: int

    @property
    def shape(self) -> Shape:
        """Shape of the values, as the user knows it."""
        return logical_shape(self.values.shape, self.summed)

    def spec(self, contracting: Shape, batch: Shape) -> OperandSpec:
        """The spec of this side in the user's axes, without tiles; `prepared_dot` splits it."""
        spec = super().spec((), ())
        return dataclasses.replace(
            spec, shape=self.shape, contracting=contracting, batch=batch, tiles=self.shape
        )

    def free_order(self, contracting: Shape, batch: Shape) -> Shape:
        """The user's order; `prepared_dot` keeps it."""
        return tuple(range(len(self.shape) - len(contracting) - len(batch)))


def as_sides(operation: str, lhs: Operand, rhs: Operand) -> tuple[Side, Side]:
    """Checks both operands of an operation; one of them must be 8-bit."""
    sides = as_side(operation, "lhs", lhs), as_side(operation, "rhs", rhs)
    if not any(dtypes.is_eight_bit(side.dtype) for side in sides):
        got = f"are {sides[0].dtype} and {sides[1].dtype} arrays"
        needs = "one of them has to be 8-bit"
        remedy = "make a QArray with `jaxfp8.quantize`, or use the function of jax.numpy"
        raise TypeError(message(operation, "`lhs` and `rhs`", got, needs, remedy))
    return sides


def as_side(operation: str, name: str, operand: Operand) -> Side:
    """Checks one operand: a QArray (ours or qwix's), a view of one, a prepared one, an array."""
    operand = adopt(operand)
    if isinstance(operand, QArray):
        return Side(**_quantized(operation, name, operand))
    if isinstance(operand, TransposedArray):
        return Side(**_quantized(operation, name, operand.stored), axes=operand.axes)
    if isinstance(operand, PreparedArray):
        if name != "rhs":
            needs, remedy = "only `rhs` may be", "pass `unprepare()` of it, or change sides"
            raise TypeError(message(operation, f"`{name}`", f"is {operand}", needs, remedy))
        check_prepared(operand, operation, name)
        summed = operand.contracting
        if not operand.is_whole:
            return PreparedSide(**_quantized(operation, name, operand.packed), summed=summed)
        side = as_side(operation, name, operand.packed)
        sums = None if operand.sums is None else jnp.asarray(operand.sums)
        return dataclasses.replace(side, summed=summed, sums=sums)
    array = as_array(operation, name, operand)
    if dtypes.is_eight_bit(array.dtype):
        return Side(values=array, dtype=array.dtype, tiles=_one_tile(array), result_dtype=None)
    if array.dtype not in dtypes.WIDE_FLOAT:
        known = dtypes.names(dtypes.EIGHT_BIT + dtypes.WIDE_FLOAT)
        got, needs = f"is a {array.dtype} array", f"a QArray or an array of {known} is needed"
        remedy = f"quantize `{name}` with `jaxfp8.quantize` or cast it to float32"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy))
    return Side(values=array, dtype=array.dtype, tiles=_one_tile(array), result_dtype=array.dtype)


def with_needed_sums(lhs: OperandSpec, rhs: OperandSpec) -> tuple[OperandSpec, OperandSpec]:
    """Both sides. A side's sums are given if its integers meet zero points of the other."""
    integers = dtypes.is_int8(lhs.dtype) and dtypes.is_int8(rhs.dtype)
    return (
        dataclasses.replace(lhs, sums=lhs.sums and integers and rhs.zero_point),
        dataclasses.replace(rhs, sums=rhs.sums and integers and lhs.zero_point),
    )


def as_array(operation: str, name: str, value: Any) -> jax.Array:
    """An array from an argument; a Python number becomes float32, an int too."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return checks.as_array(operation, name, value)


def _quantized(operation: str, name: str, q: QArray) -> dict[str, Any]:
    """The fields of a side from a `QArray`."""
    check_qarray(q, operation, name)
    scale, zero_point, tiles = stored_factors(q)
    return {
        "values": jnp.asarray(q.qvalue),
        "dtype": np.dtype(q.qvalue.dtype),
        "scale": scale,
        "zero_point": zero_point,
        "tiles": tiles,
        "result_dtype": q.dtype,
    }


def _one_tile(array: jax.Array) -> Shape:
    return tuple(max(size, 1) for size in array.shape)
