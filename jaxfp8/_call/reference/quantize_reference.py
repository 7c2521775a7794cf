"""What quantizing means: the problem as a spec, and its definition in jnp.

    amax  = max|x| of a tile
    scale = amax / highest, maybe rounded up to a power of two, 1 for a tile of zeros; or given
    code  = saturate(round(x / scale))

There are two rules, which differ in special values:

- by default NaN and infinities do not count in the amax, and a scale of 0 counts as 1;
- `plain` is what programs write themselves: NaN and infinities count, and 0 divides as it does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._value.dtypes import finite_range, is_float8
from jaxfp8._value.scales import Granularity, choose_scale, power_of_two, store_scale
from jaxfp8._value.spec import Shape, array, tile_counts
from jaxfp8._value.tiles import map_tiles

Axis = TypeVar("Axis")  # what stands for an axis: its size, or its factor on a mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
    """All facts of a quantization except its data.

    Its results in order are the codes, their transposed copy, one value for each tile (the chosen
    scale or the amax), and the scale of the copy. The properties say which of them it has.
    """

    dtype: np.dtype | None  # dtype of the codes; None where only the amax is wanted
    # Size, by axis, of the tile that shares one scale; at least 1. The last may be partial.
    tiles: Shape
    given_scale: bool = False  # whether the scale is an operand. Otherwise it is chosen
    power_of_two: bool = False  # whether a chosen scale is rounded up to a power of two
    # The first of the axes that the transposed copy has in front; None for no such copy.
    transpose_from: int | None = None
    # Size, by axis of the array, of the tile of the transposed copy, if it has chosen scales of its
    # own, and so other codes.
    transposed_tiles: Shape | None = None
    plain: bool = False  # whether the rule is the plain one. Tiles are then rows or the whole array
    # Whether codes are of `x * scale`, under the plain rule, and not of `x / scale`.
    multiplies: bool = False
    # The lowest code of int8 under the plain rule; None for the lowest there is.
    lowest: int | None = None

    def told(self, x: Any) -> str:
        """The quantization of an array of the type of `x` in words, for messages."""
        return f"the quantization of {array(x)}"

    @property
    def chooses_scale(self) -> bool:
        """Whether a chosen scale is among the results."""
        return self.dtype is not None and not self.given_scale

    @property
    def has_amax(self) -> bool:
        """Whether an amax is among the results, in place of a chosen scale."""
        return self.dtype is None or (self.given_scale and not self.plain)

    @property
    def has_value_per_tile(self) -> bool:
        """Whether the last result has one value for each tile."""
        return self.chooses_scale or self.has_amax

    @property
    def apart(self) -> tuple[QuantizeSpec, QuantizeSpec]:
        """Of two quantizations both of them; the second takes the array transposed."""
        assert self.transposed_tiles is not None
        first = dataclasses.replace(self, transpose_from=None, transposed_tiles=None)
        return first, dataclasses.replace(first, tiles=self.transposed(self.transposed_tiles))

    def transposed(self, sizes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """What an array has for each axis, by axis of the transposed copy."""
        assert self.transpose_from is not None
        return tuple(sizes[axis] for axis in _turned(len(sizes), self.transpose_from))

    def layouts(self, axes: tuple[Axis, ...]) -> list[tuple[Axis, ...]]:
        """The axes of the codes, and of their transposed copy; empty without codes."""
        if self.dtype is None:
            return []
        return [axes] if self.transpose_from is None else [axes, self.transposed(axes)]

    def counts(self, shape: Shape) -> Shape:
        """How many tiles each axis has: one where it is empty."""
        return tuple(max(n, 1) for n in tile_counts(shape, self.tiles))


def quantized(
    x: jax.Array,
    *given: jax.Array,
    spec: QuantizeSpec,
    mesh_axes: tuple[str, ...] = (),
) -> list[jax.Array]:
    """The results of a quantization, as `QuantizeSpec` lists them.

    A tile with a chosen scale may be spread over `mesh_axes`.
    """
    if spec.dtype is None:
        return [plain_amax(x)]
    if spec.transposed_tiles is not None:
        return one_after_the_other(quantized, x, spec)
    wide = x.astype(jnp.float32)  # also because a reduction of bfloat16 is slow on the CPU
    if spec.plain:
        by = functools.partial(plain_codes, dtype=spec.dtype, lowest=spec.lowest)
        return [by(wide, *given, multiplies=spec.multiplies)]
    of_tile = finite_amax(wide) if given else chosen_scale(wide, spec, mesh_axes)
    scale = given[0] if given else of_tile
    codes = map_tiles(functools.partial(codes_of, spec.dtype), wide, [scale], spec.tiles)
    return [*with_transpose(codes, spec.transpose_from), of_tile]


def chosen_scale(x: jax.Array, spec: QuantizeSpec, mesh_axes: tuple[str, ...] = ()) -> jax.Array:
    """The float32 scale of each tile."""
    assert spec.dtype is not None
    grain = Granularity(shape=x.shape, tiles=spec.tiles, counts=tile_counts(x.shape, spec.tiles))
    chosen = choose_scale(x.astype(jnp.float32), grain, spec.dtype, None, choose_zero=False)
    chosen = jax.lax.pmax(chosen, mesh_axes) if mesh_axes else chosen
    return power_of_two(chosen) if spec.power_of_two else store_scale(chosen, np.float32)


def finite_amax(x: jax.Array) -> jax.Array:
    """The largest finite magnitude of a whole array; every axis of size 1."""
    finite = jnp.where(jnp.isfinite(x), x, 0)
    return jnp.max(jnp.abs(finite), keepdims=True, initial=0)


def plain_amax(x: jax.Array) -> jax.Array:
    """The largest magnitude of each row, in the dtype of `x`; the last axis has size 1."""
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def with_transpose(codes: jax.Array, transpose_from: int | None, batch: int = 0) -> list[jax.Array]:
    """The codes and, if asked for, their transposed copy; `batch` leading axes stay in front."""
    return [codes] if transpose_from is None else [codes, transposed(codes, transpose_from, batch)]


def transposed(x: jax.Array, first: int, batch: int = 0) -> jax.Array:
    """An array with its axes from `first` on before the others, behind `batch` leading axes."""
    order = (axis + batch for axis in _turned(x.ndim - batch, first))
    return x.transpose(*range(batch), *order)


def _turned(rank: int, first: int) -> Shape:
    return (*range(first, rank), *range(first))


def one_after_the_other(
    each: Callable[..., Sequence[jax.Array]], x: jax.Array, spec: QuantizeSpec, batch: int = 0
) -> list[jax.Array]:
    """The results of two quantizations, by `each(x, spec=...)`; the second is of `x` transposed."""
    assert spec.transpose_from is not None
    first, second = spec.apart
    codes, scale = each(x, spec=first)
    others, their_scale = each(transposed(x, spec.transpose_from, batch), spec=second)
    return [codes, others, scale, their_scale]


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


def plain_codes(
    x: jax.Array,
    scale: jax.Array,
    *,
    dtype: np.dtype,
    lowest: int | None,
    multiplies: bool = False,
) -> jax.Array:
    """Codes by the plain rule, of float32 values for scales that broadcast to them."""
    low, high = finite_range(dtype)
    low = low if lowest is None else float(lowest)
    steps = x * scale if multiplies else x / scale
    steps = steps if is_float8(dtype) else jnp.round(steps)
    return jnp.clip(steps, low, high).astype(dtype)
