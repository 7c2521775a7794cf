"""From numbers to a `QArray` and back; docs/quantization.md states the numerics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.ops.quantize_call import quantize_tiles
from jaxfp8._call.reference.quantize_reference import codes_of, shifted, steps_of
from jaxfp8._value import checks, compat
from jaxfp8._value.dtypes import (
    E8M0,
    EIGHT_BIT,
    INT32,
    SCALE,
    WIDE_FLOAT,
    finite_range,
    is_float8,
    is_int8,
)
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray, adopt, check_qarray, check_shapes, scale_and_zero_point
from jaxfp8._value.scales import (
    Granularity,
    choose_scale,
    choose_zero_point,
    exponents,
    granularity,
    store_scale,
)
from jaxfp8._value.spec import Shape
from jaxfp8._value.tiles import map_tiles
from jaxfp8._value.transposed import TransposedArray

_NO_TILES: Mapping[int, int] = {}


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int] = _NO_TILES,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | bool | None = None,
    scale_dtype: DTypeLike = jnp.float32,
) -> QArray:
    """Holds `x` in 8 bits: `qvalue = saturate(round(x / scale) + zero_point)`.

    The values of a tile share a scale. Unless given, the scale is the least one without saturation
    of finite values in the tile: `max|x| / 448` (57344, 127) for a signed dtype. A tile of zeros
    has scale 1. Rounding is to nearest, ties to even, in float32, with the scale as stored. NaN
    stays NaN in FP8 and becomes 0 in int8 and uint8. Infinities become the largest finite value.
    Neither affects the choice of a scale.

    The codes have no gradient, since their derivative is 0 almost everywhere; the scale has one.
    `fake_quantize` is the straight-through alternative.

    Args:
      x: float32, bfloat16, float16 or float64 (rounded to float32 first), of any shape.
      dtype: float8_e4m3fn, float8_e5m2, int8 or uint8. Without a zero point, uint8 holds no
        negative value: negative values become 0.
      channelwise_axes: axes along which each index has its own scale.
      tiled_axes: size of the tile by axis; the last tile may be partial. An axis in neither
        argument is one tile. Axes may count from the end.
      scale: used instead of choosing one. An array keeps its dtype, and its shape says the tiles:
        () or the rank of `x`. A number becomes `scale_dtype`, and must be positive and finite
        there.
      zero_point: the integer code of 0, of shape () or the scale's; or True to choose one for the
        whole range of int8 or uint8. It has to be a code of `dtype`; only a Python number is
        checked. Here and in `scale`, 64-bit numbers become 32-bit, so x64 changes nothing.
      scale_dtype: float32, bfloat16, float16, or float8_e8m0fnu (powers of two, rounded up).

    Returns:
      A `QArray` of the shape of `x`.

    Raises:
      TypeError: an argument is of the wrong kind, a dtype is not listed above, or an FP8 dtype
        has a zero point.
      ValueError: axes, tiles and shapes contradict each other, or a number is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> quantize(jnp.ones((300, 8)), channelwise_axes=(1,), tiled_axes={0: 128})
      QArray(float8_e4m3fn[300,8], scale=float32[3,8], tiles=(128, None))
    """
    operation = "jaxfp8.quantize"
    x = _floats(operation, x)
    x = x if x.dtype in WIDE_FLOAT else x.astype(jnp.float32)
    axes = (channelwise_axes, tiled_axes)
    if _is_one_operation(x, scale, zero_point, scale_dtype, operation):
        dtype, grain = _grain(x, dtype, axes, operation)
        is_power = np.dtype(scale_dtype) == E8M0
        qvalue, chosen = quantize_tiles(x, dtype, grain.tiles, is_power)
        return QArray(qvalue, exponents(chosen) if is_power else chosen, tiles=grain.stated_tiles)
    x = x.astype(jnp.float32)
    q = _grid(x, dtype, axes, scale, zero_point, scale_dtype, operation)
    scales, zeros, tiles = scale_and_zero_point(q)
    # The gradient stops before the cast: the derivative of a cast to FP8 is rounded to FP8 itself.
    shared = jax.lax.stop_gradient(_present(scales, zeros))
    codes = functools.partial(codes_of, np.dtype(dtype))
    return dataclasses.replace(q, qvalue=map_tiles(codes, jax.lax.stop_gradient(x), shared, tiles))


def dequantize(
    q: QArray | TransposedArray | PreparedArray, dtype: DTypeLike | None = None
) -> jax.Array:
    """The float values of `q`: `(qvalue - zero_point) * scale`.

    The product is rounded once to float32, then to `dtype`. The gradient with respect to the scale
    is the exact one, `sum(cotangent * (qvalue - zero_point))` over its tile. An FP8 `qvalue` and a
    float8_e8m0fnu scale have none.

    Args:
      q: an array in 8 bits, prepared or not.
      dtype: float32, bfloat16 or float16; by default `q.dtype`.

    Returns:
      An array of the shape of `q`.

    Raises:
      TypeError: `q` is no valid `QArray`, or `dtype` is not listed above.
      ValueError: shapes of `q` contradict each other.

    Example:
      >>> import jax.numpy as jnp
      >>> dequantize(quantize(jnp.array([0.0, 1.0, 2.0], jnp.bfloat16)), jnp.bfloat16)
      Array([0, 1, 2], dtype=bfloat16)
    """
    operation = "jaxfp8.dequantize"
    if isinstance(q, PreparedArray):
        return dequantize(q.packed if q.is_whole else q.unprepare(), dtype)
    if isinstance(q, TransposedArray):
        return dequantize(q.stored, dtype).transpose(q.axes)
    held: Any = adopt(q)
    check_qarray(held, operation, "q")
    dtype = checks.as_dtype(operation, "dtype", held.dtype if dtype is None else dtype, WIDE_FLOAT)
    scales, zeros, tiles = scale_and_zero_point(held)
    values = jax.lax.stop_gradient(jnp.asarray(held.qvalue))
    return map_tiles(_values, values, _present(scales, zeros), tiles).astype(dtype)


def fake_quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int] = _NO_TILES,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | bool | None = None,
    scale_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """`dequantize(quantize(x, ...))` in the dtype of `x`, with the straight-through gradient.

    Rounding is differentiated as if it were the identity: the gradient of `x` is 1 if its code is
    in range and 0 if it saturates. A chosen scale is a constant. A given scale has the gradient
    `(code - zero_point) - x / scale` in range and `code - zero_point` if saturated (learned step
    sizes).

    `quantize` itself has no straight-through gradient: the cotangent of an FP8 array is FP8, and an
    integer array has none. Neither can carry a gradient through a `QArray`.

    Args:
      x: as for `quantize`, like all other arguments.
      dtype: the 8-bit dtype.
      channelwise_axes: axes along which each index has its own scale.
      tiled_axes: size of the tile by axis.
      scale: used instead of choosing one.
      zero_point: the integer code of 0, or True to choose one.
      scale_dtype: dtype of a chosen scale.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: as `quantize`.
      ValueError: as `quantize`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.grad(lambda x: fake_quantize(x).sum())(jnp.array([0.1, -3.0]))
      Array([1., 1.], dtype=float32)
    """
    operation = "jaxfp8.fake_quantize"
    x = _floats(operation, x)
    wide = x.astype(jnp.float32)
    axes = (channelwise_axes, tiled_axes)
    if _is_one_operation(x, scale, zero_point, scale_dtype, operation):
        dtype, grain = _grain(x, dtype, axes, operation)
        if dtype != np.uint8:
            values = x if x.dtype in WIDE_FLOAT else wide
            is_power = np.dtype(scale_dtype) == E8M0
            return _nearest_chosen(dtype, grain.tiles, is_power, values).astype(x.dtype)
    constant = jax.lax.stop_gradient(wide)
    q = _grid(constant, dtype, axes, scale, zero_point, scale_dtype, operation)
    scales, zeros, tiles = scale_and_zero_point(q)
    nearest = functools.partial(_nearest, np.dtype(dtype))
    y = map_tiles(nearest, wide, _present(scales, zeros), tiles)
    return y.astype(x.dtype)


def _is_one_operation(
    x: jax.Array,
    scale: ArrayLike | None,
    zero_point: ArrayLike | bool | None,
    scale_dtype: DTypeLike,
    operation: str,
) -> bool:
    """Whether the primitive does all of it: no zero point, and a scale that it can choose."""
    stored = checks.as_dtype(operation, "scale_dtype", scale_dtype, SCALE)
    symmetric = zero_point is None or zero_point is False
    return x.size > 0 and scale is None and symmetric and stored in (np.float32, E8M0)


def _grain(
    x: jax.Array,
    dtype: DTypeLike,
    axes: tuple[Collection[int], Mapping[int, int]],
    operation: str,
) -> tuple[np.dtype, Granularity]:
    """The requested dtype and tiles."""
    dtype = checks.as_dtype(operation, "dtype", dtype, EIGHT_BIT)
    return dtype, granularity(x.shape, checks.named_tiles(operation, x.ndim, *axes))


def _grid(
    x: jax.Array,
    dtype: DTypeLike,
    axes: tuple[Collection[int], Mapping[int, int]],
    scale: ArrayLike | None,
    zero_point: ArrayLike | bool | None,
    scale_dtype: DTypeLike,
    operation: str,
) -> QArray:
    """The scale and zero point of `x`, in a checked `QArray` without its codes."""
    dtype = checks.as_dtype(operation, "dtype", dtype, EIGHT_BIT)
    scale_dtype = checks.as_dtype(operation, "scale_dtype", scale_dtype, SCALE)
    named = checks.named_tiles(operation, x.ndim, *axes)
    grain = granularity(x.shape, named)
    given = None if scale is None else _scale(operation, scale, scale_dtype)
    choose_zero = zero_point is True
    zero = _zero_point(operation, zero_point, dtype)
    unknown: Any = jax.ShapeDtypeStruct  # in place of a leaf with a known shape and dtype
    q = QArray(
        unknown(x.shape, dtype),
        unknown(grain.counts, scale_dtype) if given is None else given,
        unknown((), INT32) if choose_zero else zero,
        tiles=grain.stated_tiles,
    )
    check_shapes(q, operation, "x")
    if given is None:
        given = store_scale(choose_scale(x, grain, dtype, zero, choose_zero), scale_dtype)
        q = dataclasses.replace(q, scale=given)
    elif named:
        _check_agreement(q, grain, operation)
    if choose_zero:
        counts = q.scale.shape or (1,) * q.ndim
        of_scale = Granularity(shape=q.shape, tiles=q.tile_sizes, counts=counts)
        zero = choose_zero_point(x, of_scale, dtype, given.astype(jnp.float32))
    return dataclasses.replace(q, zero_point=zero)


def _zero_point(
    operation: str, zero_point: ArrayLike | bool | None, dtype: np.dtype
) -> jax.Array | None:
    """A given zero point as an array; None for True, False and None."""
    if zero_point is None or isinstance(zero_point, bool):
        return None
    if isinstance(zero_point, int | np.integer) and is_int8(dtype):
        checks.check_zero_point_number(operation, int(zero_point), dtype)
    return checks.narrow(checks.as_array(operation, "zero_point", zero_point))


def _floats(operation: str, x: ArrayLike) -> jax.Array:
    """`x` as an array of floats."""
    if isinstance(x, QArray):
        needs, remedy = "an array of floats is needed", "use `jaxfp8.dequantize` first"
        raise TypeError(message(operation, "`x`", "is a QArray already", needs, remedy))
    x = checks.as_array(operation, "x", x)
    checks.as_dtype(operation, "x", x.dtype, (*WIDE_FLOAT, checks.FLOAT64))
    return x


def _scale(operation: str, scale: ArrayLike, scale_dtype: np.dtype) -> jax.Array:
    """A given scale: a number in `scale_dtype`, an array in its own dtype."""
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        return checks.narrow(checks.as_array(operation, "scale", scale))
    checks.check_scale_number(operation, scale, scale_dtype)
    if scale_dtype not in WIDE_FLOAT:
        return store_scale(jnp.float32(scale), scale_dtype)
    return jnp.asarray(np.float32(scale).astype(scale_dtype))


def _check_agreement(q: QArray, grain: Granularity, operation: str) -> None:
    """A given scale and named axes must mean the same tiles."""
    if q.scale.shape not in (grain.counts, () if math.prod(grain.counts) == 1 else None):
        got = f"has shape {q.scale.shape}"
        needs = f"the axes named for `x` of shape {q.shape} need {grain.counts}"
        remedy = "name no axes, so that the scale says the tiles"
        raise ValueError(message(operation, "`scale`", got, needs, remedy))


def _present(*shared: jax.Array | None) -> list[jax.Array]:
    """Scale and, if there is one, zero point."""
    return [s for s in shared if s is not None]


def _values(codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None) -> jax.Array:
    """The values of codes, in float32."""
    if zero_point is not None:
        codes = codes.astype(jnp.int32) - zero_point
    return codes.astype(jnp.float32) * scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _nearest(
    dtype: np.dtype, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None
) -> jax.Array:
    """`x` quantized and dequantized, with the straight-through gradient."""
    return _values(codes_of(dtype, x, scale, zero_point), scale, zero_point)


@_nearest.defjvp
def _nearest_jvp(
    dtype: np.dtype, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """The derivative of `scale * rounded`, as if `rounded` were `x / scale` in range, else 0.

    The value calls `_nearest` again, so second derivatives follow the same rule. `slope` is a
    constant to them.
    """
    dx, dscale, _ = tangents
    x, scale, zero_point = (jax.lax.stop_gradient(p) for p in primals)
    codes = codes_of(dtype, x, scale, zero_point)
    rounded = _values(codes, jnp.ones_like(scale), zero_point)
    steps = steps_of(x, scale)
    inside = _in_range(dtype, shifted(steps, zero_point))
    slope = rounded - jnp.where(inside, steps, 0)
    return _nearest(dtype, *primals), jnp.where(inside, dx, 0) + slope * dscale


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _nearest_chosen(dtype: np.dtype, tiles: Shape, power_of_two: bool, x: jax.Array) -> jax.Array:
    """`x` quantized with chosen scales and dequantized, in float32."""
    codes, scale = quantize_tiles(x, dtype, tiles, power_of_two)
    return compat.laid_out_like(map_tiles(_values, codes, [scale], tiles), jax.typeof(x))


@_nearest_chosen.defjvp
def _nearest_chosen_jvp(
    dtype: np.dtype,
    tiles: Shape,
    power_of_two: bool,
    primals: tuple[Any],
    tangents: tuple[Any],
) -> tuple[jax.Array, jax.Array]:
    """The derivative: with a chosen scale only infinities saturate."""
    (x,), (dx,) = primals, tangents
    inside = jnp.isfinite(jax.lax.stop_gradient(x))
    return _nearest_chosen(dtype, tiles, power_of_two, x), jnp.where(inside, dx, 0).astype(
        jnp.float32
    )


def _in_range(dtype: np.dtype, steps: jax.Array) -> jax.Array:
    """Whether a number rounds to a code without saturating: up to half a step past the ends."""
    lowest, highest = finite_range(dtype)
    step = 1.0
    if is_float8(dtype):
        step = 2.0 ** (math.frexp(highest)[1] - 1) * float(jnp.finfo(dtype).eps)
    return (steps >= lowest - step / 2) & (steps <= highest + step / 2)
