"""`split_dot`: a float product as exact int8 products of the operands' terms (Ozaki's scheme).

    x = 2^-p sum_t 256^(terms - 1 - t) x_t      x_t int8, p for each line of the contracted axes
    y = 2^-(p_x + p_y) sum_(s + t <= terms) 256^(2 terms - 2 - s - t) sum_k x_s y_t

A line is scaled by a power of two and rounded to integers of 8 * terms bits. Their balanced digits
in base 256 are the terms. Products of terms are exact in int32. Those of equal weight are one
product along (term, k), since one operand has its terms in reverse.

Source: K. Ozaki, T. Ogita, S. Oishi and S. M. Rump, "Error-free transformations of matrix
multiplication by using fast routines of matrix multiplication and its applications" (2012), with
integers as in H. Ootomo, K. Ozaki and R. Yokota, "DGEMM on integer matrix multiplication unit"
(2024).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.mesh import explicit
from jaxfp8._call.ops import remat
from jaxfp8._ops import dimensions
from jaxfp8._ops.dimensions import check_matmul, free_axes, in_order, normalise
from jaxfp8._ops.products import dot_general
from jaxfp8._value import compat
from jaxfp8._value.checks import as_dtype, as_floats, as_index
from jaxfp8._value.dtypes import WIDE_FLOAT
from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import DimensionNumbers, Shape

OPERATION = "jaxfp8.split_dot"
MAX_TERMS = 4  # an integer of 32 bits
_EXACT_SUM = 2**17 - 2**10  # so many products of int8, and a carry, fit an int32


def split_dot(
    x: ArrayLike,
    y: ArrayLike,
    dimension_numbers: DimensionNumbers | None = None,
    *,
    terms: int = 3,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """A product of float arrays, computed by int8 products of their terms.

    With 3 terms the result is about as accurate as a float32 product, with 4 more accurate. One
    term is INT8 with a power of two as the scale of each line (row of `x`, column of `y`). Terms
    are those of a whole line: values much smaller than its largest keep fewer bits. The error of
    an element, before it is rounded to the output dtype, is at most

        2^(2.3 - 8 terms) K max_k |x_k| max_k |y_k| + 2^-21 sum_k |x_k y_k|

    if neither operands nor results are below 2^-126; float32 may flush smaller ones to zero. The
    second part is only 2^-22 of the sum itself, even if large products cancel, unless K times
    `terms` exceeds 130 048: then the sum is cut in two.

    1 to 4 terms cost as much as 1, 4, 8 or 13 products in int8. A line with an infinity or NaN
    gives NaN.

    Derivatives of any order, forward and backward, are computed in as many terms.

    Args:
      x, y: float32, bfloat16 or float16.
      dimension_numbers: as in `jax.lax.dot_general`; by default the product of matrices, (M, K) and
        (K, N), or of equally many matrices, (..., M, K) and (..., K, N).
      terms: number of int8 terms of each operand, 1 to 4.
      preferred_element_type: output dtype; by default the promoted dtype of both.
      out_sharding: sharding of the output, as of `jax.lax.dot_general`.

    Returns:
      The product, with the axes of `jax.lax.dot_general`.

    Raises:
      TypeError: an operand is no array of these dtypes.
      ValueError: shapes do not fit, or `terms` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> x, y = jax.random.normal(jax.random.key(0), (2, 64, 64))
      >>> exact = jnp.matmul(x, y, precision="highest")
      >>> bool(abs(jaxfp8.split_dot(x, y) - exact).max() < 1e-4)
      True
    """
    x, y = (as_floats(OPERATION, name, value) for name, value in (("x", x), ("y", y)))
    count = checked_terms(OPERATION, terms)
    if dimension_numbers is None:
        dimension_numbers = _of_matrices(x, y)
    numbers = normalise(OPERATION, dimension_numbers, (x.shape, y.shape))
    dtype = jnp.promote_types(x.dtype, y.dtype)
    if preferred_element_type is not None:
        dtype = as_dtype(OPERATION, "preferred_element_type", preferred_element_type, WIDE_FLOAT)
    wide = compat.vary_alike([value.astype(jnp.float32) for value in (x, y)])
    rank = x.ndim + y.ndim - 2 * len(numbers[0][0]) - len(numbers[1][0])
    sharding = compat.explicit_spec(out_sharding, rank)
    out: jax.Array = split_dot_p.bind(*wide, numbers=numbers, terms=count, out_sharding=sharding)
    return compat.sharded(out.astype(dtype), out_sharding)


def checked_terms(operation: str, terms: Any) -> int:
    """A number of terms allowed for an operand."""
    count = as_index(terms)
    if count is None or not 1 <= count <= MAX_TERMS:
        got, needs = f"is {shown(terms)}", f"1 to {MAX_TERMS} terms make an operand"
        remedy = "3 terms are as accurate as float32"
        raise ValueError(message(operation, "`terms`", got, needs, remedy))
    return count


def _of_matrices(x: jax.Array, y: jax.Array) -> DimensionNumbers:
    """The dimension numbers of a product of matrices, or of equally many of them."""
    if x.ndim != y.ndim or x.ndim < 2 or x.shape[:-2] != y.shape[:-2]:
        got = f"have shapes {x.shape} and {y.shape}"
        needs = "equal leading axes and a rank of at least 2 are needed"
        remedy = "give `dimension_numbers` as to `jax.lax.dot_general`"
        raise ValueError(message(OPERATION, "`x` and `y`", got, needs, remedy))
    check_matmul(OPERATION, x.shape, y.shape)
    batch = tuple(range(x.ndim - 2))
    return ((x.ndim - 1,), (y.ndim - 2,)), (batch, batch)


split_dot_p = Primitive("split_dot")


def _product(
    x: jax.Array, y: jax.Array, *, numbers: DimensionNumbers, terms: int, out_sharding: Any
) -> jax.Array:
    """The product in float32 of float32 operands."""
    (x_axes, y_axes), _ = numbers
    count = math.prod(x.shape[axis] for axis in x_axes)
    if not x_axes or 0 in (*x.shape, *y.shape):
        highest = lax.Precision.HIGHEST
        return lax.dot_general(x, y, numbers, highest, out_sharding=out_sharding)
    if count * terms > _EXACT_SUM:
        return _in_two(x, y, numbers=numbers, terms=terms, out_sharding=out_sharding)
    x_terms, x_power, x_finite = _split(x, x_axes, terms)
    y_terms, y_power, y_finite = _split(y, y_axes, terms)
    with_terms = _numbers_with_terms(numbers)
    digits, carry = [], jnp.int32(0)
    for weight in reversed(range(min(terms + 1, 2 * terms - 1))):  # from the smallest on
        first, last = max(0, weight - terms + 1), min(weight, terms - 1)
        exact = carry + dot_general(
            jnp.stack(x_terms[first : last + 1], axis=x_axes[0]),
            jnp.stack(y_terms[weight - last : weight - first + 1][::-1], axis=y_axes[0]),
            with_terms,
            preferred_element_type=jnp.int32,
            out_sharding=out_sharding,
        )
        digit, carry = _digit(exact)
        digits.append(digit)
    total = _float_of([*digits[:-1], exact])
    of_output = _lines(numbers, x.ndim, y.ndim, total)
    power = of_output(x_power, y_power, jnp.add) - 16 * (terms - 1)
    finite = of_output(x_finite, y_finite, jnp.logical_and)
    return jnp.where(finite, _times_power_of_two(total, -power), jnp.nan)


def _digit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last balanced digit of integers in base 256, and the rest."""
    digit = ((x + 128) & 255) - 128
    return digit, (x - digit) >> 8


