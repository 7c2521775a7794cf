"""Joins and splits: concatenate, stack, split, unstack and optimization_barrier, on bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import Factor, Factors, all_moved, on_tiles, total
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled, Scales
from jaxfp8._rewrite.rules.registry import lost, rule
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
    if not any(walk.dequantized(v) for v in op.inputs) and len(facts) < len(parts):
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
        rows = [(total(row, shape),) for row, shape in zip(rows, shapes, strict=True)]
    columns = list(zip(*rows, strict=True))
    return all_moved(columns, lambda column: _join(column, shapes, axis, out_shape))


def _join(factors: Factors, shapes: list[Shape], axis: int, out_shape: Shape) -> Factor | None:
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
    counts = tile_counts(out_shape, tiles)
    return Factor(
        graph.derived("concatenate", lambda *xs: lax.concatenate(xs, axis), smalls, counts, dtype),
        tiles,
    )


def _at(values: Shape, axis: int, value: int) -> Shape:
    """The tuple with another entry at `axis`."""
    return values[:axis] + (value,) + values[axis + 1 :]


def _joined_tile(factors: Factors, shapes: list[Shape], axis: int) -> int | None:
    """A tile along the joined axis to divide every piece but the last; None without one."""
    pairs = zip(factors, shapes, strict=True)
    tile = math.gcd(*(min(f.tiles[axis], s[axis]) for f, s in pairs))
    return None if any(s[axis] % tile for s in shapes[:-1]) else tile


@rule("split", "unstack")
def split(walk: Context, op: Op) -> Sequence[Fact | None]:
    """One slice for each output; unstacked ones without the axis."""
    fact, axis = walk.data(op.inputs[0]), op.params["axis"]
    if fact is None:
        return [None] * len(op.outputs)
    sizes = [v.shape[axis] if op.name == "split" else 1 for v in op.outputs]
    ends = itertools.accumulate(sizes)
    return [
        _piece(fact, op, value, end - size, end)
        for value, size, end in zip(op.outputs, sizes, ends, strict=True)
    ]


def _piece(fact: Scaled | Scales, op: Op, value: Value, start: int, end: int) -> Fact:
    """The fact about an output, a slice of the input along the axis of `op`."""
    axis, shape = op.params["axis"], op.inputs[0].shape
    begins, ends = _at((0,) * len(shape), axis, start), _at(shape, axis, end)
    piece = Value(_at(shape, axis, end - start), value.dtype)
    params = {"start_indices": begins, "limit_indices": ends, "strides": None}
    as_slice = dataclasses.replace(op, name="slice", params=params, outputs=(piece,))
    kept = [a for a in range(len(shape)) if a != axis or op.name == "split"]

    def data(q: Value) -> Value:
        run = functools.partial(lax.slice, start_indices=begins, limit_indices=ends)
        return graph.reshape(graph.derived("slice", run, [q], piece.shape, q.dtype), value.shape)

    def move(factor: Factor) -> Factor | None:
        own = slice_factor(as_slice, factor)
        return None if own is None else own.placed(kept, value.shape)

    if (part := fact.moved(data, move)) is not None:
        return part
    what = "scale" if all_moved(fact.factors, move) is None else "zero point"
    remedy = "split at multiples of the tile"
    return lost(as_slice, f"cuts through the tiles of a {what}", remedy)


@rule("optimization_barrier")
def barrier(walk: Context, op: Op) -> list[Fact | None]:
    """Dequantized operands pass the barrier as bytes."""

    def passed(q: Value) -> Value:
        return graph.derived(
            "optimization_barrier", lax.optimization_barrier, [q], q.shape, q.dtype
        )

    facts = (walk.data(value) for value in op.inputs)
    return [None if fact is None else fact.moved(passed, lambda factor: factor) for fact in facts]
