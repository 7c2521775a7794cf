"""Lowers a quantization to the library's call; to its definition where no kernel takes it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.library import ffi
from jaxfp8._call.reference.quantize_reference import (
    QuantizeSpec,
    one_after_the_other,
    quantized,
)
from jaxfp8._value.dtypes import is_float8
from jaxfp8._value.spec import Shape, is_known

# On a GPU a tile that is part of a row has this many columns. The CPU takes tiles of any size whose
# values lie in runs of at least `_SHORTEST_RUN`; shorter runs are faster in XLA.
_BLOCK = 128
_SHORTEST_RUN = 16

# The longest row of FP8 that a block of a GPU holds in registers.
_LONGEST_ROW = 131072

# Bytes on a GPU for the partial maxima of one scale for the whole array.
_WORKSPACE = 1 << 16

Matrix = tuple[int, int, int, int]  # rows, columns, rows of a tile, columns of a tile


def why_no_rows_here(shape: Shape) -> str | None:
    """Why the CPU does not quantize rows of this shape by the plain rule, or None if it does."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return "it has no rows"
    if shape[-1] < _SHORTEST_RUN:
        return f"its rows have fewer than {_SHORTEST_RUN} values"
    return ffi.why_unavailable("cpu")


def lowered(platform: str, x: jax.Array, *given: jax.Array, spec: QuantizeSpec) -> list[jax.Array]:
    """The results on one platform: the call where a kernel takes the tiles."""
    if spec.transposed_tiles is not None and not _takes_two(platform, x.shape, spec):
        return one_after_the_other(functools.partial(lowered, platform), x, spec)
    order = _rows_last(x.shape, spec) if platform == "cuda" and is_float8(x.dtype) else None
    if order is not None:
        # XLA drops the way back where a product of int8 has its sums along the last axes anyway.
        turned = dataclasses.replace(spec, tiles=tuple(spec.tiles[axis] for axis in order))
        results = lowered(platform, x.transpose(order), spec=turned)
        return [result.transpose(np.argsort(order)) for result in results]
    matrix = _matrix(x.shape, spec)
    if is_float8(x.dtype) and not (platform == "cuda" and matrix and _reads_float8(matrix, spec)):
        x = x.astype(jnp.bfloat16)  # exact
    if matrix is None or not _has_kernel(platform, x.shape, matrix, spec):
        return quantized(x, *given, spec=spec)
    ffi.register_if_it_runs_here(platform)
    if spec.dtype is None:
        rows, columns, _, _ = matrix
        call = jax.ffi.ffi_call(ffi.AMAX_TARGET, jax.ShapeDtypeStruct((rows,), np.float32))
        amax = call(x.reshape(rows, columns))
        return [amax.reshape(spec.counts(x.shape)).astype(x.dtype)]
    return _quantize_call(platform, x, given, matrix, spec)


def _takes_two(platform: str, shape: Shape, spec: QuantizeSpec) -> bool:
    """Whether one call quantizes for both layouts: blocks of 128 along the last axis, and down."""
    one, _ = spec.apart
    matrix = _matrix(shape, one)
    if platform != "cuda" or matrix is None or not _has_kernel(platform, shape, matrix, one):
        return False
    assert spec.dtype is not None
    rows, columns, tile_rows, tile_columns = matrix
    is_last = spec.transpose_from == len(shape) - 1 and columns == shape[-1] > _BLOCK
    down = (*(1 for _ in shape[:-2]), min(_BLOCK, shape[-2]), 1)
    aligned = shape[-2] % _BLOCK == 0 or shape[-2] == rows
    blocks = (tile_rows, tile_columns) == (1, _BLOCK) and spec.transposed_tiles == down
    return is_last and blocks and aligned and is_float8(spec.dtype)


def _matrix(shape: Shape, spec: QuantizeSpec) -> Matrix | None:
    """The matrix that has the same tiles, or None where none has.

    Tiles reach over whole trailing axes, or over the last two axes and one index of the others. A
    transposed copy has the columns of the matrix in front.
    """
    tiles, first = spec.tiles, spec.transpose_from
    if not shape or not is_known(shape) or 0 in shape:
        return None
    if len(shape) == 1:
        shape, tiles = (1, *shape), (1, *tiles)
    whole = len(shape)
    while whole and tiles[whole - 1] >= shape[whole - 1]:
        whole -= 1
    if whole == 0 or (first in (None, whole) and all(t == 1 for t in tiles[:whole])):
        split = max(whole, 1) if first is None else first
        rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
        return rows, columns, (rows if whole == 0 else 1), columns
    *leading, tile_rows, tile_columns = tiles
    aligned = tile_rows == 1 or shape[-2] % tile_rows == 0 or math.prod(shape[:-2]) == 1
    if aligned and first in (None, len(shape) - 1) and all(t == 1 for t in leading):
        return math.prod(shape[:-1]), shape[-1], tile_rows, tile_columns
    return None


