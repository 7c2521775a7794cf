"""Gathers of rows, experts and layers, done on bytes and scales.

A gather by an index `0 0 0 1 1 1 ..`, known at trace time, repeats its operand. Functions stretch
block scales this way.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, constants, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, factor_of
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales
from jaxfp8._rewrite.rules.registry import lost, rule
from jaxfp8._rewrite.rules.views import moved, replayed
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts

NAMES = ("gather",)
_IN_BOUNDS = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
_FILL = lax.GatherScatterMode.FILL_OR_DROP
# The byte of a NaN in both FP8 dtypes.
_NAN = 0x7F


def is_in_bounds(op: Op) -> bool:
    """Whether every index of an op is within bounds."""
    return op.name not in NAMES or op.params["mode"] in _IN_BOUNDS


@rule(*NAMES)
def gather(walk: Context, op: Op) -> Fact | None:
    """Whole rows (or experts) picked by index: scales by row are gathered, constant ones stay."""
    fact = walk.scaled(op.inputs[0])
    if fact is None:
        return _looked_up(walk, op) or _repeated(walk, op)
    mode = op.params["mode"]
    if is_in_bounds(op):
        return moved(walk, op, gather_factor)
    if mode != _FILL:
        return lost(op, f"picks rows by {mode}", 'index with mode="clip"')
    if walk.dequantized(op.inputs[0]) is None:
        return moved(walk, op, gather_factor, functools.partial(_filled, op, fact))
    return _with_nan_outside(walk, op)


def _looked_up(walk: Context, op: Op) -> Lost | None:
    """The loss if 8-bit data is the index: its codes stand for entries of a table.

    Rows of a larger table are an embedding. Their index is no operand of a product.
    """
    table, index = op.inputs
    is_row = op.outputs[0].size > index.size // max(index.shape[-1], 1)
    if walk.scaled(index) is None or (is_row and index.size < table.size):
        return None
    what = f"{table.dtype}[{','.join(map(str, table.shape))}]"
    return lost(op, f"looks 8-bit codes up in a table, {what}", _NO_TABLES)


_NO_TABLES = (
    "no kernel decodes by a table, so this dot stays wide; for an 8-bit product quantize its "
    "values (`jaxfp8.quantize`), and hold indices that are no codes in int32"
)


def _filled(op: Op, fact: Scaled, q: Value) -> Value:
    """The bytes of an 8-bit array, with the function's fill value for rows out of bounds."""
    if not dtypes.is_float8(fact.dtype):
        return replayed(op, q)
    given = op.params["fill_value"]
    fill = _NAN if given is None else int(np.asarray(given, fact.dtype).view(np.uint8))
    return _picked(op, q, op.params["slice_sizes"], op.outputs[0].shape, _FILL, fill)


def _picked(
    op: Op,
    value: Value,
    sizes: Shape,
    shape: Shape,
    mode: lax.GatherScatterMode,
    fill: int | None = None,
) -> Value:
    """A gather by the index of `op`, with other slice sizes and in another mode."""
    numbers = op.params["dimension_numbers"]
    return graph.derived(
        "gather",
        lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode, fill_value=fill),
        [casts.to_pick(value, op.inputs[1:]), op.inputs[1]],
        shape,
        value.dtype,
    )


def _with_nan_outside(walk: Context, op: Op) -> Fact | None:
    """Rows out of bounds become NaN: bytes of the nearest row, with a scale of NaN."""
    given = op.params["fill_value"]
    if given is not None and not np.isnan(given):
        return lost(op, "fills rows out of bounds", 'index with mode="clip"')
    clip, sizes = lax.GatherScatterMode.CLIP, op.params["slice_sizes"]
    clipped = dataclasses.replace(op, params={**op.params, "mode": clip})

    def data(q: Value) -> Value:
        return _picked(op, q, sizes, op.outputs[0].shape, clip)

    fact = moved(walk, clipped, gather_factor, data)
    inside = gather_factor(op, _ones(op))  # 1 for each row within bounds, else NaN
    if not isinstance(fact, Scaled):
        return fact
    return None if inside is None else fact.scaled((inside,))


def _ones(op: Op) -> Factor:
    """A factor of 1 for each row of the operand."""
    numbers, shape = op.params["dimension_numbers"], op.inputs[0].shape
    indexed = {*numbers.start_index_map, *numbers.operand_batching_dims}
    tiles = tuple(1 if a in indexed else max(size, 1) for a, size in enumerate(shape))
    counts = tile_counts(shape, tiles)
    ones = graph.derived("ones", lambda: jnp.ones(counts, np.float32), [], counts, np.float32)
    return Factor(ones, tiles)


