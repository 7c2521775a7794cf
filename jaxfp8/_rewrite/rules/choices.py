"""Select and pad of dequantized values, done on their bytes and their scales."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import Factor, Factors, factor_of, on_tiles, total
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.rules import masks as _masks
from jaxfp8._rewrite.rules.registry import lost, rule
from jaxfp8._rewrite.rules.views import moved
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts


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


@rule("pad")
def pad(walk: Context, op: Op) -> Fact | None:
    """Pads the bytes with 0; a mask marks the padding, so scales do not matter there."""
    source, filler = op.inputs
    fact = walk.scaled(source)
    if fact is None:
        return None
    if constants.number(filler) != 0 or fact.zero_point is not None:
        return lost(op, "adds values other than zero", "pad with zero, before the zero point")
    zero = graph.literal(0, fact.q.dtype)

    def data(q: Value) -> Value:
        return graph.replay(op, [q, zero], op.outputs[0].shape, q.dtype)

    padded = moved(walk, op, _pad_factor, data)
    masks = _masks.padding(op.params["padding_config"], source.shape, op.outputs[0].shape)
    return _masks.masked(padded, masks) if isinstance(padded, Scaled) else padded


def _pad_factor(op: Op, factor: Factor) -> Factor | None:
    """The factor, padded with its edge entries along its varying axes.

    None if the padding is interior or negative, or shifts tiles of several elements.
    """
    rows = list(
        zip(
            op.params["padding_config"],
            op.outputs[0].shape,
            factor.tiles,
            factor.small.shape,
            strict=True,
        )
    )
    edges, tiles = [], []
    for (low, high, inner), size, tile, count in rows:
        fits = inner == 0 and low >= 0 and high >= 0 and (low == 0 or tile == 1)
        if count > 1 and not fits:
            return None
        tiles.append(tile if count > 1 else max(size, 1))
        edges.append((low, -(-size // tile) - low - count) if count > 1 else (0, 0))
    counts = tile_counts(op.outputs[0].shape, tuple(tiles))
    if counts == factor.small.shape:
        return Factor(factor.small, tuple(tiles))

    def run(x: Array) -> Array:
        return jnp.pad(x, edges, mode="edge")

    return Factor(
        graph.derived("pad", run, [factor.small], counts, factor.small.dtype), tuple(tiles)
    )


_SELECT_BYTES = (
    "select zero, or select between 8-bit arrays and between their scales, before dequantizing"
)


@rule("select_n")
def select(walk: Context, op: Op) -> Fact | None:
    """A select of data or zero, or of two dequantized arrays, done on bytes."""
    if len(op.inputs) != 3:
        return None
    which, *cases = op.inputs
    facts = [walk.scaled(case) for case in cases]
    first, second = facts
    if first is not None and second is not None:
        return between(walk, op, first, second)
    for i, fact in enumerate(facts):
        if fact is None:
            continue
        other = cases[1 - i]
        if constants.number(other) != 0 or fact.zero_point is not None:
            if walk.dequantized(cases[i]) is None:
                return None
            return lost(op, "mixes dequantized values with others than zero", _SELECT_BYTES)
        zero = graph.derived(
            "zeros",
            lambda q=fact.q: np.zeros(q.shape, q.dtype),
            [],
            fact.q.shape,
            fact.q.dtype,
        )
        arms = [zero, zero]
        arms[i] = fact.q
        q = graph.replay(op, [which, *arms], fact.q.shape, fact.q.dtype)
        return _masks.masked(dataclasses.replace(fact, q=q), [_mask(walk, op, i)])
    return None


def _mask(walk: Context, op: Op, case: int) -> Factor:
    """The mask of a select between data (case `case`) and zero."""
    which = op.inputs[0]
    small, *more = walk.factors(which)
    return _masks.where((factor_of(which) if more else small).at(op.outputs[0].shape), case)
