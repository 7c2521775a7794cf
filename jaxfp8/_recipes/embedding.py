"""Rows of an 8-bit table: an embedding lookup, widening only the returned rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.quantize import dequantize
from jaxfp8._value import dtypes
from jaxfp8._value.checks import as_array
from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray, check_qarray, scale_and_zero_point


def lookup(table: QArray, indices: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """`dequantize(table)[indices]`; only the rows at `indices` are widened.

    A negative index counts from the end, and one out of range gives NaN, as in Flax.
    """
    operation = "jaxfp8.lookup"
    check_qarray(table, operation, "table")
    indices = as_array(operation, "indices", indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        got, needs, remedy = f"is {indices.dtype}", "integers are needed", "cast it to int32"
        raise TypeError(message(operation, "`indices`", got, needs, remedy))
    if table.ndim != 2:
        got, needs = f"has shape {table.shape}", "(rows, features) is needed"
        raise ValueError(message(operation, "`table`", got, needs, "reshape it first"))
    size = table.shape[0]
    row = jnp.where(indices < 0, indices + size, indices)
    y = dequantize(_take(table, jnp.clip(row, 0, max(size - 1, 0))), dtype)
    inside = (row >= 0) & (row < size)
    return jnp.where(inside[..., None], y, jnp.nan)


def _take(table: QArray, row: jax.Array) -> QArray:
    """The rows at valid indices."""
    scale, zero_point, (rows, columns) = scale_and_zero_point(table)

    def shared(x: jax.Array) -> jax.Array:
        return jnp.take(x, row // rows, axis=0, mode="clip")

    taken = functools.partial(jnp.take, indices=row, axis=0, mode="clip")
    values = dtypes.moved(taken, table.qvalue)
    zero_point = None if zero_point is None else shared(zero_point)
    return QArray(values, shared(scale), zero_point, tiles=(columns,))
