"""Quantizing as one primitive, `quantize_p`: one FFI call where there is a kernel.

`QuantizeSpec` states operand and rule, `reference/quantize_reference` the meaning, and
`quantize_lowering` the call.

Order of this file: primitive, bind, abstract evaluation, batching, differentiation, splitting over
a mesh, registration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jaxfp8._call.library import ffi
from jaxfp8._call.library.strictness import tell_gathered
from jaxfp8._call.mesh import explicit
from jaxfp8._call.mesh.partitioning import is_wanted, lowering
from jaxfp8._call.mesh.shards import Factors, Parts, Shards, without_padding
from jaxfp8._call.ops.eager import run_compiled
from jaxfp8._call.ops.quantize_lowering import lowered
from jaxfp8._call.reference.quantize_reference import (
    QuantizeSpec,
    chosen_scale,
    one_after_the_other,
    plain_amax,
    quantized,
    transposed,
    with_transpose,
)
from jaxfp8._value import compat
from jaxfp8._value.spec import Shape

quantize_p = Primitive("quantize")
quantize_p.multiple_results = True


# Bind: one function for each use.


def quantize_tiles(
    x: jax.Array, dtype: np.dtype, tiles: Shape, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Codes of `x` in an 8-bit `dtype` and the float32 scale of each tile; no zero point.

    `x` has no empty axis. It is a wide float, or FP8 that becomes int8.
    """
    spec = QuantizeSpec(dtype=np.dtype(dtype), tiles=tiles, power_of_two=power_of_two)
    codes, scale = _bind(x, spec=spec)
    return codes, scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor in 8 bits."""

    codes: jax.Array  # of the shape of the tensor
    # The same with the axes from `transpose_from` on before the others, or None.
    transposed: jax.Array | None
    scale: jax.Array  # float32, one per tile
    transposed_scale: jax.Array | None  # likewise, of `transposed`; None if it is the same
    # Float32, every axis of size 1: the largest finite magnitude if the scale was given, else None.
    amax: jax.Array | None


def encode(
    x: jax.Array,
    dtype: DTypeLike,
    scale: jax.Array | None,
    transpose_from: int | None,
    tiles: Shape | None = None,
    power_of_two: bool = False,
    transposed_tiles: Shape | None = None,
) -> Encoded:
    """A tensor in 8 bits in one layout or in two, with scales chosen (None) or given; no gradient.

    `transpose_from` is the first of the axes that `transposed` has in front; None for no such copy.
    Without `tiles` there is one scale. With an empty axis, and only without tiles, it is given.
    With `transposed_tiles`, by axis of `x`, the copy is quantized by itself.
    """
    x = jax.lax.stop_gradient(x)
    given = [] if scale is None else [jax.lax.stop_gradient(scale).reshape((1,) * x.ndim)]
    spec = QuantizeSpec(
        dtype=np.dtype(dtype),
        tiles=_whole(x.shape) if tiles is None else tiles,
        given_scale=scale is not None,
        power_of_two=power_of_two,
        transpose_from=transpose_from,
        transposed_tiles=transposed_tiles,
    )
    codes, *others = _bind(*compat.vary_alike((x, *given)), spec=spec)
    transposed_scale = others.pop() if transposed_tiles is not None else None
    *copy, of_tile = others
    return Encoded(
        codes=codes,
        transposed=copy[0] if copy else None,
        scale=given[0] if given else of_tile,
        transposed_scale=transposed_scale,
        amax=of_tile if given else None,
    )


def amax_rows(x: jax.Array) -> jax.Array:
    """The largest magnitude along the last axis, in its dtype; NaN wins over infinity."""
    (amax,) = _bind(x, spec=QuantizeSpec(dtype=None, tiles=_rows(x.shape), plain=True))
    return jnp.squeeze(amax, -1)


def encode_rows(
    x: jax.Array, scale: jax.Array, dtype: np.dtype, lowest: int, *, multiplies: bool = False
) -> jax.Array:
    """Codes of `x` for scales that are given, by the plain rule: a scale of 0 divides.

    The scale has one element, or one for each row; with `multiplies` it is a factor. `lowest` is
    the lowest code of int8; FP8 has its whole range.
    """
    spec = QuantizeSpec(
        dtype=np.dtype(dtype),
        tiles=_whole(x.shape) if scale.size == 1 else _rows(x.shape),
        given_scale=True,
        plain=True,
        multiplies=multiplies,
        lowest=lowest if np.dtype(dtype) == np.int8 else None,
    )
    scale = scale.reshape((1,) * x.ndim) if scale.size == 1 else scale
    (codes,) = _bind(*compat.vary_alike([x, scale]), spec=spec)
    return codes


def _whole(shape: Shape) -> Shape:
    return tuple(max(size, 1) for size in shape)


def _rows(shape: Shape) -> Shape:
    return (*(1 for _ in shape[:-1]), max(shape[-1], 1))


def _bind(*operands: jax.Array, spec: QuantizeSpec) -> list[jax.Array]:
    return quantize_p.bind(*operands, spec=spec, split=is_wanted(operands))


run_compiled(quantize_p)


# Abstract evaluation


@quantize_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray, spec: QuantizeSpec, split: bool
) -> list[jax.core.ShapedArray]:
    del split
    x = avals[0]
    shapes, dtypes = spec.layouts(x.shape), [spec.dtype] * len(spec.layouts(x.shape))
    if spec.has_value_per_tile:
        shapes = [*shapes, spec.counts(x.shape)]
        dtypes.append(x.dtype if spec.plain else np.dtype(np.float32))
    if spec.transposed_tiles is not None:
        shapes = [*shapes, spec.apart[1].counts(spec.transposed(x.shape))]
        dtypes.append(np.dtype(np.float32))
    return explicit.output_avals(avals, shapes, dtypes, functools.partial(_parts, spec=spec))


# Batching: scales that are chosen, or given for rows, get one more axis of tiles. One scale for
# each array of a batch is a problem that no kernel takes.


def _batch(
    operands: tuple[jax.Array, ...],
    axes: tuple[int | None, ...],
    *,
    spec: QuantizeSpec,
    split: bool,
) -> tuple[list[jax.Array], list[int]]:
    del split  # `_bind` makes that of the new array
    if not spec.given_scale:
        results = _batch_without_scale(operands[0], axes[0], spec)
    elif spec.plain:
        results = _batch_rows(operands, axes, spec)
    else:
        results = jax.vmap(functools.partial(quantized, spec=spec), axes)(*operands)
    return results, [0] * len(results)


def _batch_without_scale(x: jax.Array, axis: int | None, spec: QuantizeSpec) -> list[jax.Array]:
    assert axis is not None
    if spec.transposed_tiles is not None:
        each = functools.partial(_batch_without_scale, axis=0)
        return one_after_the_other(each, jnp.moveaxis(x, axis, 0), spec, batch=1)
    wider = dataclasses.replace(spec, tiles=(1, *spec.tiles), transpose_from=None)
    *codes, of_tiles = _bind(jnp.moveaxis(x, axis, 0), spec=wider)
    copies = [y for x in codes for y in with_transpose(x, spec.transpose_from, batch=1)]
    return [*copies, of_tiles]


def _batch_rows(
    operands: tuple[jax.Array, ...], axes: tuple[int | None, ...], spec: QuantizeSpec
) -> list[jax.Array]:
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    x, scale = (compat.in_front(x, axis, size) for x, axis in zip(operands, axes, strict=True))
    wider = dataclasses.replace(spec, tiles=_rows(x.shape))
    return _bind(x, jnp.broadcast_to(scale, (*x.shape[:-1], 1)), spec=wider)


# Differentiation: the codes have no derivative. A chosen scale follows the largest value of its
# tile, and so does an amax. A given scale has no tangent where there is an amax: see `encode`.


def _jvp(
    primals: tuple[jax.Array, ...],
    tangents: tuple[Any, ...],
    *,
    spec: QuantizeSpec,
    split: bool,
) -> tuple[list[jax.Array], list[Any]]:
    del split
    results = _bind(*primals, spec=spec)
    d_results: list[Any] = [*map(compat.zero_tangent, results)]
    if not spec.given_scale and not isinstance(tangents[0], ad.Zero):
        of_tiles = plain_amax if spec.plain else functools.partial(chosen_scale, spec=spec)
        d_results[-1] = jax.jvp(of_tiles, primals, tangents)[1]
    return results, d_results


# Splitting over a mesh: a tile is cut only where it is the whole of an axis.


def _parts(
    avals: Sequence[Any], *, spec: QuantizeSpec, split: bool = False, out_sharding: Any = None
) -> Parts:
    """The factors of the call, and the call on shards."""
    del out_sharding  # it has none
    if spec.transposed_tiles is not None:
        return _parts_of_two(avals, spec, split)
    shape = avals[0].shape
    names = tuple(f"a{axis}" for axis in range(len(shape)))
    axes = list(zip(names, shape, spec.tiles, strict=True))
    of_tiles = tuple(None if tile >= size else name for name, size, tile in axes)
    factors = Factors(
        operands=(names, *[of_tiles] * spec.given_scale),
        results=(*spec.layouts(names), *[of_tiles] * spec.has_value_per_tile),
        pieces={name: _pieces(size, tile) for name, size, tile in axes},
        ragged=frozenset(n for n, size, tile in axes if not 1 < tile < size),
    )

    def on_shards(shards: Shards) -> Any:
        local_shape = shards.shape(shape, names)
        tiles = tuple(max(1, min(pair)) for pair in zip(spec.tiles, local_shape, strict=True))
        local = dataclasses.replace(spec, tiles=tiles)
        mesh_axes = shards.axes(*(name for name, size, tile in axes if tile >= size))
        # Codes of the plain rule have given scales.
        if not mesh_axes or (spec.plain and spec.dtype is not None):
            return functools.partial(_on_one_device, spec=local, split=split)
        if spec.plain:
            across = functools.partial(_amax_across, spec=local, split=split, mesh_axes=mesh_axes)
        elif any(tile < size for _, size, tile in axes):
            across = functools.partial(quantized, spec=local, mesh_axes=mesh_axes)
        else:
            across = functools.partial(
                _one_tile_across, spec=local, split=split, mesh_axes=mesh_axes
            )

        def without_its_padding(x: jax.Array, *given: jax.Array) -> Any:
            for axis, (name, size, tile) in enumerate(axes):
                x = without_padding(x, axis, size, shards.axes(name)) if tile >= size else x
            return across(x, *given)

        return without_its_padding

    return factors, on_shards


def _parts_of_two(avals: Sequence[Any], spec: QuantizeSpec, split: bool) -> Parts:
    """Those of two quantizations of one array. It is cut as both can be."""
    assert spec.transposed_tiles is not None and spec.transpose_from is not None
    there = dataclasses.replace(spec.apart[0], tiles=spec.transposed_tiles)
    pair = [_parts(avals, spec=each, split=split) for each in (spec.apart[0], there)]
    (one, on_first), (two, on_second) = pair
    (names, of_tiles), (_, of_others) = one.results, two.results
    factors = Factors(
        operands=one.operands,
        results=(names, spec.transposed(names), of_tiles, spec.transposed(of_others)),
        pieces={name: min(pieces, two.pieces[name]) for name, pieces in one.pieces.items()},
        ragged=one.ragged & two.ragged,
    )
    whole = [name for name in names if name not in of_tiles or name not in of_others]
    turned = functools.partial(transposed, first=spec.transpose_from)

    def on_shards(shards: Shards) -> Any:
        if not shards.axes(*whole):
            return functools.partial(_on_one_device, spec=spec, split=split)
        first, second = on_first(shards), on_second(shards)

        def cut(x: jax.Array) -> list[jax.Array]:
            (codes, scale), (others, their_scale) = first(x), second(x)
            return [codes, turned(others), scale, turned(their_scale)]

        return cut

    return factors, on_shards


def _pieces(size: int, tile: int) -> int:
    if tile >= size:
        return size
    return size // tile if size % tile == 0 else 1


def _on_one_device(*operands: jax.Array, spec: QuantizeSpec, split: bool) -> list[jax.Array]:
    return quantize_p.bind(*operands, spec=spec, split=split)


def _amax_across(
    x: jax.Array, *, spec: QuantizeSpec, split: bool, mesh_axes: tuple[str, ...]
) -> list[jax.Array]:
    """Amaxes of rows that several devices share.

    They are gathered first: a collective maximum need not keep NaN.
    """
    (amax,) = _on_one_device(x, spec=spec, split=split)
    return [jnp.max(jax.lax.all_gather(amax, mesh_axes), axis=0)]


def _one_tile_across(
    x: jax.Array, *given: jax.Array, spec: QuantizeSpec, split: bool, mesh_axes: tuple[str, ...]
) -> list[jax.Array]:
    """A device's part of an array with one scale, which all devices agree on first."""
    scale = given[0] if given else chosen_scale(x, spec, mesh_axes)
    local = dataclasses.replace(spec, given_scale=True)
    *codes, amax = _on_one_device(x, scale, spec=local, split=split)
    return [*codes, jax.lax.pmax(amax, mesh_axes) if given else scale]


