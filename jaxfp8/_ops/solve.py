"""`solve`: linear systems factored in few bits, and corrected until the solution is accurate.

    A = R a C           R, C diagonal, powers of two
    A = P L U           updates A22 - L21 U12 in int8 terms or 16 bits
    y = y + (LU)^-1 P^T (R b - A y)         until the correction is below the last bit of y
    x = C y

All but a share of 1 / blocks of the operations of a factorisation are products of panels. They
decide its time and its accuracy. The factorisation only preconditions. The residual decides the
accuracy of the solution: it is computed in float64 if `a` is float64, else by `split_dot` with four
terms, as one product of [A b] and [-y 1]. Its large terms cancel exactly in integer sums.

Source: J. Wilkinson, "Rounding errors in algebraic processes" (1963); E. Carson and N. Higham,
"Accelerating the solution of linear systems by iterative refinement in three precisions" (2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.terms import checked_terms, split_dot
from jaxfp8._value import checks
from jaxfp8._value.checks import as_dtype, as_index
from jaxfp8._value.dtypes import WIDE_FLOAT
from jaxfp8._value.errors import message, shown

OPERATION = "jaxfp8.solve"
# Columns of a panel, and the most panels: each is a part of the compiled program.
_BLOCK, _MOST_BLOCKS = 256, 16
_FLOATS = (*WIDE_FLOAT, checks.FLOAT64)
# A good solution stops improving once a correction is this much of the last one.
_STALLED = 0.9
# A solution has no correct digits if a correction changes more than this share of it.
_SETTLED = 0.01
# Rows and columns are scaled by at most this power of two; float32 holds it.
_MOST_EXPONENT = 120
# 1 stands beside x in a line of the residual, and b / x beside a. Entries of b / x are larger than
# those of a, so x is scaled to be this much smaller than 1.
_ROOM = 5


class Solution(NamedTuple):
    """The solution of a linear system.

    Attributes:
      x: the solution, of the shape of `b`.
      residual: `b - a x`, as computed.
      backward_error: `|b - a x| / (|a| |x| + |b|)` in the maximum norm, of the worst column: the
        relative change of `a` and `b` to make `x` exact. Rows and columns are scaled first.
      steps: the number of corrections.
      converged: whether the backward error is at most `tol`, and the last correction at most 1 % of
        `x`.
    """

    x: jax.Array
    residual: jax.Array
    backward_error: jax.Array
    steps: jax.Array
    converged: jax.Array


def solve(
    a: ArrayLike,
    b: ArrayLike,
    *,
    terms: int = 3,
    dtype: DTypeLike | None = None,
    tol: float | None = None,
    max_steps: int = 100,
) -> Solution:
    """Solves `a x = b` by a factorisation in few bits and iterative refinement.

    `a` is factored with products of `terms` int8 terms, or in `dtype`, and the solution corrected
    until its last bits settle. This converges if the condition number of `a` times the error of
    these products is well below 1. With singular values in geometric progression it did up to

        rows   panels   1 term   bfloat16   2 terms   3 terms   float32
         256   of 64      3e1      3e2        1e5       1e7       1e7
        1024   of 256      -       1e2        3e4       1e7       1e7

    Panels have 256 columns, so a smaller matrix is factored in float32.

    If a correction leaves at most a quarter of the error, a float32 solution has at the end

        max |x - exact| / max |exact|  <=  2^-22 + 2^-28 (1 + (N + K) / 10) |a^-1| max(16, |a|)

    in the norm of the largest row sum, with rows and columns scaled by powers of two to largest
    values near 1. The bound holds for the worst roundings. They average out: measured errors were
    about `2^-25 + 2^-31 cond(a)`, and for direct float32 solutions several `2^-24 cond(a)`. A
    float64 solution (`jax_enable_x64`) is as accurate as a direct one in float64. The work is one
    factorisation in few bits, and for each step two triangular solutions in float32 and a product
    with `a`. It pays if int8 or 16 bits are many times faster than the dtype of `a`; on a CPU they
    are not.

    Inside `jit`, look at `converged`; outside, it is an error if it is False. For several systems,
    use `jax.vmap`. It is differentiated as the solution of a linear system. `converged` and the
    errors are about the solution. An unsettled gradient is not reported.

    Args:
      a: [N, N], float32 or float64; 16-bit floats become float32.
      b: [N] or [N, K], likewise; both are promoted to one dtype.
      terms: number of int8 terms of the products of the factorisation, 1 to 4.
      dtype: float32, bfloat16 or float16: computes these products in it instead.
      tol: the backward error of a converged solution; by default `sqrt(N)` times the unit roundoff
        of the result, 2^-24 for float32.
      max_steps: the most corrections.

    Returns:
      A `Solution`: `x`, its residual, backward error and number of corrections.

    Raises:
      TypeError: an operand is no array of floats.
      ValueError: shapes do not fit, or an argument is out of range.
      numpy.linalg.LinAlgError: outside `jit`, `a` is singular, or refinement does not converge.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> a = jax.random.normal(jax.random.key(0), (64, 64)) + 8 * jnp.eye(64)
      >>> solution = jaxfp8.solve(a, a @ jnp.ones(64))
      >>> bool(solution.converged), bool(abs(solution.x - 1).max() < 1e-5)
      (True, True)
    """
    a, b = _operands(a, b)
    products = _products(terms, dtype)
    steps = as_index(max_steps) or 0
    if steps < 2:
        needs = "two corrections at least are needed: the second says what the first is worth"
        remedy = "leave it out for 100"
        raise ValueError(message(OPERATION, "`max_steps`", f"is {shown(max_steps)}", needs, remedy))
    eps = float(jnp.finfo(a.dtype).eps) / 2
    least = math.sqrt(max(a.shape[0], 1)) * eps if tol is None else _tolerance(tol)
    columns = b[:, None] if b.ndim == 1 else b
    settings = {"products": products, "block": _block(a.shape[0]), "most": steps}
    solution, smallest = _solved(a, columns, least, **settings)
    x, residual = (array.reshape(b.shape) for array in (solution.x, solution.residual))
    solution = solution._replace(x=x, residual=residual)
    if not isinstance(solution.converged, jax.core.Tracer) and not solution.converged:
        _refuse(a, b, solution, smallest, least)
    return solution


# Arguments


def _operands(a: ArrayLike, b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    arrays = []
    for name, value in (("a", a), ("b", b)):
        array = checks.as_array(OPERATION, name, value)
        as_dtype(OPERATION, name, array.dtype, _FLOATS)
        arrays.append(array)
    a, b = arrays
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        needs, remedy = "a square matrix is needed", "use `jax.vmap` for several of them"
        raise ValueError(message(OPERATION, "`a`", f"has shape {a.shape}", needs, remedy))
    if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
        got = f"has shape {b.shape}"
        needs = f"({a.shape[0]},) or ({a.shape[0]}, K) is needed"
        raise ValueError(message(OPERATION, "`b`", got, needs, "give a row for each row of `a`"))
    if 0 in (*a.shape, *b.shape):
        got, needs = f"have shapes {a.shape} and {b.shape}", "there is nothing to solve"
        raise ValueError(message(OPERATION, "`a` and `b`", got, needs, "give an equation"))
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return a.astype(wide), b.astype(wide)


def _products(terms: int, dtype: DTypeLike | None) -> int | np.dtype:
    """Compute type of the factorisation's products: a number of terms, or a dtype."""
    if dtype is None:
        return checked_terms(OPERATION, terms)
    return as_dtype(OPERATION, "dtype", dtype, WIDE_FLOAT)


