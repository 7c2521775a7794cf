"""A select between dequantised arrays, done on their bytes and their scales."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import (
    Factor,
    Factors,
    factor_of,
    on_tiles,
    total,
)
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.rules.registry import lost
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape


def between(walk: Context, op: Op, first: Scaled, second: Scaled) -> Fact | None:
    """The fact about a select between two arrays of one 8-bit dtype."""
    facts, shape = (first, second), op.outputs[0].shape
    if first.dtype != second.dtype:
        return lost(op, "mixes 8-bit data of two dtypes", "use one dtype")
    if any(factor.is_mask for fact in facts for factor in fact.factors):
        return lost(op, "mixes values with zeros put over them", "choose before that")
    q = graph.replay(op, [op.inputs[0], first.q, second.q], shape, first.q.dtype)
    which = _which(walk, op)
    zero: Factor | None = None
    factors: Factors = ()
    if first.zero_point is not None or second.zero_point is not None:
        zero = _blend(which, _zero(first, shape), _zero(second, shape), shape)
    if first.factors or second.factors:
        scales = [total(fact.factors, shape) for fact in facts]
        factors = (_blend(which, scales[0], scales[1], shape),)
    guards = (*first.guards, *second.guards)
    return Scaled(q, first.dtype, zero, factors, first.origin, guards)


def zeros(value: Value, dtype: np.dtype) -> Scaled:
    """An all-zero value as 8-bit data."""
    storage = dtypes.storage(dtype)

    def run(x: Array) -> Array:
        return (x != 0).astype(storage)  # computed, to vary along the mesh axes of `x`

    return Scaled(graph.derived("zeros", run, [value], value.shape, storage), dtype, origin=value)


def _zero(fact: Scaled, shape: Shape) -> Factor:
    none = Factor(graph.literal(0, np.int32), ()).at(shape)
    return none if fact.zero_point is None else fact.zero_point


def _which(walk: Context, op: Op) -> Factor:
    """The condition of the select, as a factor of the output."""
    value, shape = op.inputs[0], op.outputs[0].shape
    if not value.shape:
        return factor_of(value).at(shape)
    factors = walk.factors(value)
    return (factors[0] if len(factors) == 1 else factor_of(value)).at(shape)


def _blend(which: Factor, first: Factor, second: Factor, shape: Shape) -> Factor:
    """The select of two factors, by a factor: tile by tile."""
    if first.small is second.small and first.tiles == second.tiles:
        return first
    tiles = _tiles.common(shape, [f.tiles for f in (which, first, second)])
    smalls = [on_tiles(f, shape, tiles) for f in (which, first, second)]
    small = smalls[1]
    return Factor(graph.derived("select_n", _choose, smalls, small.shape, small.dtype), tiles)


def _choose(which: Array, first: Array, second: Array) -> Array:
    return jnp.where(which != 0, second, first)


def agree(facts: list[Scaled], shape: Shape) -> list[Scaled] | None:
    """The facts of several branches in one form: a scale, maybe a zero point, the same tiles."""
    if len({fact.dtype for fact in facts}) > 1:
        return None
    if any(factor.is_mask for fact in facts for factor in fact.factors):
        return None
    scales = [total(fact.factors, shape) for fact in facts]
    tiles = _tiles.common(shape, [f.tiles for f in scales])
    zeros = [_zero(fact, shape) for fact in facts]
    zero_tiles = _tiles.common(shape, [z.tiles for z in zeros])
    spread = functools.partial(_spread, shape=shape)
    has_zero = any(f.zero_point is not None for f in facts)
    return [
        Scaled(
            fact.q,
            fact.dtype,
            spread(zero, zero_tiles) if has_zero else None,
            (spread(scale, tiles),),
            fact.origin,
        )
        for fact, zero, scale in zip(facts, zeros, scales, strict=True)
    ]


def _spread(factor: Factor, tiles: Shape, shape: Shape) -> Factor:
    return Factor(on_tiles(factor, shape, tiles), tiles)