def _saying_what_is_cut(rule: Any) -> Any:
    """The lowering rule, which first says of explicit axes that cannot stay split."""

    def lower(ctx: Any, *operands: Any, spec: QuantizeSpec, **params: Any) -> Any:
        x = ctx.avals_in[0]
        if explicit.mesh_of([x]) is not None:
            factors, _ = _parts(ctx.avals_in, spec=spec)
            cut = ", ".join(map(str, explicit.cut_axes(x, factors)))
            if cut:
                tell_gathered(spec.told(x), f"{_CUT} {cut}; {_KEEP_WHOLE}")
        return rule(ctx, *operands, spec=spec, **params)

    return lower


_CUT = "shards would cut what shares a scale along axis"
_KEEP_WHOLE = "shard another axis, or take tiles that the devices divide"

# Registration

ad.primitive_jvps[quantize_p] = _jvp
batching.primitive_batchers[quantize_p] = _batch
for _platform in (None, *ffi.PLATFORMS):
    _call = quantized if _platform is None else functools.partial(lowered, _platform)
    _rule = lowering(mlir.lower_fun(_call, multiple_results=True), _parts)
    _rule = _saying_what_is_cut(explicit.lowering(_rule, _parts))
    mlir.register_lowering(quantize_p, _rule, platform=_platform)