def _tolerance(tol: Any) -> float:
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 < tol < 1:
        needs, remedy = "a number between 0 and 1 is needed", "leave it out for the last place"
        raise ValueError(message(OPERATION, "`tol`", f"is {shown(tol)}", needs, remedy))
    return float(tol)


def _block(size: int) -> int:
    """Columns of a panel."""
    return _BLOCK * -(-size // (_BLOCK * _MOST_BLOCKS))


def _refuse(a: jax.Array, b: jax.Array, last: Solution, smallest: jax.Array, tol: float) -> None:
    """Says why there is no solution."""
    if not (jnp.isfinite(a).all() and jnp.isfinite(b).all()):
        got, needs = "hold NaN or infinities", "finite numbers are needed"
        text = message(OPERATION, "`a` and `b`", got, needs, "look where they come from")
    elif smallest == 0:
        got, needs = "is singular: a pivot is 0", "its rows need to be independent"
        text = message(OPERATION, "`a`", got, needs, "use `jax.numpy.linalg.lstsq`")
    else:
        got = (
            f"is too ill-conditioned for this factorisation: after {last.steps} corrections the "
            f"solution has not settled, with a backward error of {last.backward_error:.2g}"
        )
        needs = f"{tol:.2g} and a small last correction are needed"
        remedy = "give more `terms`, or `dtype=jnp.float32`; then use `jax.numpy.linalg.solve`"
        text = message(OPERATION, "`a`", got, needs, remedy)
    raise np.linalg.LinAlgError(text)


# The system


@functools.partial(jax.jit, static_argnames=("products", "block", "most"))
def _solved(
    a: jax.Array, b: jax.Array, tol: float, *, products: int | np.dtype, block: int, most: int
) -> tuple[Solution, jax.Array]:
    """The solution for columns, and the smallest pivot."""
    balanced, rows, columns = _balance(lax.stop_gradient(a))
    lu, order = _factored(balanced.astype(jnp.float32), products, block)

    def forward(_: Any, b: jax.Array) -> tuple[jax.Array, Solution]:
        correction = functools.partial(_back, lu, order)
        return _refined(balanced, rows, columns, b, correction, tol, most)

    def backward(_: Any, b: jax.Array) -> tuple[jax.Array, Solution]:
        correction = functools.partial(_back_transposed, lu, order)
        return _refined(balanced.T, columns, rows, b, correction, tol, most)

    x, solution = lax.custom_linear_solve(
        lambda x: jnp.matmul(a, x, precision="highest"), b, forward, backward, has_aux=True
    )
    return solution._replace(x=x), jnp.min(jnp.abs(jnp.diagonal(lu)))


def _refined(
    a: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    b: jax.Array,
    correction: Callable[[jax.Array], jax.Array],
    tol: float,
    most: int,
) -> tuple[jax.Array, Solution]:
    """Corrects the solution 0 until its last bits settle, or corrections no longer shrink.

    `a` is balanced: the solved system is `2^-rows a 2^-columns`.
    """
    eps = jnp.finfo(a.dtype).eps / 2
    norm = jnp.max(jnp.sum(jnp.abs(a), 1))
    b = jnp.ldexp(b, rows[:, None])

    def backward_error(x: jax.Array, r: jax.Array) -> jax.Array:
        return _share(_largest(r), norm * _largest(x) + _largest(b))

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, r, error, last, count, _ = state
        d = _in_unit_range(correction, r)
        moved = _share(_largest(d), _largest(x + d))
        helps = moved <= jnp.where(error <= tol, _STALLED, 1) * last
        x = jnp.where(helps, x + d, x)
        r = _residual(a, x, b)
        last = jnp.where(helps, moved, last)
        return x, r, backward_error(x, r), last, count + helps, ~helps | (moved <= eps)

    def goes_on(state: tuple[Any, ...]) -> jax.Array:
        *_, count, finished = state
        return ~finished & (count < most)

    zero = jnp.zeros_like(b)
    last, count = jnp.asarray(jnp.inf, a.dtype), jnp.asarray(0, jnp.int32)
    first = (zero, b, backward_error(zero, b), last, count, jnp.asarray(False))
    x, r, error, last, count, _ = lax.while_loop(goes_on, step, first)
    x = jnp.ldexp(x, columns[:, None])
    return x, Solution(
        x=x,
        residual=jnp.ldexp(r, -rows[:, None]),
        backward_error=error,
        steps=count,
        converged=(error <= tol) & (last <= _SETTLED),
    )


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """The largest share of a column; 0 of 0 is 0."""
    return jnp.max(jnp.where(whole == 0, 0, part / whole))


def _largest(x: jax.Array) -> jax.Array:
    """The largest magnitude of each column."""
    return jnp.max(jnp.abs(x), 0)


def _residual(a: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    """`b - a x`, more accurate than `a` and `x` are."""
    if a.dtype != jnp.float32:
        return b - jnp.matmul(a, x, precision="highest")
    one = _power_of_two(_largest(x)) * 2**_ROOM
    left = jnp.concatenate([a, b / one], 1)
    right = jnp.concatenate([-x, jnp.diag(one)])
    return split_dot(left, right, terms=4)


# The factorisation


def _balance(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`2^rows a 2^columns`, with the largest of each row and column near 1, and the exponents."""
    exponents = jnp.where(a == 0, -_MOST_EXPONENT, jnp.frexp(a)[1])
    rows = jnp.max(exponents, 1)
    columns = jnp.max(exponents - rows[:, None], 0)
    rows, columns = (-jnp.clip(e, -_MOST_EXPONENT, _MOST_EXPONENT) for e in (rows, columns))
    return jnp.ldexp(a, rows[:, None] + columns), rows, columns


def _power_of_two(x: jax.Array) -> jax.Array:
    """The power of two at or below numbers; 1 for 0 and non-finite ones."""
    _, exponent = jnp.frexp(jnp.where((x > 0) & jnp.isfinite(x), x, 1))
    return jnp.ldexp(jnp.ones_like(x), exponent - 1)


def _factored(a: jax.Array, products: int | np.dtype, block: int) -> tuple[jax.Array, jax.Array]:
    """L and U of the permuted rows of `a`, in one float32 matrix, and the permutation."""
    width = min(block, a.shape[0])
    panel, _, order = lax.linalg.lu(a[:, :width])
    if width == a.shape[0]:
        return panel, order
    corner, below, rest = panel[:width], panel[width:], a[order, width:]
    right = solve_triangular(corner, rest[:width], lower=True, unit_diagonal=True)
    updated = rest[width:] - _product(below, right, products)
    inner, swapped = _factored(updated, products, block)
    lu = jnp.block([[corner, right], [below[swapped], inner]])
    return lu, jnp.concatenate([order[:width], order[width:][swapped]])


def _product(x: jax.Array, y: jax.Array, products: int | np.dtype) -> jax.Array:
    if isinstance(products, int):
        return split_dot(x, y, terms=products)
    narrow = x.astype(products), y.astype(products)
    precision = "highest" if products == np.float32 else None
    return jnp.matmul(*narrow, precision=precision, preferred_element_type=jnp.float32)


def _back(lu: jax.Array, order: jax.Array, r: jax.Array) -> jax.Array:
    y = solve_triangular(lu, r[order], lower=True, unit_diagonal=True)
    return solve_triangular(lu, y)


def _back_transposed(lu: jax.Array, order: jax.Array, r: jax.Array) -> jax.Array:
    y = solve_triangular(lu, r, trans=1)
    y = solve_triangular(lu, y, trans=1, lower=True, unit_diagonal=True)
    return jnp.zeros_like(y).at[order].set(y)


def _in_unit_range(fun: Callable[[jax.Array], jax.Array], r: jax.Array) -> jax.Array:
    """Applies a linear function in float32 to `r`.

    Each column is divided by a power of two near its largest value, and the result scaled back.
    """
    size = _power_of_two(_largest(r))
    return fun((r / size).astype(jnp.float32)).astype(r.dtype) * size
