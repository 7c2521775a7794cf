"""Scales chosen and values cast in one: `quantize_p`, one FFI call where there is a kernel.

    amax  = max|x| over the finite values of a tile
    scale = amax / highest, 1 for a tile of zeros; or given
    code  = saturate(round(x / scale))

On request the codes come a second time, turned: with the axes from `turn` on before the others.

Order of this file: bind, primitive, what it means, batching, differentiation, splitting over a
mesh, lowering.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jaxfp8._call import ffi
from jaxfp8._call.partitioning import Factors, Shards, is_wanted, lowering, partitioned
from jaxfp8._value import compat
from jaxfp8._value.dtypes import finite_range, is_float8
from jaxfp8._value.scales import Granularity, choose_scale, store_scale
from jaxfp8._value.spec import Shape, tile_counts
from jaxfp8._value.tiles import map_tiles

quantize_p = Primitive("quantize_tiles")
quantize_p.multiple_results = True


def quantize_tiles(x: jax.Array, dtype: np.dtype, tiles: Shape) -> tuple[jax.Array, jax.Array]:
    """Codes of `x` in an 8-bit `dtype` and the float32 scale of each tile; no zero point.

    Args:
      x: float32, bfloat16 or float16, with no empty axis.
      dtype: the 8-bit dtype.
      tiles: size of the tile on each axis, at least 1; the last may be partial.
    """
    codes, scale = _bind(x, dtype=np.dtype(dtype), tiles=tiles, turn=None)
    return codes, scale


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tensor in 8 bits with one scale.

    Attributes:
      codes: of its shape.
      turned: the same with the axes from `turn` on before the others; None where none is asked for.
      scale: float32, every axis of size 1.
      found: float32, likewise: the largest finite magnitude if the scale was given, else the scale.
    """

    codes: jax.Array
    turned: jax.Array | None
    scale: jax.Array
    found: jax.Array


def encode(x: jax.Array, dtype: DTypeLike, scale: jax.Array | None, turn: int | None) -> Encoded:
    """A whole tensor with one scale, chosen or given, in one layout or in two; no gradient.

    Args:
      x: float32, bfloat16 or float16; with an empty axis only where the scale is given.
      dtype: the 8-bit dtype.
      scale: a float32 scalar, or None to choose it.
      turn: the first of the axes that `turned` has in front; None for no such copy.
    """
    x, one = jax.lax.stop_gradient(x), (1,) * x.ndim
    given = [] if scale is None else [jax.lax.stop_gradient(scale).reshape(one)]
    tiles = tuple(max(size, 1) for size in x.shape)
    operands = compat.vary_alike((x, *given))
    codes, *turned, found = _bind(*operands, dtype=np.dtype(dtype), tiles=tiles, turn=turn)
    copy = turned[0] if turned else None
    return Encoded(codes, copy, given[0] if given else found, found)


def _bind(*operands: jax.Array, **how: Any) -> list[jax.Array]:
    split = None
    if is_wanted(operands):
        x, *given = operands
        split = _split(x.shape, x.dtype, bool(given), **how)
    return quantize_p.bind(*operands, **how, split=split)


@functools.lru_cache(maxsize=1024)
def _jitted(**how: Any) -> Any:
    return jax.jit(functools.partial(quantize_p.bind, **how))


@quantize_p.def_impl
def _impl(*operands: jax.Array, **how: Any) -> list[jax.Array]:
    with jax.disable_jit(False):
        return _jitted(**how)(*operands)


@quantize_p.def_abstract_eval
def _abstract_eval(
    x: jax.core.ShapedArray,
    *scale: jax.core.ShapedArray,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
    split: Any,
) -> list[jax.core.ShapedArray]:
    del split
    return [
        *(compat.output_aval([x, *scale], shape, dtype) for shape in _layouts(x.shape, turn)),
        compat.output_aval([x, *scale], _counts(x.shape, tiles), np.dtype(np.float32)),
    ]


def _layouts(axes: tuple[Any, ...], turn: int | None) -> list[tuple[Any, ...]]:
    """What the axes of the codes are, and of the turned ones if these are asked for."""
    return [axes] if turn is None else [axes, axes[turn:] + axes[:turn]]


def _counts(shape: Shape, tiles: Shape) -> Shape:
    """How many tiles each axis has: one where it is empty."""
    return tuple(max(n, 1) for n in tile_counts(shape, tiles))


# What it means


def _scale(
    x: jax.Array, dtype: np.dtype, tiles: Shape, mesh_axes: tuple[str, ...] = ()
) -> jax.Array:
    grain = Granularity(shape=x.shape, tiles=tiles, counts=tile_counts(x.shape, tiles))
    chosen = choose_scale(x.astype(jnp.float32), grain, dtype, None, choose_zero=False)
    chosen = jax.lax.pmax(chosen, mesh_axes) if mesh_axes else chosen
    return store_scale(chosen, np.float32)


