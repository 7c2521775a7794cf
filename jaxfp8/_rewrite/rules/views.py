"""Views: data movement on dequantized values, done on the bytes and on the scales instead.

A view moves elements and changes none. The bytes move with the same primitive and parameters. A
scale moves as a small array, or stays if it is constant along the axes of the view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.factors import Factor, all_moved
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Scaled, Scales
from jaxfp8._rewrite.rules import epilogue
from jaxfp8._rewrite.rules.registry import BEFORE, lost, rule
from jaxfp8._value.spec import Shape, tile_counts

MoveFactor = Callable[[Op, Factor], Factor | None]
# The output is the operand.
SAME = ("copy", "copy_p", "name", "stop_gradient")


def moved(
    walk: Context, op: Op, move: MoveFactor, data: Callable[[Value], Value] | None = None
) -> Fact | None:
    """The fact about the output of a view of one operand.

    `move` makes a factor of the output; None if tiles do not allow it. `data` makes the bytes; by
    default `op` itself does.
    """
    fact = walk.data(op.inputs[0])
    if fact is None:
        return None
    factor = functools.partial(move, op)
    out = fact.moved(data or functools.partial(replayed, op), factor)
    if out is not None:
        return out
    if all_moved(fact.factors, factor) is not None:
        return lost(op, "cuts through the tiles of a zero point", BEFORE)
    blocks = [f.small.shape for f in fact.factors if move(op, f) is None]
    return lost(
        op,
        f"of {list(op.inputs[0].shape)} to {list(op.outputs[0].shape)} cuts through the tiles "
        f"of a scale of shape {list(blocks[0])}",
        "keep whole tiles together, or apply the view before dequantizing",
    )


def replayed(op: Op, q: Value) -> Value:
    """The view of another array of its operand's shape."""
    source = casts.to_pick(q, op.inputs[1:])
    return graph.replay(op, [source, *op.inputs[1:]], op.outputs[0].shape, q.dtype)


@rule("transpose")
def transpose(walk: Context, op: Op) -> Fact | None:
    """Axes permuted; at a dot it becomes another choice of axes."""
    if (product := walk.product(op.inputs[0])) is not None:
        return epilogue.view(product, op)
    permutation = tuple(int(axis) for axis in op.params["permutation"])

    def move(op: Op, factor: Factor) -> Factor:
        return factor.placed(permutation, op.outputs[0].shape)

    return moved(walk, op, move, lambda q: graph.transpose(q, permutation))


@rule("reshape", "squeeze", "expand_dims")
def reshape(walk: Context, op: Op) -> Fact | None:
    """Axes split, merged, added or dropped."""
    if op.params.get("dimensions") not in (None, ()) and op.name == "reshape":
        return None
    if (product := walk.product(op.inputs[0])) is not None:
        return epilogue.view(product, op)
    shape, new_shape = op.inputs[0].shape, op.outputs[0].shape

    def move(op: Op, factor: Factor) -> Factor | None:
        return factor.reshaped(shape, new_shape)

    return moved(walk, op, move, lambda q: reshape_data(q, new_shape))


def reshape_data(q: Value, shape: Shape) -> Value:
    """Bytes reshaped. An earlier transpose moves after the reshape if its axes stay whole."""
    op = graph.producer(q, "transpose")
    groups = _tiles.axis_groups(q.shape, shape) if op is not None else None
    if op is None or groups is None or any(len(old) > 1 for old, _ in groups):
        return graph.reshape(q, shape)
    permutation = op.params["permutation"]
    split = {permutation[old[0]]: new for old, new in groups if old}
    extra = [axis for old, new in groups if not old for axis in new]
    inner: list[int] = []
    for axis in range(len(op.inputs[0].shape)):
        inner += split.get(axis, [])
    inner += extra
    source = graph.reshape(op.inputs[0], tuple(shape[axis] for axis in inner))
    return graph.transpose(source, tuple(int(a) for a in np.argsort(inner)))


@rule("broadcast_in_dim")
def broadcast(walk: Context, op: Op) -> Fact | None:
    """New axes, or axes of size 1 broadcast; scales are constant along them."""
    source, out = op.inputs[0], op.outputs[0]
    if (product := walk.product(source)) is not None:
        return epilogue.view(product, op) if source.size == out.size else None
    if not isinstance(walk.scaled(source), Scaled):
        if source.dtype.kind not in "fViub" or len(op.inputs) > 1 or out.size == 0:
            return None
        return Scales(tuple(_broadcast_factor(op, f) for f in walk.factors(source)))
    axes = tuple(int(a) for a in op.params["broadcast_dimensions"])
    plain = source.size == out.size and axes == tuple(sorted(axes))
    data = functools.partial(reshape_data, shape=out.shape) if plain else None
    return moved(walk, op, _broadcast_factor, data)


