"""Recognises the activation in an elementwise expression, however it is written.

A value computed from one product by scalar functions has a curve: its float64 samples on a fixed
grid. The grid holds both signs of every magnitude of float32, zeros, infinities and NaN. If the
samples agree with an activation's to 1e-9 of their size all along the grid, the expression is this
activation: both consist of smooth functions.

relu has a kink, and a grid cannot place it. Only the maximum of zero and a product itself is relu
(`rules/epilogue`). Comparisons and selects have no curves, because they treat NaN differently.

To add an activation, add its smooth function to `_SMOOTH` under its name in the call, the
primitives of its expressions to `_UNARY` and `_BINARY`, and the last of them to `_ENDINGS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jaxfp8._rewrite.ir import constants
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import dtypes

_DECADES = np.logspace(-46, 38.5, 85 * 12)
_MAGNITUDES = np.concatenate([_DECADES, np.linspace(0.05, 40.0, 200), [65504.0, 3.3e38, np.inf]])
GRID = np.concatenate([-_MAGNITUDES, [-0.0, 0.0, np.nan], _MAGNITUDES])
_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])

# For each base, a value, the samples of another value as a function of it.
Curves = dict[Value, np.ndarray]

# A program rounds these constants to the dtype of its expression. Samples use the exact ones.
_KNOWN = (math.sqrt(2 / math.pi), 0.044715, math.sqrt(0.5), math.sqrt(2.0))
_MOST_BASES = 4


def _logistic(x: np.ndarray) -> np.ndarray:
    """The logistic function, to full precision in both tails."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1.0 + small)


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "tanh": np.tanh,
    "erf": _erf,
    "erfc": _erfc,
    "exp": np.exp,
    "logistic": _logistic,
    "square": np.square,
    "copy": np.positive,
    "copy_p": np.positive,
}
_Binary = Callable[[np.ndarray | float, np.ndarray | float], np.ndarray]
_BINARY: dict[str, _Binary] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_SMOOTH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_erf": lambda x: 0.5 * x * _erfc(-x * math.sqrt(0.5)),
    "silu": lambda x: x * _logistic(x),
}
with np.errstate(all="ignore"):
    _ACTIVATIONS = {name: function(GRID) for name, function in _SMOOTH.items()}
# The cancellation error in float64 of an expression such as 1 + erf(x).
_TOLERANCE = 1e-14 * np.abs(GRID)
_ENDINGS = ("mul", "div")
# A point of the grid with well separated activations.
_PROBE = int(np.nonzero(GRID > 1.0)[0][0])


def _constant(value: Value) -> float | None:
    """The known number of a value; for a known constant, its exact value."""
    number = constants.number(value)
    if number is None or value.dtype.kind not in "fV":
        return number
    for exact in _KNOWN:
        if abs(number) == float(np.asarray(exact, value.dtype)):
            return math.copysign(exact, number)
    return number


def extend(op: Op, inputs: list[Curves]) -> Curves:
    """The curves of an op's output, given those of its inputs."""
    if op.outputs[0].dtype not in dtypes.WIDE_FLOAT:
        return {}
    with np.errstate(all="ignore"):
        if op.name == "convert_element_type":
            return {b: x for b, x in inputs[0].items() if _survives(x, *op.inputs, *op.outputs)}
        if op.name in _UNARY:
            return {base: _UNARY[op.name](x) for base, x in inputs[0].items()}
        if op.name == "integer_pow":
            return {base: x ** float(op.params["y"]) for base, x in inputs[0].items()}
        if op.name == "pow" and (power := _constant(op.inputs[1])) is not None:
            return {base: x**power for base, x in inputs[0].items()}
        if op.name in _BINARY:
            return _binary(_BINARY[op.name], op, *inputs)
    return {}


def _survives(samples: np.ndarray, source: Value, out: Value) -> bool:
    """Whether a cast between floats only rounds: it makes no sample infinite, as float16 may."""
    overflows = np.abs(samples) > float(np.finfo(np.float16).max)
    return out.dtype != np.float16 or source.dtype == out.dtype or not np.any(overflows)


def _binary(function: _Binary, op: Op, left: Curves, right: Curves) -> Curves:
    """Curves of an op on two curves of one base, or on a curve and a number."""
    if left and right:
        bases = [base for base in left if base in right][-_MOST_BASES:]
        return {base: function(left[base], right[base]) for base in bases}
    number = _constant(op.inputs[1] if left else op.inputs[0])
    if number is None:
        return {}
    if left:
        return {base: function(x, number) for base, x in left.items()}
    return {base: function(number, x) for base, x in right.items()}


def identify(op: Op, curves: Curves) -> tuple[Value, str] | None:
    """The base and the name of its activation, if the op's output is an activation."""
    if op.name not in _ENDINGS:
        return None
    for base, samples in curves.items():
        for name, expected in _ACTIVATIONS.items():
            if _agree(samples, expected):
                return base, name
    return None


def _agree(samples: np.ndarray, expected: np.ndarray) -> bool:
    """Whether samples agree at every point of the grid; one point rejects nearly all curves."""
    one, exact = samples[_PROBE], expected[_PROBE]
    if not abs(one - exact) <= _TOLERANCE[_PROBE] + 1e-9 * abs(exact):
        return False
    with np.errstate(all="ignore"):
        near = np.abs(samples - expected) <= 1e-9 * np.abs(expected) + _TOLERANCE
    finite = np.isfinite(expected) & np.isfinite(samples) & np.isfinite(GRID)
    same = (samples == expected) | (np.isnan(samples) & np.isnan(expected))
    return bool(np.all(np.where(finite, near, same)))
