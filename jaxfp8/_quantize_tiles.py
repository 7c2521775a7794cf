"""Scales chosen and values cast in one: `quantize_p`, one FFI call on a GPU, plain jnp elsewhere.

    scale = max|x| / highest over the finite values of a tile, 1 for a tile of zeros
    code  = saturate(round(x / scale))

Order of this file: bind, primitive, what it means, batching, differentiation, lowering.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8 import _compat, _ffi
from jaxfp8._dtypes import finite_range, is_float8
from jaxfp8._scales import Granularity, choose_scale, store_scale
from jaxfp8._spec import Shape, tile_counts
from jaxfp8._tiles import map_tiles

quantize_p = Primitive("quantize_tiles")
quantize_p.multiple_results = True


def quantize_tiles(x: jax.Array, dtype: np.dtype, tiles: Shape) -> tuple[jax.Array, jax.Array]:
    """Codes of `x` in an 8-bit `dtype` and the float32 scale of each tile; no zero point.

    Args:
      x: float32, bfloat16 or float16, with no empty axis.
      dtype: the 8-bit dtype.
      tiles: size of the tile on each axis, at least 1; the last may be partial.
    """
    codes, scale = quantize_p.bind(x, dtype=np.dtype(dtype), tiles=tiles)
    return codes, scale


@functools.lru_cache(maxsize=1024)
def _jitted(dtype: np.dtype, tiles: Shape) -> Any:
    return jax.jit(functools.partial(quantize_p.bind, dtype=dtype, tiles=tiles))


@quantize_p.def_impl
def _impl(x: jax.Array, *, dtype: np.dtype, tiles: Shape) -> list[jax.Array]:
    with jax.disable_jit(False):
        return _jitted(dtype, tiles)(x)


@quantize_p.def_abstract_eval
def _abstract_eval(
    x: jax.core.ShapedArray, *, dtype: np.dtype, tiles: Shape
) -> list[jax.core.ShapedArray]:
    counts = tile_counts(x.shape, tiles)
    return [
        _compat.output_aval([x], x.shape, dtype),
        _compat.output_aval([x], counts, np.dtype(np.float32)),
    ]


# What it means


def _scale(x: jax.Array, dtype: np.dtype, tiles: Shape) -> jax.Array:
    grain = Granularity(shape=x.shape, tiles=tiles, counts=tile_counts(x.shape, tiles))
    chosen = choose_scale(x.astype(jnp.float32), grain, dtype, None, choose_zero=False)
    return store_scale(chosen, np.float32)


def _meaning(x: jax.Array, *, dtype: np.dtype, tiles: Shape) -> list[jax.Array]:
    scale = _scale(x, dtype, tiles)
    codes = functools.partial(codes_of, dtype)
    return [map_tiles(codes, x.astype(jnp.float32), [scale], tiles), scale]


def codes_of(
    dtype: np.dtype, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None
) -> jax.Array:
    """The nearest codes of `x / scale`, saturated: a bare cast to FP8 gives NaN past its range."""
    lowest, highest = finite_range(dtype)
    steps = steps_of(x, scale)
    if not is_float8(dtype):
        steps = jnp.round(jnp.where(jnp.isnan(steps), 0, steps))
        steps = steps if zero_point is None else steps + zero_point
    return jnp.clip(steps, lowest, highest).astype(dtype)


def steps_of(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` in units of the scale; a scale of 0 represents only 0, whatever the code."""
    return x / jnp.where(scale == 0, 1, scale)


# Batching


def _batch(
    operands: tuple[jax.Array], axes: tuple[int], *, dtype: np.dtype, tiles: Shape
) -> tuple[list[jax.Array], list[int]]:
    x = jnp.moveaxis(operands[0], axes[0], 0)
    return quantize_p.bind(x, dtype=dtype, tiles=(1, *tiles)), [0, 0]


# Differentiation: the codes have none, the scale follows the largest value of its tile.


def _jvp(
    primals: tuple[jax.Array], tangents: tuple[Any], *, dtype: np.dtype, tiles: Shape
) -> tuple[list[jax.Array], list[Any]]:
    codes, scale = quantize_p.bind(*primals, dtype=dtype, tiles=tiles)
    d_scale: Any = ad.Zero(jax.typeof(scale).to_tangent_aval())
    if not isinstance(tangents[0], ad.Zero):
        of_x = functools.partial(_scale, dtype=dtype, tiles=tiles)
        d_scale = jax.jvp(of_x, primals, tangents)[1]
    return [codes, scale], [ad.Zero(jax.typeof(codes).to_tangent_aval()), d_scale]


# Lowering

_BLOCK = 128


def _matrix(shape: Shape, tiles: Shape) -> tuple[int, int, int, int] | None:
    """Rows, columns and tile of the matrix that a kernel takes, or None where none does.

    One tile for all, one per row, or tiles of 1 x 128 or 128 x 128.
    """
    if 0 in shape or not shape:
        return None
    whole = len(shape)
    while whole and tiles[whole - 1] >= shape[whole - 1]:
        whole -= 1
    split = max(whole, 1)
    if whole == 0 or all(t == 1 for t in tiles[:whole]):
        rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
        return rows, columns, (rows if whole == 0 else 1), columns
    *leading, tile_rows, tile_columns = tiles
    blocks = (tile_rows, tile_columns) in ((1, _BLOCK), (_BLOCK, _BLOCK))
    aligned = shape[-2] % tile_rows == 0 or math.prod(shape[:-2]) == 1
    if blocks and aligned and all(t == 1 for t in leading):
        return math.prod(shape[:-1]), shape[-1], tile_rows, tile_columns
    return None


def _call_cuda(x: jax.Array, *, dtype: np.dtype, tiles: Shape) -> list[jax.Array]:
    """The kernel where there is one for these tiles, else what XLA makes of the meaning."""
    matrix = _matrix(x.shape, tiles) if dtype != np.uint8 else None
    if matrix is None or (_ffi.has_backend("cuda") and _ffi.why_unavailable("cuda")):
        return _meaning(x, dtype=dtype, tiles=tiles)
    _ffi.register_if_it_runs_here("cuda")
    rows, columns, tile_rows, tile_columns = matrix
    counts = (-(-rows // tile_rows), -(-columns // tile_columns))
    results = [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        jax.ShapeDtypeStruct(counts, np.float32),
        jax.ShapeDtypeStruct((_WORKSPACE,), np.uint8),
    ]
    call = jax.ffi.ffi_call(_ffi.QUANTIZE_TARGET, results)
    codes, scale, _ = call(
        x.reshape(rows, columns),
        out_dtype=dtype.name,
        tile_rows=np.int64(tile_rows),
        tile_columns=np.int64(tile_columns),
    )
    return [codes.reshape(x.shape), scale.reshape(tile_counts(x.shape, tiles))]


# The partial maxima of one scale for the whole array.
_WORKSPACE = 1 << 16

ad.primitive_jvps[quantize_p] = _jvp
batching.primitive_batchers[quantize_p] = _batch
mlir.register_lowering(quantize_p, mlir.lower_fun(_meaning, multiple_results=True))
mlir.register_lowering(
    quantize_p, mlir.lower_fun(_call_cuda, multiple_results=True), platform="cuda"
)
