"""The products of `doctor`: one for each path of a library.

On a GPU they are too large to be left to XLA (`_call/gpu/xla_products`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxfp8._call.gpu import xla_products
from jaxfp8._call.library import ffi
from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._ops import products, quantize
from jaxfp8._value import dtypes
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import ScaledDotSpec

_FEW, _MANY = 16, 512
# Columns and K. A GPU multiplies smaller weights by other paths, or leaves them to XLA.
_LEAST = {"cpu": 256, "cuda": 4096}
# Compared rows and columns of an output.
_ROWS, _COLUMNS = 16, 256
# Beyond float32 sums, as a share of the magnitudes: tensor cores truncate terms far below the
# largest one. FP8 keeps 13 bits there.
_CUT_OFF, _CUT_OFF_FP8 = 2.0**-21, 2.0**-10
# Scales of blocks hold for so many values of K.
_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A product of activations [M, K] and a weight [N, K]."""

    name: str  # as users know it
    # lhs, rhs: dtypes.
    lhs: str
    rhs: str = "float8_e4m3fn"
    rows: int  # M
    # Whether scales hold for 128 values of K, and not for a row or a column.
    in_blocks: bool = False


KINDS = (
    Kind(name="W8A16", lhs="bfloat16", rows=_FEW),
    Kind(name="W8A16", lhs="bfloat16", rows=_MANY),
    Kind(name="FP8", lhs="float8_e4m3fn", rows=_FEW),
    Kind(name="FP8", lhs="float8_e4m3fn", rows=_MANY),
    Kind(name="FP8 in blocks", lhs="float8_e4m3fn", rows=_MANY, in_blocks=True),
    Kind(name="INT8", lhs="int8", rhs="int8", rows=_FEW),
    Kind(name="INT8", lhs="int8", rhs="int8", rows=_MANY),
    Kind(name="float32 x FP8", lhs="float32", rows=_FEW),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A kind of product in a size."""

    kind: Kind  # sides and rows
    size: int  # N and K
    spec: ScaledDotSpec  # as the library is asked for it

    @property
    def sizes(self) -> str:
        """M x N x K."""
        return f"{self.kind.rows} x {self.size} x {self.size}"


def problem(kind: Kind, platform: str, compute_capability: int | None) -> Problem:
    """A product of a kind, too large to be left to XLA."""
    size = _LEAST[platform]
    while True:
        spec = _spec(kind, size)
        if platform == "cpu" or not xla_products.takes(spec, "", compute_capability):
            return Problem(kind=kind, size=size, spec=spec)
        size *= 2


def _spec(kind: Kind, size: int) -> ScaledDotSpec:
    wide = (jax.ShapeDtypeStruct((n, size), jnp.float32) for n in (kind.rows, size))
    sides = jax.eval_shape(functools.partial(_operands, kind), *wide)
    return next(_specs(jax.make_jaxpr(_multiply)(*sides).jaxpr))


def _specs(jaxpr: core.Jaxpr) -> Iterator[ScaledDotSpec]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is scaled_dot_p:
            yield eqn.params["spec"]
    for inner in core.subjaxprs(jaxpr):
        yield from _specs(inner)


def _operands(
    kind: Kind, x: jax.Array, w: jax.Array
) -> tuple[jax.Array | QArray, jax.Array | QArray]:
    return _held(x, kind.lhs, 1, kind.in_blocks), _held(w, kind.rhs, _BLOCK, kind.in_blocks)


def _held(wide: jax.Array, dtype: str, lines: int, in_blocks: bool) -> jax.Array | QArray:
    """An operand with a scale for each line, or for `lines` lines and 128 values of K."""
    if not dtypes.is_eight_bit(dtype):
        return wide.astype(dtype)
    tiles = {0: lines, 1: _BLOCK} if in_blocks else {0: 1}
    return quantize.quantize(wide, dtype, tiled_axes=tiles)


def _multiply(x: jax.Array | QArray, w: jax.Array | QArray) -> jax.Array:
    numbers = (((1,), (1,)), ((), ()))
    return products.dot_general(x, w, numbers, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a product."""

    excess: float  # error beyond the bound of docs/design.md; at most 0 if the product is right
    ran: tuple[str, ...]  # the kernels called


def multiply(problem: Problem, platform: str) -> Outcome:
    """Multiplies random values on the default device, and compares them with float64."""
    rng = np.random.default_rng(0)
    shapes = (problem.kind.rows, problem.size), (problem.size, problem.size)
    wide = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    x, w = _operands(problem.kind, *wide)
    before = ffi.kernel_calls(platform)
    y = np.asarray(jax.jit(_multiply)(x, w))
    after = ffi.kernel_calls(platform)
    ran = tuple(name for name in after if after[name] > before.get(name, 0))
    return Outcome(excess=_excess(problem.kind, x, w, y, platform), ran=ran)


def _excess(
    kind: Kind, x: jax.Array | QArray, w: jax.Array | QArray, y: np.ndarray, platform: str
) -> float:
    rows, columns = _spread(y.shape[0], _ROWS), _spread(y.shape[1], _COLUMNS)
    left, right = _float64(x, rows), _float64(w, columns)
    exact, magnitude = left @ right.T, np.abs(left) @ np.abs(right).T
    in_fp8 = dtypes.is_float8(kind.lhs) and dtypes.is_float8(kind.rhs)
    cut_off = 0.0 if platform == "cpu" else _CUT_OFF_FP8 if in_fp8 else _CUT_OFF
    results = y[np.ix_(rows, columns)]
    bound = (left.shape[1] * 2.0**-24 + cut_off) * magnitude + np.spacing(np.abs(results))
    return float(np.max(np.abs(results.astype(np.float64) - exact) - bound))


def _spread(size: int, number: int) -> np.ndarray:
    """Evenly spaced indices of an axis, from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, number)).astype(int))


def _float64(operand: jax.Array | QArray, lines: np.ndarray) -> np.ndarray:
    """Some lines of an operand, dequantised."""
    if not isinstance(operand, QArray):
        return np.asarray(operand)[lines].astype(np.float64)
    codes = np.asarray(operand.qvalue)[lines].astype(np.float64)
    scale = np.asarray(operand.scale, np.float64)
    per = [-(-n // count) for n, count in zip(operand.shape, scale.shape, strict=True)]
    of_lines = scale[lines // per[0]]
    return codes * np.repeat(of_lines, per[1], axis=1)[:, : codes.shape[1]]
