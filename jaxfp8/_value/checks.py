"""Checks of users' arguments; each error names the argument."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value.dtypes import INT32, WIDE_FLOAT, names
from jaxfp8._value.errors import message, shown

FLOAT64 = np.dtype(np.float64)
_NARROW = {FLOAT64: np.dtype(np.float32), np.dtype(np.int64): INT32}
# XLA may flush a smaller float32 to 0, and dividing by it gives infinity.
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)


def as_array(operation: str, name: str, value: Any) -> jax.Array:
    """An array from an argument; a Python number gets 32 bits, with x64 or without."""
    if isinstance(value, jax.Array):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no array")
        return jnp.asarray(value, _number_dtype(value))
    except OverflowError as error:
        needs, remedy = "an int has to fit int32", "give a smaller one"
        raise ValueError(message(operation, f"`{name}`", f"is {value}", needs, remedy)) from error
    except (TypeError, ValueError) as error:
        got, needs = f"is of type {type(value).__name__}", "an array of numbers is needed"
        remedy = f"pass `{name}` as a jax.Array (inside `jax.eval_shape` for shapes alone)"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy)) from error


def as_dtype(operation: str, name: str, dtype: Any, allowed: tuple[np.dtype, ...]) -> np.dtype:
    """One of the `allowed` dtypes, given as a dtype, a type or a name."""
    known = find_dtype(dtype)
    if known is None or known not in allowed:
        got = f"is {shown(dtype)}" if known is None else f"is {known.name}"
        remedy = "convert it with `.astype`" if name == "x" else "choose one of these"
        needs = f"{names(allowed)} is needed"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy))
    return known


def as_floats(operation: str, name: str, value: Any) -> jax.Array:
    """An array of float32, bfloat16 or float16 from an argument."""
    array = as_array(operation, name, value)
    as_dtype(operation, name, array.dtype, WIDE_FLOAT)
    return array


def as_precision(operation: str, precision: Any) -> str:
    """DEFAULT of both sides is "default"; anything higher on one side is "highest"."""
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    try:
        lhs, rhs = map(jax.lax.Precision, pair)
    except (TypeError, ValueError) as error:
        got, needs = (
            f"is {shown(precision)}",
            "None, a jax.lax.Precision, or a pair of them is needed",
        )
        remedy = "pass jax.lax.Precision.DEFAULT or HIGHEST"
        raise ValueError(message(operation, "`precision`", got, needs, remedy)) from error
    return "default" if lhs == rhs == jax.lax.Precision.DEFAULT else "highest"


def as_pattern(operation: str, name: str, value: Any, needs: str, remedy: str) -> re.Pattern[str]:
    """A regular expression from an argument; `needs` and `remedy` are those of its error."""
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        got = f"is {shown(value)}"
        raise ValueError(message(operation, f"`{name}`", got, needs, remedy)) from error


def as_index(value: Any) -> int | None:
    """An int from any integer type, or None; a bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, as an array or a `jax.ShapeDtypeStruct` has."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def has_data(leaf: Any) -> bool:
    """Whether a leaf has values, unlike a `jax.ShapeDtypeStruct`."""
    return hasattr(leaf, "__array__") or hasattr(leaf, "__jax_array__")


def narrow(array: jax.Array) -> jax.Array:
    """A float64 or int64 array in 32 bits, as without x64."""
    dtype = _NARROW.get(array.dtype)
    return array if dtype is None else array.astype(dtype)


def check_scale_number(operation: str, scale: float, dtype: np.dtype) -> None:
    """A number given as the scale must be positive and finite in its stored `dtype`."""
    info = jnp.finfo(dtype)
    least = max(float(info.smallest_subnormal), _LEAST_NORMAL)
    if not least <= scale <= float(info.max):
        needs = f"a {dtype.name} scale is a number from {least:.3g} to {float(info.max):.3g}"
        remedy = "leave it out to have one chosen"
        raise ValueError(message(operation, "`scale`", f"is {scale}", needs, remedy))