def _float_of(digits: Sequence[jax.Array]) -> jax.Array:
    """The sum of int32 `digits` in base 256, the most significant last.

    All but the last are balanced, so a sum has no large digits if large terms cancel. Its error is
    then at most 2^-22 of itself.
    """
    *small, large = digits
    fraction = jnp.float32(0)
    for digit in small:
        fraction = (fraction + digit.astype(jnp.float32)) / 256
    upper = (large + (1 << 15)) >> 16  # both parts are exact in float32
    lower = (large - (upper << 16)).astype(jnp.float32)
    return upper.astype(jnp.float32) * 65536 + (lower + fraction)


def _in_two(x: jax.Array, y: jax.Array, *, numbers: DimensionNumbers, **params: Any) -> jax.Array:
    """The product as a sum of two, each of half of the longest contracted axis."""
    pairs = zip(*numbers[0], strict=True)
    x_axis, y_axis = max(pairs, key=lambda pair: x.shape[pair[0]])
    half, size = x.shape[x_axis] // 2, x.shape[x_axis]
    parts = [
        _product(
            lax.slice_in_dim(x, *ends, axis=x_axis),
            lax.slice_in_dim(y, *ends, axis=y_axis),
            numbers=numbers,
            **params,
        )
        for ends in ((0, half), (half, size))
    ]
    return parts[0] + parts[1]


