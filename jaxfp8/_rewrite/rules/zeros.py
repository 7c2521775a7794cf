"""Zeros put over dequantised values: pad and select, on bytes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.factors import Factor, factor_of
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.rules import choices
from jaxfp8._rewrite.rules import masks as _masks
from jaxfp8._rewrite.rules.registry import lost, rule
from jaxfp8._rewrite.rules.views import moved
from jaxfp8._value.spec import tile_counts


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
    "select zero, or select between 8-bit arrays and between their scales, before dequantising"
)


@rule("select_n")
def select(walk: Context, op: Op) -> Fact | None:
    """A select of data or zero, or of two dequantised arrays, done on bytes."""
    if len(op.inputs) != 3:
        return None
    which, *cases = op.inputs
    facts = [walk.scaled(case) for case in cases]
    first, second = facts
    if first is not None and second is not None:
        return choices.between(walk, op, first, second)
    for i, fact in enumerate(facts):
        if fact is None:
            continue
        other = cases[1 - i]
        if constants.number(other) != 0 or fact.zero_point is not None:
            if walk.dequantised(cases[i]) is None:
                return None
            return lost(op, "mixes dequantised values with others than zero", _SELECT_BYTES)
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