def check_zero_point_number(operation: str, zero_point: int, dtype: np.dtype) -> None:
    """A number given as the zero point must be a code of `dtype`: it is the code of 0."""
    info = np.iinfo(dtype)
    if not info.min <= zero_point <= info.max:
        needs = f"a zero point of {dtype.name} is one of its codes, {info.min} to {info.max}"
        remedy = "pass True to have one chosen"
        raise ValueError(message(operation, "`zero_point`", f"is {zero_point}", needs, remedy))


def named_tiles(
    operation: str, rank: int, channelwise: Collection[int], tiled: Mapping[int, int]
) -> dict[int, int]:
    """Sizes of the tiles by axis of `x`, counted from the first, for each named axis."""
    named = {
        _axis(operation, "channelwise_axes", axis, rank): 1
        for axis in _axes(operation, channelwise)
    }
    if not isinstance(tiled, Mapping):
        needs, remedy = "a size by axis is needed", "write it like `{0: 128}`"
        raise TypeError(message(operation, "`tiled_axes`", f"is {shown(tiled)}", needs, remedy))
    for axis, tile in tiled.items():
        place = _axis(operation, "tiled_axes", axis, rank)
        if place in named:
            remedy = "name it in `channelwise_axes` or once in `tiled_axes`"
            needs = "an axis has one size of tile"
            raise ValueError(message(operation, f"axis {axis}", "is named twice", needs, remedy))
        named[place] = _tile(operation, axis, tile)
    return named


def has_dtype(dtype: np.dtype) -> str:
    """The name of a wrong dtype in an error."""
    return f"has dtype {dtype.name}"


def type_error(
    operation: str, operand: str, leaf: str, got: str, needs: str, remedy: str
) -> NoReturn:
    """Refuses the type of a leaf of a `QArray`."""
    raise TypeError(message(operation, f"{leaf} of `{operand}`", got, needs, remedy))


def value_error(
    operation: str, operand: str, leaf: str, got: str, needs: str, remedy: str
) -> NoReturn:
    """Refuses the shape or value of a leaf of a `QArray`."""
    raise ValueError(message(operation, f"{leaf} of `{operand}`", got, needs, remedy))


def _axes(operation: str, axes: Any) -> list[Any]:
    """The axes of a collection; a mapping is refused, as its values would be lost."""
    if isinstance(axes, Collection) and not isinstance(axes, Mapping | str):
        return list(axes)
    needs, remedy = "a collection of axes is needed", "write it like `(0,)`"
    raise TypeError(message(operation, "`channelwise_axes`", f"is {shown(axes)}", needs, remedy))


def _axis(operation: str, name: str, axis: Any, rank: int) -> int:
    """An axis counted from the first."""
    got, index = f"names axis {axis!r}", as_index(axis)
    if index is None:
        needs, remedy = "an axis is an int", "give its place"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy))
    if not -rank <= index < rank:
        remedy = f"name axes from {-rank} to {rank - 1}" if rank else "leave it empty"
        raise ValueError(message(operation, f"`{name}`", got, f"`x` has {rank} axes", remedy))
    return index % rank


def _tile(operation: str, axis: int, tile: Any) -> int:
    size = as_index(tile)
    if size is None or size < 1:
        needs, remedy = "a tile is an int of at least 1", "give the number of values that share"
        got = f"maps axis {axis} to {tile!r}"
        raise ValueError(message(operation, "`tiled_axes`", got, needs, remedy))
    return size


def _number_dtype(value: Any) -> np.dtype | None:
    """The dtype for a Python number; None leaves it to JAX."""
    if isinstance(value, float):
        return np.dtype(np.float32)
    return INT32 if isinstance(value, int) and not isinstance(value, bool) else None


def find_dtype(dtype: Any) -> np.dtype | None:
    """A numpy dtype, or None if there is no such dtype; numpy reads None as float64."""
    try:
        return None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):
        return None