def _has_kernel(platform: str, shape: Shape, matrix: Matrix, spec: QuantizeSpec) -> bool:
    """Whether the library of a platform is there and takes these tiles."""
    if spec.plain:
        return platform == "cpu" and why_no_rows_here(shape) is None
    if spec.dtype == np.uint8 or (ffi.has_backend(platform) and ffi.why_unavailable(platform)):
        return False
    rows, columns, tile_rows, tile_columns = matrix
    if platform == "cpu":
        run = tile_columns if tile_columns < columns else min(tile_rows, rows) * columns
        long_enough = run >= _SHORTEST_RUN or run == rows * columns
        return spec.transpose_from is None and long_enough
    if tile_columns >= columns and tile_rows in (1, rows):
        return True
    return tile_columns == _BLOCK and tile_rows in (1, _BLOCK)


def _rows_last(shape: Shape, spec: QuantizeSpec) -> Shape | None:
    """An order of axes with each tile as a row; None if there is none, or no need of one."""
    tiles = list(enumerate(zip(spec.tiles, shape, strict=True)))
    whole = [axis for axis, (tile, size) in tiles if tile >= size > 1]
    others = [axis for axis, _ in tiles if axis not in whole]
    order = (*others, *whole)
    plain = spec.chooses_scale and spec.transpose_from is None
    one_each = all(spec.tiles[axis] == 1 for axis in others if shape[axis] > 1)
    return order if plain and one_each and list(order) != sorted(order) else None


def _reads_float8(matrix: Matrix, spec: QuantizeSpec) -> bool:
    """Whether the kernels of a GPU round FP8 itself: to int8, a scale for each row."""
    _, columns, tile_rows, tile_columns = matrix
    rows = tile_rows == 1 and tile_columns >= columns and columns <= _LONGEST_ROW
    return rows and spec.dtype == np.int8 and spec.chooses_scale and spec.transpose_from is None


def _quantize_call(
    platform: str, x: jax.Array, given: tuple[jax.Array, ...], matrix: Matrix, spec: QuantizeSpec
) -> list[jax.Array]:
    """The call of docs/custom_call.md; the results are in the order of `QuantizeSpec`."""
    assert spec.dtype is not None
    rows, columns, tile_rows, tile_columns = matrix
    counts = (-(-rows // tile_rows), -(-columns // tile_columns))
    copies = [] if spec.transpose_from is None else [(columns, rows)]
    per_tile = jax.ShapeDtypeStruct(counts, np.float32)
    has_own = spec.transposed_tiles is not None
    own = [jax.ShapeDtypeStruct((columns, -(-rows // tile_columns)), np.float32)] * has_own
    outputs = [
        jax.ShapeDtypeStruct((rows, columns), spec.dtype),
        *[per_tile] * spec.chooses_scale,
        *(jax.ShapeDtypeStruct(shape, spec.dtype) for shape in copies),
        *own,
        *[per_tile] * spec.has_amax,
        *[jax.ShapeDtypeStruct((_WORKSPACE,), np.uint8)] * (platform == "cuda"),
    ]
    codes, *others = jax.ffi.ffi_call(ffi.QUANTIZE_TARGET, outputs)(
        x.reshape(rows, columns),
        *(scale.reshape(counts) for scale in given),
        out_dtype=spec.dtype.name,
        tile_rows=np.int64(tile_rows),
        tile_columns=np.int64(tile_columns),
        given_scale=spec.given_scale,
        **_options(spec),
    )
    if spec.chooses_scale:
        others = [*others[1 : 1 + len(copies)], others[0], *others[1 + len(copies) :]]
    shapes = [*spec.layouts(x.shape), *[spec.counts(x.shape)] * spec.has_value_per_tile]
    shapes += [spec.apart[1].counts(spec.transposed(x.shape))] if has_own else []
    return [y.reshape(shape) for y, shape in zip([codes, *others], shapes, strict=False)]


def _options(spec: QuantizeSpec) -> dict[str, Any]:
    """The attributes that only one of the two rules has."""
    if not spec.plain:
        return {
            "transposed": spec.transpose_from is not None,
            "transposed_scale": spec.transposed_tiles is not None,
            "amax": spec.has_amax,
            "power_of_two": spec.power_of_two,
        }
    lowest = {} if spec.lowest is None else {"lowest": np.int64(spec.lowest)}
    return {"plain": True, "multiplies": spec.multiplies, **lowest}
