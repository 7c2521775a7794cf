"""A dequantised array as its parts: the 8-bit data, the zero point and the scales."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.factors import Factor
from jaxfp8._rewrite.ir.graph import Array, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts of an array of dtype `dtype` with the fact `fact`."""

    fact: Scaled
    dtype: np.dtype

    @property
    def values(self) -> list[Value]:
        """The 8-bit data, the zero point if there is one, and each scale."""
        return [self.fact.q, *(factor.small for factor in self.fact.smalls)]

    def dequantised(self, arrays: Iterator[Array]) -> Array:
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
            return self.dequantised(iter(arrays))

        return graph.derived("dequantise", run, self.values, self.fact.q.shape, self.dtype)

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
