"""A dequantised array made again from the 8-bit data and scales that are known to be behind it.

The output of a loop cannot be had again without the loop. But what is known about it, told outside
(`_exits`), may speak only of arrays that went into the loop; then it is dequantised from those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8 import _dtypes
from jaxfp8._rewrite import _masks
from jaxfp8._rewrite._emit import Program
from jaxfp8._rewrite._facts import Factor, Scaled
from jaxfp8._rewrite._graph import Op, Value
from jaxfp8._spec import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Rebuilt:
    """How to make the array of `fact` again, in `dtype`: `program` gives its parts."""

    fact: Scaled
    dtype: np.dtype
    program: Program

    def run(self, arrays: Sequence[Any]) -> Any:
        """The array, from those that `program` reads."""
        q, *smalls = self.program.run(arrays)
        fact, shape = self.fact, self.fact.q.shape
        codes = lax.bitcast_convert_type(q, fact.dtype) if _dtypes.is_float8(fact.dtype) else q
        if fact.zero_point is not None:
            codes = codes.astype(jnp.int32) - _spread(smalls.pop(0), fact.zero_point, shape)
        values = codes.astype(jnp.float32)
        for small, factor in zip(smalls, fact.factors, strict=True):
            spread = _spread(small, factor, shape)
            is_mask = _masks.is_mask(factor)
            values = jnp.where(spread, values, 0.0) if is_mask else values * spread
        return values.astype(self.dtype)


def of(fact: Scaled, dtype: np.dtype, at_hand: Set[Value]) -> Rebuilt | None:
    """The array of a fact from values at hand, if it can be made of them by moving data alone."""
    if fact.guards:
        return None
    zero = () if fact.zero_point is None else (fact.zero_point,)
    parts = [fact.q, *(f.small for f in (*zero, *fact.factors))]
    ops: dict[Op, tuple[Value, ...]] = {}
    inputs: dict[Value, None] = {}
    if not all(_reach(part, at_hand, ops, inputs) for part in parts):
        return None
    return Rebuilt(fact, dtype, Program(tuple(ops.items()), tuple(inputs), tuple(parts)))


def _reach(
    value: Value, at_hand: Set[Value], ops: dict[Op, tuple[Value, ...]], inputs: dict[Value, None]
) -> bool:
    """Add what makes a value; whether it all starts at hand."""
    if value.literal is not None:
        return True
    if value in at_hand:
        inputs[value] = None
        return True
    if value.op is None or value.op.eqn is not None:
        return False
    if value.op not in ops:
        if not all(_reach(source, at_hand, ops, inputs) for source in value.op.inputs):
            return False
        ops[value.op] = value.op.inputs
    return True


def _spread(small: Any, factor: Factor, shape: Shape) -> Any:
    """The small array with each entry over its tile; along axes where it is constant, of size 1."""
    for axis, (tile, size) in enumerate(zip(factor.tiles, shape, strict=True)):
        if factor.small.shape[axis] > 1 and tile > 1:
            small = lax.slice_in_dim(jnp.repeat(small, tile, axis), 0, size, axis=axis)
    return small
