"""Joins and splits: concatenate, stack, split, unstack and optimization_barrier, on bytes."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import (
    Factor,
    Factors,
    all_found,
    all_moved,
    combine,
    constant,
    on_tiles,
)
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales
from jaxfp8._rewrite.rules.registry import lost, outputs_rule, rule
from jaxfp8._rewrite.rules.views import slice_factor
from jaxfp8._value.spec import Shape, tile_counts


@rule("concatenate")
def concatenate(walk: Context, op: Op) -> Fact | None:
    """Pieces of one 8-bit dtype: bytes are joined, and scales along the same axis."""
    parts = [walk.scaled(v) for v in op.inputs]
    return _joined(walk, op, parts, [v.shape for v in op.inputs], op.params["dimension"])


@rule("stack")
def stack(walk: Context, op: Op) -> Fact | None:
    """Arrays concatenated along a new axis; each of them has size 1 along it."""
    axis = op.params["axis"]
    parts = [_with_axis(walk.scaled(v), axis) for v in op.inputs]
    shapes = [(*v.shape[:axis], 1, *v.shape[axis:]) for v in op.inputs]
    return _joined(walk, op, parts, shapes, axis)


def _with_axis(fact: Scaled | None, axis: int) -> Scaled | None:
    """The fact with factors of one more axis, of size 1; the bytes as they are."""
    if fact is None:
        return None

    rank = len(fact.q.shape)
    sources = [*range(axis), None, *range(axis, rank)]
    return fact.moved(lambda q: q, lambda factor: factor.placed(sources, (1,) * (rank + 1)))


def _joined(
    walk: Context, op: Op, parts: list[Scaled | None], shapes: list[Shape], axis: int
) -> Fact | None:
    """The fact about pieces of the given shapes, joined along an axis."""
    facts, out = [f for f in parts if f is not None], op.outputs[0]
    if not any(walk.dequantised(v) for v in op.inputs) and len(facts) < len(parts):
        return None
    earlier = next((walk.lost(v) for v in op.inputs if walk.lost(v) is not None), None)
    if earlier is not None:
        return earlier
    if len(facts) < len(parts) or len({f.dtype for f in facts}) > 1:
        return lost(op, "joins 8-bit data with other data", "join arrays of one 8-bit dtype")
    if any(f.zero_point is not None for f in facts):
        return lost(op, "joins arrays with zero points", "join the 8-bit arrays before")
    if any(factor.is_mask for fact in facts for factor in fact.factors):
        return lost(op, "joins pieces with zeros put over them", "join them before that")
    factors = _join_all(facts, shapes, axis, out.shape)
    if factors is None:
        return lost(op, "joins pieces whose scales have different tiles", "use one granularity")
    q = graph.replay(op, [f.q for f in facts], out.shape, facts[0].q.dtype)
    guards = tuple(guard for fact in facts for guard in fact.guards)
    return Scaled(q, facts[0].dtype, None, factors, facts[0].origin, guards)


def _join_all(
    facts: list[Scaled], shapes: list[Shape], axis: int, out_shape: Shape
) -> Factors | None:
    """The factors of the joined pieces, one by one; their products if the counts differ."""
    rows = [f.factors for f in facts]
    if len({len(row) for row in rows}) > 1:
        rows = [
            (combine((*row, constant(1.0, shape)), shape),)
            for row, shape in zip(rows, shapes, strict=True)
        ]
    columns = zip(*rows, strict=True)
    return all_found([_join(list(column), shapes, axis, out_shape) for column in columns])


def _join(factors: list[Factor], shapes: list[Shape], axis: int, out_shape: Shape) -> Factor | None:
    """One factor of the joined pieces: a shared array as it is, others joined."""
    first = factors[0]
    if all(f.small is first.small and f.small.shape[axis] == 1 for f in factors):
        return Factor(first.small, _at(first.tiles, axis, max(out_shape[axis], 1)))
    tile = _joined_tile(factors, shapes, axis)
    if tile is None:
        return None
    tiles = _at(_tiles.common(shapes[0], [f.tiles for f in factors]), axis, tile)
    dtypes = {f.small.dtype for f in factors}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    smalls = [
        casts.cast(on_tiles(factor, shape, tiles), dtype)
        for factor, shape in zip(factors, shapes, strict=True)
    ]
    small = graph.derived(
        "concatenate",
        lambda *xs: lax.concatenate(xs, axis),
        smalls,
        tile_counts(out_shape, tiles),
        dtype,
    )
    return Factor(small, tiles)


def _at(values: Shape, axis: int, value: int) -> Shape:
    """The tuple with another entry at `axis`."""
    return values[:axis] + (value,) + values[axis + 1 :]


def _joined_tile(factors: list[Factor], shapes: list[Shape], axis: int) -> int | None:
    """A tile along the joined axis to divide every piece but the last; None without one."""
    pairs = zip(factors, shapes, strict=True)
    tile = math.gcd(*(min(f.tiles[axis], s[axis]) for f, s in pairs))
    return None if any(s[axis] % tile for s in shapes[:-1]) else tile


@outputs_rule("split")
def split(walk: Context, op: Op) -> list[Fact | None]:
    """One slice for each output."""
    out: list[Fact | None] = []
    axis, start = op.params["axis"], 0
    source = op.inputs[0]
    fact = walk.scaled(source) or walk.fact(source)
    for piece in op.outputs:
        if not isinstance(fact, Scaled | Scales):
            return [None] * len(op.outputs)
        begin = [0] * len(source.shape)
        begin[axis] = start
        end = [b + s for b, s in zip(begin, piece.shape, strict=True)]
        start = end[axis]
        out.append(_sliced(fact, op, piece, begin, end))
    return out


def _sliced(
    fact: Scaled | Scales, op: Op, piece: Value, begin: list[int], end: list[int]
) -> Scaled | Scales | Lost:
    """The fact about a slice of the input of `op`."""
    params = {"start_indices": begin, "limit_indices": end, "strides": None}
    as_slice = dataclasses.replace(op, name="slice", params=params, outputs=(piece,))
    move = functools.partial(slice_factor, as_slice)

    def data(q: Value) -> Value:
        return graph.derived("slice", lambda x: lax.slice(x, begin, end), [q], piece.shape, q.dtype)

    if (part := fact.moved(data, move)) is not None:
        return part
    what = "scale" if all_moved(fact.factors, move) is None else "zero point"
    remedy = "split at multiples of the tile"
    return lost(as_slice, f"cuts through the tiles of a {what}", remedy)


@outputs_rule("unstack")
def unstack(walk: Context, op: Op) -> list[Fact | None]:
    """One slice for each output, without the axis."""
    source, axis = op.inputs[0], op.params["axis"]
    fact = walk.scaled(source) or walk.fact(source)
    if not isinstance(fact, Scaled | Scales):
        return [None] * len(op.outputs)
    return [_entry(fact, op, source, axis, i) for i in range(len(op.outputs))]


def _entry(fact: Scaled | Scales, op: Op, source: Value, axis: int, place: int) -> Fact:
    """The fact about one entry along an axis."""
    begin, end = [0] * len(source.shape), list(source.shape)
    begin[axis], end[axis] = place, place + 1
    piece = Value(tuple(e - b for b, e in zip(begin, end, strict=True)), source.dtype)
    sliced = _sliced(fact, op, piece, begin, end)
    if isinstance(sliced, Lost):
        return sliced

    rest = [a for a in range(len(source.shape)) if a != axis]
    shape = op.outputs[place].shape
    entry = sliced.moved(lambda q: graph.reshape(q, shape), lambda f: f.placed(rest, shape))
    assert entry is not None, "an axis of size 1 is dropped"
    return entry


@outputs_rule("optimization_barrier")
def barrier(walk: Context, op: Op) -> list[Fact | None]:
    """Dequantised operands pass the barrier as bytes."""
    out: list[Fact | None] = []
    for value in op.inputs:
        fact = walk.scaled(value)
        if fact is None:
            other = walk.fact(value)
            out.append(other if isinstance(other, Scales) else None)
            continue
        q = graph.derived(
            "optimization_barrier", lax.optimization_barrier, [fact.q], fact.q.shape, fact.q.dtype
        )
        out.append(dataclasses.replace(fact, q=q))
    return out
