"""`Quantization`: how one operand of a product is held in 8 bits, before its data is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.quantize import quantize
from jaxfp8._value.checks import as_dtype, as_index
from jaxfp8._value.dtypes import EIGHT_BIT, SCALE, is_float8
from jaxfp8._value.errors import message, shown
from jaxfp8._value.qarray import QArray
from jaxfp8._value.shards import check_tiles_fit_shards
from jaxfp8._value.spec import Shape

Granularity = Literal["tensor", "channel"] | tuple[int | None, int | None]
Axes = Collection[int]
NAMES = ("tensor", "channel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How one operand of a product is held in 8 bits.

    Attributes:
      dtype: float8_e4m3fn, float8_e5m2, int8 or uint8.
      granularity: which values share a scale. "tensor": all of them. "channel": the values that
        are summed over, so that each index of the other axes has its own scale: an output channel
        of a weight, a token of an activation. `(k, n)`: tiles of `k` values along the last
        contracted axis and `n` along the last free one, None for the whole axis. Each index of
        any other axis then has its own scale.
      symmetric: whether code 0 means zero. If not, a zero point is chosen (integers only).
      static: whether the scale is calibrated beforehand and given. If not, the data decides.
      scale_dtype: dtype of a chosen scale; float8_e8m0fnu makes it a power of two.

    Raises:
      TypeError: a dtype is not listed above, or an FP8 dtype is to have a zero point.
      ValueError: the granularity is not listed above.

    Example:
      >>> import jax.numpy as jnp
      >>> blocks = Quantization(granularity=(128, 128))
      >>> blocks.quantize(jnp.ones((512, 256)), contracting=(0,))
      QArray(float8_e4m3fn[512,256], scale=float32[4,2])
    """

    dtype: DTypeLike = jnp.float8_e4m3fn
    granularity: Granularity = "channel"
    symmetric: bool = True
    static: bool = False
    scale_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        """Checks the fields, and normalises dtypes, to make equal recipes compare equal."""
        operation = "jaxfp8.Quantization"
        for name, allowed in (("dtype", EIGHT_BIT), ("scale_dtype", SCALE)):
            dtype = as_dtype(operation, name, getattr(self, name), allowed)
            object.__setattr__(self, name, dtype)
        if not self.symmetric and is_float8(self.dtype):
            got, needs = f"is False for {self.dtype}", "FP8 has no zero point"
            remedy = "leave it True, or choose int8 or uint8"
            raise TypeError(message(operation, "`symmetric`", got, needs, remedy))
        object.__setattr__(self, "granularity", _granularity(operation, self.granularity))

    def tiles(self, shape: Shape, contracting: Axes, batch: Axes = ()) -> dict[int, int]:
        """Size of the tile by axis of an operand of `shape`; an axis left out is one tile.

        Args:
          shape: shape of the operand.
          contracting: the contracted axes.
          batch: the axes shared with the other operand's batch.
        """
        if self.granularity == "tensor":
            return {}
        free = [a for a in range(len(shape)) if a not in {*contracting, *batch}]
        if isinstance(self.granularity, str):
            return dict.fromkeys([*sorted(batch), *free], 1)
        along, across = self.granularity
        sizes = dict.fromkeys(range(len(shape)), 1)
        for axes, tile in ((sorted(contracting), along), (free, across)):
            if tile is None:
                sizes.update((axis, max(shape[axis], 1)) for axis in axes)
            elif axes:
                sizes[axes[-1]] = min(tile, max(shape[axes[-1]], 1))
        return sizes

    def quantize(
        self,
        x: ArrayLike,
        contracting: Axes,
        batch: Axes = (),
        *,
        scale: ArrayLike | None = None,
        zero_point: ArrayLike | None = None,
        operand: str = "x",
    ) -> QArray:
        """The operand in 8 bits, ready for `jaxfp8.dot_general` over the same axes.

        Args:
          x: float32, bfloat16 or float16, of any shape.
          contracting: contracted axes of `x`; they may count from the end.
          batch: batch axes of `x`.
          scale: the calibrated scale of a static recipe, of shape (), of the rank of `x`, or of any
            shape of one element if the recipe has one scale per tensor.
          zero_point: the calibrated zero point, of the shape of `scale`.
          operand: the name of `x` in errors.

        Returns:
          A `QArray` of the shape of `x`.

        Raises:
          TypeError: `x` is no array of floats.
          ValueError: a static recipe is given no scale, or a dynamic one is given one; an axis
            does not exist; a tile does not divide the shard of a sharded array.
        """
        x = jnp.asarray(x)
        axes = [_axis(operand, axis, x.ndim) for axis in contracting]
        shared = [_axis(operand, axis, x.ndim) for axis in batch]
        sizes = self.tiles(x.shape, axes, shared)
        check_tiles_fit_shards(operand, x, sizes)
        self._check_given(operand, scale, zero_point)
        if scale is None:
            zero: Any = None if self.symmetric else True
            kind = {"scale_dtype": self.scale_dtype, "zero_point": zero}
            return quantize(x, self.dtype, tiled_axes=sizes, **kind)
        scale, zero_point = (_scalar_if_one(value) for value in (scale, zero_point))
        return quantize(x, self.dtype, scale=scale, zero_point=zero_point)

    def _check_given(self, operand: str, scale: Any, zero_point: Any) -> None:
        """Refuses a static recipe without a scale, and a dynamic one with a scale."""
        given = {"scale": scale is not None, "zero point": zero_point is not None}
        wanted = {"scale": self.static, "zero point": self.static and not self.symmetric}
        for name, is_given in given.items():
            if is_given == wanted[name]:
                continue
            if is_given:
                got, needs = "is given", "the recipe chooses it, or has none"
                remedy = "leave it out, or make the recipe with `static=True`"
            else:
                got, needs = "is missing", "a static recipe takes the one that calibration found"
                remedy = "pass it, or use a dynamic recipe such as `jaxfp8.FP8_DYNAMIC`"
            where = f"{name} of `{operand}`"
            raise ValueError(message("jaxfp8.Quantization", where, got, needs, remedy))


def _granularity(operation: str, granularity: Any) -> Granularity:
    """One of the granularities, a pair of tile sizes as a tuple."""
    if isinstance(granularity, str) and granularity in NAMES:
        return granularity  # type: ignore[return-value]
    if isinstance(granularity, Sequence) and not isinstance(granularity, str):
        sizes = [None if tile is None else as_index(tile) or 0 for tile in granularity]
        if len(sizes) == 2 and all(tile is None or tile > 0 for tile in sizes):
            return sizes[0], sizes[1]
    needs = f"one of {', '.join(map(repr, NAMES))} or a pair of tile sizes is needed"
    remedy = "write tiles as `(128, 128)`: along the contracted axis, along the free one"
    raise ValueError(message(operation, "`granularity`", f"is {shown(granularity)}", needs, remedy))


def _axis(operand: str, axis: int, rank: int) -> int:
    index = as_index(axis)
    if index is None or not -rank <= index < rank:
        got, needs = f"has {rank} axes", f"axis {axis!r} of it is named"
        remedy = "name axes that it has"
        raise ValueError(message("jaxfp8.Quantization", f"`{operand}`", got, needs, remedy))
    return index % rank


def _scalar_if_one(value: ArrayLike | None) -> Any:
    """A calibrated scale of one element as a scalar, whatever its shape."""
    if value is None or isinstance(value, int | float):
        return value
    value = jnp.asarray(value)
    return value.reshape(()) if value.size == 1 else value
