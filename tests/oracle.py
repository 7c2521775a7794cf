"""The scaled dot in float64, and how far from it a result may lie."""

from __future__ import annotations

import dataclasses
import string

import ml_dtypes
import numpy as np
from scipy import special

from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# Largest slope of each activation, by which it can enlarge an error of its argument.
_LIPSCHITZ = {"none": 1.0, "relu": 1.0, "gelu_tanh": 1.13, "gelu_erf": 1.13, "silu": 1.1}
# An activation computed in float32 may be off by a few units of its argument's last place.
_ACTIVATION_SLACK = 8 * 2.0**-24

_ACTIVATIONS = {
    "none": lambda y: y,
    "relu": lambda y: np.where(np.isnan(y), y, np.maximum(y, 0)),
    "gelu_tanh": lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
    "gelu_erf": lambda y: y * special.ndtr(y),
    "silu": lambda y: y * special.expit(y),
}


@dataclasses.dataclass(frozen=True)
class Exact:
    """A float64 result: `y` before `out_scale`, its amax, and the error that `y` may carry."""

    y: np.ndarray
    amax: np.ndarray | None
    error: np.ndarray


def decode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as float64."""
    values = np.asarray(values)
    if dtypes.is_float8(dtype):
        values = values.view(np.dtype(dtype))
    return values.astype(np.float64)


def scaled_dot(spec: ScaledDotSpec, operands: dict[str, np.ndarray], slack: float = 0.0) -> Exact:
    """The definition of docs/custom_call.md in float64, with its error bound.

    `slack` adds to the bound of float32 sums, as a share of the sum of magnitudes.
    """
    values = [_dequantized(side, name, operands) for name, side in _sides(spec)]
    subscripts = _subscripts(spec)
    shared = [_unshare(spec, side, v) for (_, side), v in zip(_sides(spec), values, strict=True)]
    with np.errstate(all="ignore"):
        total = np.einsum(subscripts, *shared)
        magnitude = np.einsum(subscripts, *map(np.abs, shared))
        addends = [operands[n].astype(np.float64) for n in ("residual", "bias") if n in operands]
        for addend in addends:
            total, magnitude = total + addend, magnitude + np.abs(addend)
        terms = max(spec.contracting_size, 1) + len(addends)
        activation = spec.epilogue.activation
        y = _ACTIVATIONS[activation](total)
        error = (terms * 2.0**-24 + slack) * magnitude * _LIPSCHITZ[activation]
        if activation not in ("none", "relu"):
            error = error + _ACTIVATION_SLACK * np.abs(total)
    amax = None
    if spec.epilogue.amax is not None:
        axes = tuple(i for i, size in enumerate(spec.epilogue.amax) if size == 1)
        amax = np.max(np.abs(y), axis=axes, keepdims=True, initial=0)
    return Exact(y=y, amax=amax, error=error)


def assert_within_bound(
    spec: ScaledDotSpec,
    operands: dict[str, np.ndarray],
    out: np.ndarray,
    amax=None,
    slack: float = 0.0,
) -> None:
    """Fails where a result lies further from float64 than the project promises."""
    exact = scaled_dot(spec, operands, slack)
    assert out.shape == spec.out_shape
    assert out.dtype == dtypes.storage(spec.epilogue.out_dtype)
    dtype = np.dtype(spec.epilogue.out_dtype)
    if dtype == np.int32:
        np.testing.assert_array_equal(out, exact.y.astype(np.int64))
    elif dtypes.is_eight_bit(dtype):
        _assert_neighbouring_codes(spec, operands, exact, out)
    else:
        _assert_close(out.astype(np.float64), exact.y, exact.error, dtype)
    if exact.amax is not None:
        error = np.max(exact.error, initial=0) if exact.error.size else 0
        _assert_close(np.asarray(amax, np.float64), exact.amax, error, np.dtype(np.float32))


def half_ulp(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half the distance between neighbours of `dtype` around `y`."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(y), float(info.smallest_normal))))
    return 0.5 * 2.0 ** (exponent - info.nmant)


def _assert_close(out: np.ndarray, y: np.ndarray, error, dtype: np.dtype) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        bound = error + half_ulp(y, dtype) + half_ulp(np.abs(y) + error, dtype)
        special_y = ~np.isfinite(y) | (np.abs(y) + error >= largest)
        wrong = np.abs(out - y) > bound
        wrong_special = ~((out == y) | (np.isnan(out) & np.isnan(y)) | np.isinf(out))
        wrong_special |= np.isnan(out) != np.isnan(y)
    wrong = np.where(special_y, wrong_special & ~(np.abs(out - y) <= bound), wrong | np.isnan(out))
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} wrong; first at {np.argwhere(wrong)[0]}: "
        f"{out[wrong][0]!r} for {y[wrong][0]!r}, bound {np.broadcast_to(bound, y.shape)[wrong][0]}"
    )


def _assert_neighbouring_codes(
    spec: ScaledDotSpec, operands: dict[str, np.ndarray], exact: Exact, out: np.ndarray
) -> None:
    dtype = np.dtype(spec.epilogue.out_dtype)
    low, high = dtypes.finite_range(dtype)
    scale = np.asarray(operands.get("out_scale", 1), np.float64)
    stored = decode(out, dtype.name)
    with np.errstate(all="ignore"):
        nan = np.isnan(exact.y / scale)
        slack = np.abs(exact.y / scale) * 2.0**-22
        edges = [
            _round(np.clip((exact.y + sign * exact.error) / scale + sign * slack, low, high), dtype)
            for sign in (-1, 1)
        ]
    lowest, highest = np.minimum(*edges), np.maximum(*edges)
    ok = (stored >= lowest) & (stored <= highest)
    nan_ok = np.isnan(stored) if dtypes.is_float8(dtype) else stored == 0
    wrong = ~np.where(nan, nan_ok, ok)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} wrong; first {stored[wrong][0]} outside "
        f"[{lowest[wrong][0]}, {highest[wrong][0]}]"
    )


def _round(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtypes.is_float8(dtype):
        return y.astype(np.float32).astype(dtype).astype(np.float64)
    return np.round(y)


def _sides(spec: ScaledDotSpec):
    return (("lhs", spec.lhs), ("rhs", spec.rhs))


def _dequantized(side: OperandSpec, name: str, operands: dict[str, np.ndarray]) -> np.ndarray:
    value = decode(operands[name], side.dtype)
    if side.zero_point:
        value = value - _expand(operands[f"{name}_zero_point"].astype(np.float64), side)
    if side.scale:
        with np.errstate(all="ignore"):
            value = value * _expand(_scale(side, operands[f"{name}_scale"]), side)
    return value


def _scale(side: OperandSpec, scale: np.ndarray) -> np.ndarray:
    if side.scale_exponents:
        scale = scale.view(dtypes.E8M0)
    return scale.astype(np.float64)


def _expand(scale: np.ndarray, side: OperandSpec) -> np.ndarray:
    for axis, (size, tile) in enumerate(zip(side.shape, side.tiles, strict=True)):
        scale = np.repeat(scale, tile, axis=axis).take(range(size), axis=axis)
    return scale


def _unshare(spec: ScaledDotSpec, side: OperandSpec, value: np.ndarray) -> np.ndarray:
    shape = list(value.shape)
    for axis, size in zip(side.batch, spec.batch_shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(value, shape)


def _subscripts(spec: ScaledDotSpec) -> str:
    letters = iter(string.ascii_letters)
    lhs = [next(letters) for _ in spec.lhs.shape]
    rhs = [next(letters) for _ in spec.rhs.shape]
    pairs = zip(
        spec.lhs.contracting + spec.lhs.batch, spec.rhs.contracting + spec.rhs.batch, strict=True
    )
    for left, right in pairs:
        rhs[right] = lhs[left]
    out = [lhs[a] for a in spec.lhs.batch + spec.lhs.free] + [rhs[a] for a in spec.rhs.free]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"