def _amax(x: jax.Array) -> jax.Array:
    finite = jnp.where(jnp.isfinite(x), x, 0)
    return jnp.max(jnp.abs(finite), keepdims=True, initial=0)


def _meaning(
    x: jax.Array,
    *given: jax.Array,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
    mesh_axes: tuple[str, ...] = (),
) -> list[jax.Array]:
    """Codes; turned, if asked for; the scale, or beside a given one the amax.

    Along `mesh_axes` a tile lies on several devices.
    """
    wide = x.astype(jnp.float32)  # also because a reduction of bfloat16 is slow on the CPU
    found = _amax(wide) if given else _scale(x, dtype, tiles, mesh_axes)
    scale = given[0] if given else found
    codes = map_tiles(functools.partial(codes_of, dtype), wide, [scale], tiles)
    return [codes, *_turned(codes, turn), found]


def _turned(codes: jax.Array, turn: int | None, batch: int = 0) -> list[jax.Array]:
    if turn is None:
        return []
    axes, first = range(codes.ndim), turn + batch
    return [codes.transpose(*axes[:batch], *axes[first:], *axes[batch:first])]


def codes_of(
    dtype: np.dtype, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None
) -> jax.Array:
    """The nearest codes of `x / scale`, saturated: a bare cast to FP8 gives NaN past its range."""
    lowest, highest = finite_range(dtype)
    steps = steps_of(x, scale)
    if not is_float8(dtype):
        steps = shifted(jnp.round(jnp.where(jnp.isnan(steps), 0, steps)), zero_point)
    return jnp.clip(steps, lowest, highest).astype(dtype)


