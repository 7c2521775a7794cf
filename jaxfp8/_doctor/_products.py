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
from jaxfp8._ops import products
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes import recipes
from jaxfp8._recipes.recipes import Recipe
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A product of activations [M, K] and a weight [N, K]."""

    name: str  # as users know it
    recipe: Recipe = recipes.FP8_W8A16  # how both operands are held
    rows: int  # M
    x_dtype: str = "bfloat16"  # of activations before that


KINDS = (
    Kind(name="W8A16", rows=_FEW),
    Kind(name="W8A16", rows=_MANY),
    Kind(name="FP8", recipe=recipes.FP8_DYNAMIC, rows=_FEW),
    Kind(name="FP8", recipe=recipes.FP8_DYNAMIC, rows=_MANY),
    Kind(name="FP8 in blocks", recipe=recipes.FP8_BLOCK, rows=_MANY),
    Kind(name="INT8", recipe=recipes.INT8_DYNAMIC, rows=_FEW),
    Kind(name="INT8", recipe=recipes.INT8_DYNAMIC, rows=_MANY),
    Kind(name="float32 x FP8", rows=_FEW, x_dtype="float32"),
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
    return next(specs(jax.make_jaxpr(_multiply)(*sides).jaxpr))


def specs(jaxpr: core.Jaxpr) -> Iterator[ScaledDotSpec]:
    """The scaled dots of a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is scaled_dot_p:
            yield eqn.params["spec"]
    for inner in core.subjaxprs(jaxpr):
        yield from specs(inner)


def _operands(
    kind: Kind, x: jax.Array, w: jax.Array
) -> tuple[jax.Array | QArray, jax.Array | QArray]:
    held = kind.recipe.quantize_activation(x.astype(kind.x_dtype), (1,))
    return held, kind.recipe.quantize_weight(w, (1,))


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
    return Outcome(excess=_excess(x, w, y, platform), ran=ran)


def _excess(x: jax.Array | QArray, w: jax.Array | QArray, y: np.ndarray, platform: str) -> float:
    rows, columns = _spread(y.shape[0], _ROWS), _spread(y.shape[1], _COLUMNS)
    left, right = _float64(x, rows), _float64(w, columns)
    exact, magnitude = left @ right.T, np.abs(left) @ np.abs(right).T
    in_fp8 = all(isinstance(q, QArray) and dtypes.is_float8(q.qvalue.dtype) for q in (x, w))
    cut_off = 0.0 if platform == "cpu" else _CUT_OFF_FP8 if in_fp8 else _CUT_OFF
    results = y[np.ix_(rows, columns)]
    # Operands are dequantized in float32, too.
    bound = ((left.shape[1] + 4) * 2.0**-24 + cut_off) * magnitude + np.spacing(np.abs(results))
    return float(np.max(np.abs(results.astype(np.float64) - exact) - bound))


def _spread(size: int, number: int) -> np.ndarray:
    """Evenly spaced indices of an axis, from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, number)).astype(int))


def _float64(operand: jax.Array | QArray, lines: np.ndarray) -> np.ndarray:
    """Some lines of an operand, dequantized."""
    wide = dequantize(operand, jnp.float32) if isinstance(operand, QArray) else operand
    return np.asarray(wide)[lines].astype(np.float64)