def _broadcast_factor(op: Op, factor: Factor) -> Factor:
    source, out = op.inputs[0].shape, op.outputs[0].shape
    axes = enumerate(map(int, op.params["broadcast_dimensions"]))
    kept = {new: axis for axis, new in axes if source[axis] == out[new]}
    return factor.placed([kept.get(axis) for axis in range(len(out))], out)


@rule("slice")
def slice_(walk: Context, op: Op) -> Fact | None:
    """A static slice of whole tiles, or along constant axes of the scales."""
    return moved(walk, op, slice_factor)


def slice_factor(op: Op, factor: Factor) -> Factor | None:
    params, shape = op.params, op.inputs[0].shape
    strides = params["strides"] or (1,) * len(shape)
    rows = zip(
        shape, factor.tiles, params["start_indices"], params["limit_indices"], strides, strict=True
    )
    bounds = [_tiles.slice_bounds(*map(int, row)) for row in rows]
    if any(b is None for b in bounds):
        return None
    start, limit, stride, tiles = zip(*bounds, strict=True) if bounds else ((), (), (), ())
    counts = tile_counts(op.outputs[0].shape, tiles)
    if counts == factor.small.shape:
        return Factor(factor.small, tiles)
    run = functools.partial(lax.slice, start_indices=start, limit_indices=limit, strides=stride)
    return Factor(graph.derived("slice", run, [factor.small], counts, factor.small.dtype), tiles)


@rule("dynamic_slice")
def dynamic_slice(walk: Context, op: Op) -> Fact | None:
    """A slice at a traced position, along axes with scales constant or varying by element."""
    return moved(walk, op, dynamic_slice_factor)


def dynamic_slice_factor(op: Op, factor: Factor) -> Factor | None:
    shape, new_shape = op.inputs[0].shape, op.outputs[0].shape
    tiles, sizes = [], []
    for size, new, tile, count in zip(
        shape, new_shape, factor.tiles, factor.small.shape, strict=True
    ):
        if size != new and tile not in (1, size):
            return None
        constant = count == 1
        tiles.append(max(new, 1) if constant else tile)
        sizes.append(1 if constant else -(-new // tile))
    if tuple(sizes) == factor.small.shape:
        return Factor(factor.small, tuple(tiles))
    indices = [
        index if count > 1 and size != new else graph.literal(0, index.dtype)
        for index, count, size, new in zip(
            op.inputs[1:], factor.small.shape, shape, new_shape, strict=True
        )
    ]
    small = graph.derived(
        "dynamic_slice",
        # The starts of the equation: JAX has added the size to negative ones already.
        lambda x, *starts: lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False),
        [factor.small, *indices],
        tuple(sizes),
        factor.small.dtype,
    )
    return Factor(small, tuple(tiles))


@rule("pvary", "pcast")
def vary(walk: Context, op: Op) -> Fact | None:
    """A value equal on several devices, marked as varying along a mesh axis."""

    def move(op: Op, factor: Factor) -> Factor:
        if factor.small.literal is not None:
            return factor
        small = graph.replay(op, [factor.small], factor.small.shape, factor.small.dtype)
        return Factor(small, factor.tiles)

    return moved(walk, op, move)


@rule("rev")
def reverse(walk: Context, op: Op) -> Fact | None:
    """Axes reversed. Tiles must divide them, since a partial tile would move to the front."""
    return moved(walk, op, _reverse_factor)


def _reverse_factor(op: Op, factor: Factor) -> Factor | None:
    axes = [int(a) for a in op.params["dimensions"] if factor.small.shape[a] > 1]
    if any(op.inputs[0].shape[a] % factor.tiles[a] for a in axes):
        return None
    small = graph.derived(
        "rev", lambda x: lax.rev(x, axes), [factor.small], factor.small.shape, factor.small.dtype
    )
    return Factor(small, factor.tiles)


@rule("sharding_constraint")
def constrained(walk: Context, op: Op) -> Fact | None:
    """A layout constraint: dropped for dequantized values (never made), kept for a product."""
    fact = walk.dequantized(op.inputs[0]) or walk.fact(op.inputs[0])
    return fact if isinstance(fact, Scaled | Scales) else None


@rule(*SAME)
def same(walk: Context, op: Op) -> Fact | None:
    """The value as it is."""
    source = op.inputs[0]
    if (product := walk.product(source)) is not None:
        return epilogue.same(product, op)
    return walk.data(source)