def gather_factor(op: Op, factor: Factor) -> Factor | None:
    """The factor, gathered: slices have size 1 along its constant axes."""
    shape, indexed, at = op.inputs[0].shape, _indexed(op), _sources(op)
    if at is None or any(factor.tiles[a] != 1 for a in set(factor.varying()) & indexed):
        return None
    by_row = {a for a in indexed if factor.tiles[a] == 1 and shape[a] > 1} & set(factor.varying())
    tiles = tuple(
        max(min(factor.tiles[at[j]], size) if j in at else 1 if by_row else size, 1)
        for j, size in enumerate(op.outputs[0].shape)
    )
    if not by_row:
        placed = factor.placed([at.get(j) for j in range(len(tiles))], op.outputs[0].shape)
        return dataclasses.replace(placed, tiles=tiles)
    if by_row != indexed:
        return None
    sizes = tuple(1 if a in indexed else count for a, count in enumerate(factor.small.shape))
    counts = tile_counts(op.outputs[0].shape, tiles)
    return Factor(_picked(op, factor.small, sizes, counts, op.params["mode"]), tiles)


def _sources(op: Op) -> dict[int, int] | None:
    """For each offset axis of the output the axis of the operand, if slices are whole.

    None if a slice holds several rows, or only a part of another axis.
    """
    numbers, shape, indexed = op.params["dimension_numbers"], op.inputs[0].shape, _indexed(op)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offset = [a for a in range(len(shape)) if a not in dropped]
    sizes = op.params["slice_sizes"]
    if any(sizes[a] != (1 if a in indexed else shape[a]) for a in offset):
        return None
    return dict(zip(numbers.offset_dims, offset, strict=True))


def _indexed(op: Op) -> set[int]:
    """The axes of the operand with one entry in each slice, chosen by the index.

    Within bounds a whole slice begins at 0. `vmap` of a slice has an index for such axes too.
    """
    numbers, shape = op.params["dimension_numbers"], op.inputs[0].shape
    sizes, bounded = op.params["slice_sizes"], is_in_bounds(op)
    begun = {a for a in numbers.start_index_map if not (bounded and sizes[a] == shape[a] > 1)}
    return begun | set(numbers.operand_batching_dims)


def _repeated(walk: Context, op: Op) -> Scales | None:
    """Scales stretched by a known index: each entry fills a tile of the output."""
    source, index = op.inputs
    out, at = op.outputs[0], _sources(op)
    if out.size <= source.size or at is None or out.dtype.kind not in "fVi":
        return None
    numbers = op.params["dimension_numbers"]
    if numbers.operand_batching_dims or {*numbers.start_index_map} & {*at.values()}:
        return None
    known = constants.known(index)
    if known is None:
        return None
    return _stretched(op, walk.factors(source), _ramps(op, known), at)


def _ramps(op: Op, index: np.ndarray) -> dict[int, tuple[int, int]] | None:
    """For each indexed axis of the operand its axis in the output, and the tile.

    None if the index is not `i // tile` along an axis of its own.
    """
    numbers, out = op.params["dimension_numbers"], op.outputs[0]
    places = [j for j in range(len(out.shape)) if j not in numbers.offset_dims]
    ramps: dict[int, tuple[int, int]] = {}
    for column, axis in enumerate(numbers.start_index_map):
        ramp = _ramp(index[..., column])
        if ramp is None or places[ramp[0]] in [place for place, _ in ramps.values()]:
            return None
        ramps[axis] = places[ramp[0]], ramp[1]
        if -(-out.shape[places[ramp[0]]] // ramp[1]) > op.inputs[0].shape[axis]:
            return None
    return ramps


def _stretched(
    op: Op, factors: Factors, ramps: dict[int, tuple[int, int]] | None, at: dict[int, int]
) -> Scales | None:
    """Each factor with the tiles of the index along the indexed axes."""
    if ramps is None or any(f.tiles[axis] != 1 for f in factors for axis in ramps):
        return None
    shape, axes = op.outputs[0].shape, dict(at)
    axes.update({place: axis for axis, (place, _) in ramps.items()})
    stretched = []
    for factor in factors:
        tiles = [max(size, 1) for size in shape]
        for j, axis in at.items():
            tiles[j] = factor.tiles[axis]
        for place, tile in ramps.values():
            tiles[place] = tile
        stretched.append(_small(factor.small, tuple(tiles), axes, shape))
    return Scales(tuple(stretched))


def _ramp(index: np.ndarray) -> tuple[int, int] | None:
    """The only varying axis of an index `i // tile`, and the tile."""
    for axis, size in enumerate(index.shape):
        line = np.moveaxis(index, axis, -1).reshape(-1, size)
        tile = int(np.count_nonzero(line[0] == 0)) if line.size else 0
        if tile and np.array_equal(line, np.broadcast_to(np.arange(size) // tile, line.shape)):
            return axis, tile
    return None


def _small(source: Value, tiles: Shape, axes: dict[int, int], shape: Shape) -> Factor:
    """The indexed entries, as a factor with the axes of the output."""
    counts = tile_counts(shape, tiles)
    limits = [1] * len(source.shape)
    for j, axis in axes.items():
        limits[axis] = counts[j]
    if tuple(limits) != source.shape:
        run = functools.partial(lax.slice, start_indices=[0] * len(limits), limit_indices=limits)
        source = graph.derived("slice", run, [source], tuple(limits), source.dtype)
    sources = [axes.get(j) for j in range(len(shape))]
    return dataclasses.replace(factor_of(source).placed(sources, shape), tiles=tiles)
