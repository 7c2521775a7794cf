"""The public products: arguments are checked, then one scaled dot is bound."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._ops import einsum as _einsum
from jaxfp8._ops.dimensions import check_matmul, normalise
from jaxfp8._ops.epilogue import Epilogue, choose_out_dtype, prepare
from jaxfp8._ops.int8_compute import check_compute, int8_dot
from jaxfp8._ops.operands import Operand, PreparedSide, Side, as_sides, with_needed_sums
from jaxfp8._ops.prepared_dot import check_summed, prepared_dot
from jaxfp8._value import checks, compat, dtypes
from jaxfp8._value.operators import set_matmul
from jaxfp8._value.prepared import PreparedArray, check_prepared
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import DimensionNumbers, EpilogueSpec, ScaledDotSpec, Shape

Product = Any  # Array | QArray, or a pair of it and the amax


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    out_scale: ArrayLike | None = None,
    return_amax: bool = False,
    compute: str | None = None,
) -> Product:
    """General dot product of 8-bit operands, computed on the 8-bit data.

    `y = activation(sum_k (lhs_q - lhs_z) lhs_s (rhs_q - rhs_z) rhs_s + residual + bias)`

    Sums are in float32, or exact in int32 if both sides are integers. Scales, residual and bias
    follow in float32 or better, and one rounding gives the output dtype. Scales multiply the sum,
    not its terms. An infinite scale therefore gives NaN for a sum of 0, else an infinity with the
    sign of the sum. The equation, and XLA without a kernel, scale the terms: they give NaN if a
    code is 0 or terms differ in sign.

    Args:
      lhs, rhs: `QArray`s and transposed views of them (`q.T`), unscaled 8-bit arrays
        (float8_e4m3fn, float8_e5m2, int8, uint8), or on one side an array of float32, bfloat16 or
        float16; `rhs` may be a `PreparedArray`.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))` as in
        `jax.lax.dot_general`; the output has the batch axes, then the free axes of lhs, of rhs.
      precision: DEFAULT lets a device accumulate FP8 fast, HIGHEST asks for full float32.
      preferred_element_type: output dtype: float32, bfloat16, float16; int32 for two integer
        sides without scales; or, together with `out_scale`, float8_e4m3fn, float8_e5m2, int8 or
        uint8. Default: the float side's dtype, else that of the scales.
      out_sharding: sharding of the output, as of `jax.lax.dot_general`.
      bias: array to broadcast over the last output axes.
      residual: array of the output's shape, or one to broadcast to it.
      activation: None, "relu", "gelu_tanh", "gelu_erf" or "silu".
      out_scale: the scale of an 8-bit output, `q = saturate(y / out_scale)`: a scalar, or an
        array that broadcasts over the last output axes.
      return_amax: whether to return `(result, amax)`, amax the float32 maximum of `|y|` before
        `out_scale`.
      compute: None multiplies operands as stored. "int8" rounds an FP8 or float operand once more,
        to int8 with a scale for each line of a sum, `round(x / s)` with `s = max |x| / 127`, and
        sums exactly in int32: for devices with int8 faster than FP8. It costs accuracy. The
        relative error from normal FP8 weights grows from .026 to .0275 at K = 4096 (.029 with the
        activations rounded), and with one weight in a thousand 20 times larger from .025 to .062.
        NaN counts as 0, an infinity as the largest finite value of its line. Derivatives ignore
        this rounding.

    Returns:
      The product, a `QArray` for an 8-bit output dtype; with `return_amax` a pair.

    Raises:
      TypeError: an operand or the output dtype is not listed above.
      ValueError: shapes do not fit, the activation is unknown, an int32 sum may overflow, or
        `compute` meets integers with scales that change along a contracted axis.
      UnsupportedError: inside `jaxfp8.strict()`, if no kernel takes the product.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.eye(4) * 448, channelwise_axes=(1,))
      >>> y = jaxfp8.dot_general(
      ...     jnp.arange(4.0)[None], w, (((1,), (0,)), ((), ())), bias=jnp.ones(4)
      ... )
      >>> y.tolist()
      [[1.0, 449.0, 897.0, 1345.0]]
    """
    operation = "jaxfp8.dot_general"
    epilogue = Epilogue(bias, residual, activation, out_scale, return_amax)
    sides = _sides(operation, lhs, rhs, compute)
    shapes = (sides[0].shape, sides[1].shape)
    numbers = normalise(operation, dimension_numbers, shapes)
    asked = _Asked(operation, precision, preferred_element_type, out_sharding, compute)
    return _product(asked, sides, numbers, epilogue)


def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    out_scale: ArrayLike | None = None,
    return_amax: bool = False,
    out_sharding: Any = None,
    compute: str | None = None,
) -> Product:
    """Matrix product of 8-bit operands with the shapes of `jax.numpy.matmul`.

    Leading axes broadcast. A side without them is shared by the batch and not copied. A side of
    rank 1 is a row (lhs) or a column (rhs), and its axis is dropped from the output.

    Args:
      lhs: (..., M, K) or (K,).
      rhs: (..., K, N) or (K,).
      precision, preferred_element_type: as in `dot_general`.
      bias, residual, activation, out_scale, return_amax, out_sharding, compute: as in
        `dot_general`.

    Returns:
      As `dot_general`, of shape (..., M, N).

    Raises:
      TypeError: as `dot_general`.
      ValueError: an operand has rank 0, or as `dot_general`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.full((3, 2), 5.0), jnp.int8)
      >>> jaxfp8.matmul(jnp.ones((4, 3), jnp.bfloat16), w).shape
      (4, 2)
    """
    operation = "jaxfp8.matmul"
    epilogue = Epilogue(bias, residual, activation, out_scale, return_amax)
    sides = _sides(operation, lhs, rhs, compute)
    check_matmul(operation, sides[0].shape, sides[1].shape)
    batch_ranks = [max(len(side.shape) - 2, 0) for side in sides]
    rank = max(batch_ranks)
    lhs_side, rhs_side = (
        side.prepend(rank - own) for side, own in zip(sides, batch_ranks, strict=True)
    )
    batch = tuple(range(rank))
    numbers = (((len(lhs_side.shape) - 1,), (rank,)), (batch, batch))
    asked = _Asked(operation, precision, preferred_element_type, out_sharding, compute)
    return _product(asked, (lhs_side, rhs_side), numbers, epilogue)


def einsum(
    subscripts: str,
    lhs: Operand,
    rhs: Operand,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    out_scale: ArrayLike | None = None,
    return_amax: bool = False,
    out_sharding: Any = None,
    compute: str | None = None,
) -> Product:
    """Einstein sum of two operands, computed on the 8-bit data of one or both.

    Args:
      subscripts: as in `jax.numpy.einsum`, for two operands, without diagonals and without sums
        over an axis of one operand alone; `...` stands for equal or broadcast leading axes.
      lhs, rhs: as in `dot_general`.
      precision, preferred_element_type: as in `dot_general`.
      bias, residual, activation, out_scale, return_amax, out_sharding, compute: as in
        `dot_general`; arrays align with the output of the einsum.

    Returns:
      As `dot_general`, with the axes named by `subscripts`.

    Raises:
      TypeError: as `dot_general`.
      ValueError: the subscripts are not one dot, or as `dot_general`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.ones((2, 3, 8)), channelwise_axes=(0, 1))
      >>> jaxfp8.einsum("btd,hkd->bhtk", jnp.ones((5, 7, 8)), w).shape
      (5, 2, 7, 3)
    """
    operation = "jaxfp8.einsum"
    epilogue = Epilogue(bias, residual, activation, out_scale, return_amax)
    sides = _sides(operation, lhs, rhs, compute)
    shapes = (sides[0].shape, sides[1].shape)
    parsed = _einsum.parse(operation, subscripts, *shapes, broadcast=True)
    asked = _Asked(operation, precision, preferred_element_type, out_sharding, compute)
    return _product(asked, sides, parsed.numbers, epilogue, parsed.order)


set_matmul(matmul)


def _sides(operation: str, lhs: Operand, rhs: Operand, compute: str | None) -> tuple[Side, Side]:
    """Both operands; a packed one is unpacked if `compute` rounds it once more."""
    if check_compute(operation, compute) is not None and isinstance(rhs, PreparedArray):
        check_prepared(rhs, operation, "rhs")
        rhs = rhs.packed if rhs.is_whole else rhs.unprepare()
    return as_sides(operation, lhs, rhs)


class _Asked(NamedTuple):
    """The operation, and how the user wants its product."""

    operation: str
    precision: Any
    preferred_element_type: DTypeLike | None
    out_sharding: Any
    compute: str | None


def _product(
    asked: _Asked,
    sides: tuple[Side, Side],
    numbers: DimensionNumbers,
    epilogue: Epilogue,
    order: Shape | None = None,
) -> Product:
    """Binds the scaled dot; axis `order[i]` of the dot becomes output axis `i`."""
    operation, precision, preferred_element_type, out_sharding, compute = asked
    (contracting, batch) = numbers
    check_summed(operation, sides[1], tuple(contracting[1]))
    lhs, rhs = with_needed_sums(
        *(side.spec(tuple(contracting[i]), tuple(batch[i])) for i, side in enumerate(sides))
    )
    dtype = choose_out_dtype(operation, epilogue, preferred_element_type, sides, lhs.depth)
    bare = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype=dtype.name))
    order = tuple(range(len(bare.out_shape))) if order is None else order
    order = _of_stored(sides, numbers, order)
    out_shape = tuple(bare.out_shape[axis] for axis in order)
    after = prepare(operation, epilogue, out_shape, order, dtype)
    spec = dataclasses.replace(
        bare, epilogue=after.spec, precision=checks.as_precision(operation, precision)
    )
    values: dict[str, Any] = {**sides[0].operands("lhs"), **sides[1].operands("rhs")}
    values |= after.operands
    sharding = compat.reordered(out_sharding, order)
    if compute is not None:
        out, amax = int8_dot(operation, spec, values, sharding)
    elif isinstance(sides[1], PreparedSide):
        out, amax = prepared_dot(operation, sides[1], spec, values, sharding)
    else:
        out, amax = scaled_dot(spec, **values, out_sharding=sharding)
    y: Product = compat.sharded(out.transpose(order), out_sharding)
    if dtypes.is_eight_bit(dtype):
        y = QArray(dtypes.bits_as(y, dtype), after.operands["out_scale"].transpose(order))
    return y if amax is None else (y, amax.reshape(()))


def _of_stored(sides: tuple[Side, Side], numbers: DimensionNumbers, order: Shape) -> Shape:
    """The order of an output's axes, from axes as the user knows them to those of the dot."""
    (contracting, batch) = numbers
    places = list(range(len(batch[0])))
    for side, summed, shared in zip(sides, contracting, batch, strict=True):
        first = len(places)
        places += [first + place for place in side.free_order(tuple(summed), tuple(shared))]
    return tuple(places[axis] for axis in order)