def shifted(steps: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """Steps counted from the code that means 0."""
    return steps if zero_point is None else steps + zero_point.astype(steps.dtype)


def steps_of(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` in units of the scale; a scale of 0 represents only 0, whatever the code."""
    return x / jnp.where(scale == 0, 1, scale)


# Batching


def _batch(
    operands: tuple[jax.Array, ...],
    axes: tuple[int | None, ...],
    *,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
    split: Any,
) -> tuple[list[jax.Array], list[int]]:
    """A chosen scale is one per tile still; given ones differ, and no kernel takes those."""
    del split  # `_bind` makes that of the new array
    if len(operands) > 1:
        one = functools.partial(_meaning, dtype=dtype, tiles=tiles, turn=turn)
        results = jax.vmap(one, axes)(*operands)
        return results, [0] * len(results)
    (axis,) = axes
    assert axis is not None
    x = jnp.moveaxis(operands[0], axis, 0)
    codes, scale = _bind(x, dtype=dtype, tiles=(1, *tiles), turn=None)
    results = [codes, *_turned(codes, turn, 1), scale]
    return results, [0] * len(results)


# Differentiation: the codes have none, the scale follows the largest value of its tile.


def _jvp(
    primals: tuple[jax.Array, ...],
    tangents: tuple[Any, ...],
    *,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
    split: Any,
) -> tuple[list[jax.Array], list[Any]]:
    """That of a chosen scale; `encode` lets no tangent come here."""
    del split
    results = _bind(*primals, dtype=dtype, tiles=tiles, turn=turn)
    d_results: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if not isinstance(tangents[0], ad.Zero):
        of_x = functools.partial(_scale, dtype=dtype, tiles=tiles)
        d_results[-1] = jax.jvp(of_x, primals, tangents)[1]
    return results, d_results


# Splitting over a mesh


@functools.lru_cache(maxsize=1024)
def _split(
    shape: Shape, wide: np.dtype, given: bool, *, dtype: np.dtype, tiles: Shape, turn: int | None
) -> Any:
    """The call as XLA may split it; a tile is cut only where it is the whole of an axis."""
    names = tuple(f"a{axis}" for axis in range(len(shape)))
    axes = list(zip(names, shape, tiles, strict=True))
    whole = [name for name, size, tile in axes if tile >= size]
    found = tuple(None if tile >= size else name for name, size, tile in axes)
    avals = [jax.ShapeDtypeStruct(shape, wide), jax.ShapeDtypeStruct((1,) * len(shape), np.float32)]

    def call(*operands: jax.Array) -> list[jax.Array]:
        return quantize_p.bind(*operands, dtype=dtype, tiles=tiles, turn=turn, split=None)

    def on_shards(shards: Shards) -> Any:
        mesh_axes = shards.axes(*whole)
        if not mesh_axes:
            return call
        local = tuple(map(min, tiles, shards.shape(shape, names)))
        meaning = _of_one if len(whole) == len(shape) else _meaning
        how: Any = {"dtype": dtype, "tiles": local, "turn": turn, "mesh_axes": mesh_axes}
        return functools.partial(meaning, **how)

    factors = Factors(
        operands=(names, *[(None,) * len(shape)] * given),
        results=(*_layouts(names, turn), found),
        pieces={
            name: size if tile >= size else size // tile if size % tile == 0 else 1
            for name, size, tile in axes
        },
    )
    what = repr((quantize_p, shape, wide, given, dtype, tiles, turn))
    return partitioned(call, avals[: 1 + given], factors, on_shards, what)


def _of_one(
    x: jax.Array,
    *given: jax.Array,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
    mesh_axes: tuple[str, ...],
) -> list[jax.Array]:
    """A device's part of an array with one scale, which all of them settle first."""
    scale = given[0] if given else _scale(x, dtype, tiles, mesh_axes)
    *codes, amax = quantize_p.bind(x, scale, dtype=dtype, tiles=tiles, turn=turn, split=None)
    return [*codes, jax.lax.pmax(amax, mesh_axes) if given else scale]


# Lowering

# On a GPU a tile that is part of a row has so many columns. The CPU takes tiles of any size whose
# values lie in runs that are not too short to pay.
_BLOCK = 128
_SHORTEST = 16


def _matrix(shape: Shape, tiles: Shape, turn: int | None) -> tuple[int, int, int, int] | None:
    """Rows, columns and tile of the matrix that has the same tiles, or None where none has.

    Tiles reach over whole trailing axes, or over the last two axes and one index of the others.
    """
    if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        return None  # nothing to do, or sizes that only the one who runs an export knows
    if len(shape) == 1:
        shape, tiles = (1, *shape), (1, *tiles)
    whole = len(shape)
    while whole and tiles[whole - 1] >= shape[whole - 1]:
        whole -= 1
    turn = max(whole, 1) if turn is None else turn
    if whole == 0 or all(t == 1 for t in tiles[:whole]):
        rows, columns = math.prod(shape[:turn]), math.prod(shape[turn:])
        return rows, columns, (rows if whole == 0 else 1), columns
    *leading, tile_rows, tile_columns = tiles
    aligned = tile_rows == 1 or shape[-2] % tile_rows == 0 or math.prod(shape[:-2]) == 1
    if aligned and all(t == 1 for t in leading):
        return math.prod(shape[:-1]), shape[-1], tile_rows, tile_columns
    return None


def _has_kernel(platform: str, matrix: tuple[int, int, int, int], turn: int | None) -> bool:
    """Whether the library of a platform takes these tiles."""
    rows, columns, tile_rows, tile_columns = matrix
    if platform == "cpu":
        run = tile_columns if tile_columns < columns else min(tile_rows, rows) * columns
        return turn is None and (run >= _SHORTEST or run == rows * columns)
    if tile_columns >= columns and tile_rows in (1, rows):
        return True
    return tile_columns == _BLOCK and tile_rows in (1, _BLOCK)


def _call(
    platform: str,
    x: jax.Array,
    *given: jax.Array,
    dtype: np.dtype,
    tiles: Shape,
    turn: int | None,
) -> list[jax.Array]:
    """The kernel where there is one for these tiles, else what XLA makes of the meaning."""
    matrix = _matrix(x.shape, tiles, turn) if dtype != np.uint8 else None
    absent = ffi.has_backend(platform) and ffi.why_unavailable(platform)
    if matrix is None or not _has_kernel(platform, matrix, turn) or absent:
        return _meaning(x, *given, dtype=dtype, tiles=tiles, turn=turn)
    ffi.register_if_it_runs_here(platform)
    rows, columns, tile_rows, tile_columns = matrix
    counts = (-(-rows // tile_rows), -(-columns // tile_columns))
    found = jax.ShapeDtypeStruct(counts, np.float32)
    turned = [] if turn is None else [jax.ShapeDtypeStruct((columns, rows), dtype)]
    results = [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        *([*turned, found] if given else [found, *turned]),
    ]
    if platform == "cuda":
        results.append(jax.ShapeDtypeStruct((_WORKSPACE,), np.uint8))
    codes, *others = jax.ffi.ffi_call(ffi.QUANTIZE_TARGET, results)(
        x.reshape(rows, columns),
        *(scale.reshape(1, 1) for scale in given),
        out_dtype=dtype.name,
        tile_rows=np.int64(tile_rows),
        tile_columns=np.int64(tile_columns),
        given_scale=bool(given),
        transposed=turn is not None,
        amax=bool(given),
    )
    others = others[: 1 + len(turned)]
    others = others if given else others[::-1]
    shapes = [*_layouts(x.shape, turn), _counts(x.shape, tiles)]
    outputs = zip([codes, *others], shapes, strict=True)
    return [output.reshape(shape) for output, shape in outputs]


# The partial maxima of one scale for the whole array.
_WORKSPACE = 1 << 16

ad.primitive_jvps[quantize_p] = _jvp
batching.primitive_batchers[quantize_p] = _batch
mlir.register_lowering(quantize_p, lowering(mlir.lower_fun(_meaning, multiple_results=True)))
for _platform in ffi.PLATFORMS:
    _rule = mlir.lower_fun(functools.partial(_call, _platform), multiple_results=True)
    mlir.register_lowering(quantize_p, lowering(_rule), platform=_platform)