def _split(
    x: jax.Array, contracting: Shape, terms: int
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The int8 terms of a float32 operand, the most significant first.

    Returns:
      The terms, each line's factor as a power of two, and whether a line is finite.
    """
    amax = jnp.max(jnp.abs(x), axis=contracting, keepdims=True)
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    # The largest value becomes at most 0.99 * 2^(8 * terms - 1), so its first digit fits.
    near_two = (bits & 0x7FFFFF) > int(0.98 * 2**23)
    power = 8 * terms - 1 - ((bits >> 23) - 126 + near_two)
    whole = jnp.round(_times_power_of_two(x, power)).astype(jnp.int32)
    digits = []
    for _ in range(terms - 1):
        digit, whole = _digit(whole)
        digits.append(digit.astype(jnp.int8))
    digits.append(whole.astype(jnp.int8))
    finite = jnp.isfinite(amax)
    return digits[::-1], jnp.squeeze(power, contracting), jnp.squeeze(finite, contracting)


def _times_power_of_two(x: jax.Array, power: jax.Array) -> jax.Array:
    """`x * 2^power`, in two steps, since one factor may be beyond float32."""
    half = power >> 1
    for part in (half, power - half):
        biased = jnp.clip(part, -126, 127) + 127
        x = x * lax.bitcast_convert_type(biased << 23, jnp.float32)
    return x


def _numbers_with_terms(numbers: DimensionNumbers) -> DimensionNumbers:
    """The dimension numbers of operands with terms stacked before a contracted axis."""
    contracting, batch = numbers
    places = [axes[0] for axes in contracting]

    def moved(axes: Shape, place: int) -> Shape:
        return tuple(axis + (axis >= place) for axis in axes)

    (x_axes, y_axes), (x_batch, y_batch) = (
        tuple(moved(axes, place) for axes, place in zip(pair, places, strict=True))
        for pair in (contracting, batch)
    )
    return ((places[0], *x_axes), (places[1], *y_axes)), (x_batch, y_batch)


def _lines(
    numbers: DimensionNumbers, x_rank: int, y_rank: int, like: jax.Array
) -> Callable[..., jax.Array]:
    """How a number of each line of `x` and one of each line of `y` meet in an output like `like`.

    The output and an operand may be split along different axes by one mesh axis.
    """
    contracting, batch = numbers
    ranks = (x_rank, y_rank)
    x_free, y_free = (free_axes(*of) for of in zip(ranks, contracting, batch, strict=True))

    def of_output(line: jax.Array, side: int) -> jax.Array:
        kept = [axis for axis in range(ranks[side]) if axis not in contracting[side]]
        order = (*batch[side], *(x_free, y_free)[side])
        return line.transpose([kept.index(axis) for axis in order])

    def meet(x: jax.Array, y: jax.Array, combine: Callable[..., jax.Array]) -> jax.Array:
        x = jnp.expand_dims(of_output(x, 0), range(x.ndim, x.ndim + len(y_free)))
        start = len(batch[1])
        y = jnp.expand_dims(of_output(y, 1), range(start, start + len(x_free)))
        return combine(compat.laid_along(x, like), compat.laid_along(y, like))

    return meet


@split_dot_p.def_abstract_eval
def _abstract_eval(
    x: Any, y: Any, *, numbers: DimensionNumbers, terms: int, out_sharding: Any
) -> Any:
    """JAX's type of the product of floats."""
    del terms
    mesh = explicit.mesh_of((x, y))
    asked = None if mesh is None or out_sharding is None else NamedSharding(mesh, out_sharding)
    aval, _ = lax.dot_general_p.abstract_eval(
        x,
        y,
        dimension_numbers=numbers,
        precision=None,
        preferred_element_type=jnp.dtype(jnp.float32),
        out_sharding=asked,
    )
    return aval


def _transpose(side: int, ct: jax.Array, other: jax.Array, like: Any, **params: Any) -> jax.Array:
    """The product of a cotangent and the other operand, in the layout of operand `side`."""
    numbers = params.pop("numbers")
    del params["out_sharding"]
    ranks = (len(like.shape), other.ndim) if side == 0 else (other.ndim, len(like.shape))
    of_gradient, order = dimensions.of_gradient(numbers, ranks, side)
    sharding = explicit.permuted(like, order, jax.typeof(ct), jax.typeof(other))
    operands = (ct, other) if side == 0 else (other, ct)
    out = split_dot_p.bind(*operands, numbers=of_gradient, out_sharding=sharding, **params)
    return in_order(out, order)


def _batch(
    operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
    """A mapped axis of both operands becomes a batch axis, of one operand a free axis."""
    contracting, batch = params["numbers"]
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    shift = [int(axis is not None) for axis in axes]
    pairs = [
        tuple(tuple(a + by for a in own) for own, by in zip(pair, shift, strict=True))
        for pair in (contracting, batch)
    ]
    place = 0
    if all(shift):
        pairs[1] = tuple((0, *own) for own in pairs[1])
    else:
        x_free = free_axes(operands[0].ndim - shift[0], contracting[0], batch[0])
        place = len(batch[0]) + (0 if shift[0] else len(x_free))
    sharding = params["out_sharding"]
    if sharding is not None:
        mapped = explicit.splits_mapped(operands, axes) or None
        sharding = PartitionSpec(*sharding[:place], mapped, *sharding[place:])
    params |= {"numbers": tuple(pairs), "out_sharding": sharding}
    return split_dot_p.bind(*moved, **params), place


def _lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
    mesh = explicit.mesh_of((*ctx.avals_in, *ctx.avals_out))

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            return _product(x, y, **params)

    return mlir.lower_fun(product, multiple_results=False)(ctx, x, y)


split_dot_p.def_impl(jax.jit(_product, static_argnames=("numbers", "terms", "out_sharding")))
ad.defbilinear(
    split_dot_p,
    lambda ct, x, y, **params: _transpose(0, ct, y, x.aval, **params),
    lambda ct, x, y, **params: _transpose(1, ct, x, y.aval, **params),
)
batching.primitive_batchers[split_dot_p] = _batch
remat.count_as_dots(
    split_dot_p, lambda x, y, *, numbers, **_: [remat.dot(x, y, numbers, jnp.float32)]
)
mlir.register_lowering(split_dot_p, _lower)
