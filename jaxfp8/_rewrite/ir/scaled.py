"""Facts about 8-bit data on its way to a dot: dequantized, scales, or lost.

A fact never replaces a value. It states an equal expression. The decide pass carries facts from
equation to equation, and uses a fact only to avoid widening 8-bit data.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, all_moved
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

Part = TypeVar("Part", Value, Factor)
# A part of a fact after a view; None if it has none.
Move = Callable[[Part], Part | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """This value is a product of factors, up to its rounding."""

    factors: Factors

    def moved(self, data: Move[Value], factor: Move[Factor]) -> Scales | None:
        """The fact about a view of the value; `factor` makes each of its factors."""
        del data
        factors = all_moved(self.factors, factor)
        return None if factors is None else Scales(factors)


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """This value is `(decode(q) - zero_point) * product of factors`, up to its rounding."""

    q: Value  # the 8-bit data in its storage dtype, of the value's shape
    dtype: np.dtype  # the logical dtype of `q`
    zero_point: Factor | None = None  # an int32 factor to subtract, or None
    # Scales to multiply by, and masks (dtype bool). A False entry of a mask makes the value zero,
    # whatever the factors before it.
    factors: Factors = ()
    origin: Value | None = None  # the first value of dtype `dtype` with this data; None if unknown
    # Scalars of dtype bool. The fact holds if all of them are true when the program runs. A fact
    # with guards stays in its region.
    guards: tuple[Value, ...] = ()

    @property
    def smalls(self) -> Factors:
        """The zero point, if any, and the factors."""
        return self.factors if self.zero_point is None else (self.zero_point, *self.factors)

    def moved(self, data: Move[Value], factor: Move[Factor]) -> Scaled | None:
        """The fact about a view of the value; `data` makes its bytes.

        None if the zero point or a scale cannot be moved.
        """
        smalls = all_moved(self.smalls, factor)
        q = None if smalls is None else data(self.q)
        if smalls is None or q is None:
            return None
        zero = None if self.zero_point is None else smalls[0]
        scales = smalls if zero is None else smalls[1:]
        return dataclasses.replace(self, q=q, zero_point=zero, factors=scales)

    def scaled(self, factors: Factors) -> Scaled:
        """The fact multiplied by further factors."""
        return dataclasses.replace(self, factors=self.factors + factors)

    def stretched(self, shape: Shape) -> Scaled:
        """The fact with its axes of size 1 broadcast to `shape`."""
        if self.q.shape == shape:
            return self

        def data(q: Value) -> Value:
            run = functools.partial(jnp.broadcast_to, shape=shape)
            return graph.derived("broadcast", run, [q], shape, q.dtype)

        fact = self.moved(data, lambda factor: factor.at(shape))
        assert fact is not None, "every factor broadcasts"
        return fact


@dataclasses.dataclass(frozen=True, eq=False)
class Lost:
    """This value was dequantized 8-bit data, until an op ended the fact."""

    op: Op | None  # the op; None if the reason lies in the dot itself or in the whole function
    # reason, remedy: why the fact ended, and how to keep it.
    reason: str
    remedy: str


# The fact about the data of an operand.
Known = Scaled | Lost | None


def storage_bytes(value: Value) -> Value:
    """The bytes of an 8-bit value."""
    return casts.bitcast(value, dtypes.storage(value.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts of an array of dtype `dtype` with the fact `fact`."""

    fact: Scaled
    dtype: np.dtype

    @property
    def values(self) -> list[Value]:
        """The 8-bit data, the zero point if there is one, and each scale."""
        return [self.fact.q, *(factor.small for factor in self.fact.smalls)]

    def dequantized(self, arrays: Iterator[Array]) -> Array:
        """The array from the next arrays of the iterator, in the order of `values`."""
        fact, shape = self.fact, self.fact.q.shape
        q, *smalls = itertools.islice(arrays, len(self.values))
        codes = lax.bitcast_convert_type(q, fact.dtype) if dtypes.is_float8(fact.dtype) else q
        if fact.zero_point is not None:
            codes = codes.astype(jnp.int32) - _spread(smalls.pop(0), fact.zero_point, shape)
        values = codes.astype(jnp.float32)
        for small, factor in zip(smalls, fact.factors, strict=True):
            spread = _spread(small, factor, shape)
            is_mask = factor.is_mask
            values = jnp.where(spread, values, 0.0) if is_mask else values * spread
        return values.astype(self.dtype)

    @property
    def value(self) -> Value:
        """The array, made of its parts."""

        def run(*arrays: Array) -> Array:
            return self.dequantized(iter(arrays))

        return graph.derived("dequantize", run, self.values, self.fact.q.shape, self.dtype)

    @property
    def size(self) -> int:
        """Bytes of the parts."""
        return sum(part.size * part.dtype.itemsize for part in self.values)


def _spread(small: Array, factor: Factor, shape: Shape) -> Array:
    """The small array with each entry repeated over its tile; constant axes keep size 1."""
    for axis, (tile, size) in enumerate(zip(factor.tiles, shape, strict=True)):
        if factor.small.shape[axis] > 1 and tile > 1:
            small = lax.slice_in_dim(jnp.repeat(small, tile, axis), 0, size, axis=axis)
    return small
