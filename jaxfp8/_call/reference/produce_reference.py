"""What it means to produce and quantize values: the problem as a spec, and its definition in jnp.

    y = activation(x) * factor, or norm(x) * gain + shift, or x; rounded to 16 bits

A norm divides `x`, or `x` without its mean, by its root mean square, in float32. The problem says
whether the call computes these means or takes them. There are two ways to quantize. Each row has a
scale of its own, computed here:

    amax  = max|y| of a row; NaN and infinities count
    scale = max(max(amax, amax_floor) / highest, scale_floor)
    code  = saturate(round(y / scale))

Or the caller gives scales of the whole array, and each scale has its codes:

    codes = saturate(round(y / scale)); a scale of 0 counts as 1
    amax  = max|y| of the array; NaN and infinities do not count
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.reference.dot_reference import ACTIVATIONS
from jaxfp8._call.reference.quantize_reference import (
    codes_of,
    finite_amax,
    plain_amax,
    plain_codes,
    with_transpose,
)
from jaxfp8._value.dtypes import finite_range
from jaxfp8._value.scales import per
from jaxfp8._value.spec import array

Axis = TypeVar("Axis")  # stands for an axis: its size, or its factor on a mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScale:
    """How the scale of a row follows from its amax."""

    amax_floor: float = 0.0  # the least amax that counts as itself
    scale_floor: float = 0.0  # the least scale
    of_zeros: float = 0.0  # the scale of a row of zeros, where 0 / 0 is NaN in FP8
    of_nan: float = float("nan")  # the scale of a row that holds NaN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowScale) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, ...]:
        return tuple(repr(value) for value in dataclasses.astuple(self))  # NaN equals itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormForm:
    """What a norm does beside its means: RMSNorm, or LayerNorm where the mean is taken away."""

    centred: bool = False  # whether the mean is taken away first
    # has_gain, has_shift: whether there is a vector to multiply by, and one to add.
    has_gain: bool = False
    has_shift: bool = False
    rounded_first: bool = False  # whether what the gain multiplies is rounded to the dtype of `x`
    rounded_second: bool = False  # whether what the shift is added to is

    @property
    def vectors(self) -> int:
        """How many vectors there are."""
        return self.has_gain + self.has_shift


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(NormForm):
    """A norm that finds its means."""

    epsilon: float  # what is added to the mean square


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProduceSpec:
    """Everything that is known before the data is.

    The operands are `x` [..., K]; the factor, of the same shape; the inverse of each row's root
    mean square and, if `centred`, its mean, both float32 [..., 1], of a norm without epsilon; gain
    and shift [K], of the 16-bit dtype or float32; the given scales, float32 with axes of size 1;
    each where there is one.

    The results of a found scale are the codes; in float32 the scale and the amax, [..., 1]. Those
    of given scales are the codes of each and, if wanted, their transposed copy; then the amax,
    float32 with axes of size 1.
    """

    dtype: np.dtype  # of the codes
    rule: RowScale | None = None  # how the scale of a row is found; None where scales are given
    scales: int = 0  # how many scales are given
    # Of the values that are quantized; None for the dtype of `x`, narrower where `x` is rounded.
    row_dtype: np.dtype | None = None
    # The norm, with an epsilon where it finds its means; None for an activation and a factor, or a
    # rounding.
    norm: NormForm | None = None
    # Of `x`, as `ScaledDotSpec` has it. Its value is rounded to the 16-bit dtype.
    activation: str = "none"
    has_factor: bool = False  # whether there is an array to multiply by
    # The first of the axes that transposed copies have in front; None for none.
    transpose_from: int | None = None

    def __post_init__(self) -> None:
        assert (self.rule is None) == (self.scales > 0), "a scale is found or given"
        assert self.rule is None or self.transpose_from is None

    def told(self, x: Any) -> str:
        """The quantization of an array of the type of `x` in words, for messages."""
        if self.rule is None:
            return f"the encoding of {array(x)} for training"
        return f"the quantization of rows of {array(x)}"

    @property
    def of_rows(self) -> int:
        """How many operands have one number for each row."""
        return 0 if self.norm is None or isinstance(self.norm, Norm) else 1 + self.norm.centred

    @property
    def vectors(self) -> int:
        """How many operands are vectors."""
        return 0 if self.norm is None else self.norm.vectors

    def layouts(self, axes: tuple[Axis, ...]) -> list[tuple[Axis, ...]]:
        """The axes of the codes of one scale, and of their transposed copy."""
        first = self.transpose_from
        return [axes] if first is None else [axes, axes[first:] + axes[:first]]

    def operands(self, whole: Axis, row: Axis, vector: Axis, one: Axis) -> list[Axis]:
        """For each operand what stands for its kind: an array of all values, or of fewer."""
        made = [*[whole] * (1 + self.has_factor), *[row] * self.of_rows, *[vector] * self.vectors]
        return [*made, *[one] * self.scales]

    def results(self, axes: tuple[Axis, ...], one: Axis) -> list[tuple[Axis, ...]]:
        """The axes of each result; `one` stands for an axis of size 1."""
        if self.rule is not None:
            of_row = (*axes[:-1], one)
            return [axes, of_row, of_row]
        return [*self.layouts(axes) * self.scales, (one,) * len(axes)]


def quantized_values(
    x: jax.Array, *others: jax.Array, spec: ProduceSpec, mesh_axes: tuple[str, ...] = ()
) -> list[jax.Array]:
    """The results by definition, as `ProduceSpec` lists them.

    Rows with a found scale may be spread over `mesh_axes` in equal parts.
    """
    made = len(others) - spec.scales
    dtype = x.dtype if spec.row_dtype is None else spec.row_dtype
    y = rounded_to(_produced(x, *others[:made], spec=spec, mesh_axes=mesh_axes), dtype)
    if spec.rule is None:
        codes = [codes_of(spec.dtype, y, scale) for scale in others[made:]]
        copies = [copy for one in codes for copy in with_transpose(one, spec.transpose_from)]
        return [*copies, finite_amax(y)]
    amax = plain_amax(y)
    amax = jax.lax.pmax(amax, mesh_axes) if mesh_axes else amax
    scale = _scale(amax, spec.rule, spec.dtype)
    return [plain_codes(y, scale, dtype=spec.dtype, lowest=None), scale, amax]


def _produced(
    x: jax.Array, *others: jax.Array, spec: ProduceSpec, mesh_axes: tuple[str, ...]
) -> jax.Array:
    """The values that are quantized, before their last rounding."""
    dtype = x.dtype if spec.row_dtype is None else spec.row_dtype
    if spec.norm is not None:
        return _normed(x, list(others), spec.norm, dtype, mesh_axes)
    if x.dtype != dtype:
        return x
    return activated(x, *others, activation=spec.activation)


def activated(x: jax.Array, *factor: jax.Array, activation: str) -> jax.Array:
    """An activation times a factor, if there is one, in float32 before the last rounding."""
    y = rounded_to(ACTIVATIONS[activation](x.astype(jnp.float32)), x.dtype)
    return y * factor[0].astype(jnp.float32) if factor else y


def _normed(
    x: jax.Array,
    others: list[jax.Array],
    norm: NormForm,
    dtype: np.dtype,
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    def mean(y: jax.Array) -> jax.Array:
        own = y.mean(-1, keepdims=True)
        return jax.lax.pmean(own, mesh_axes) if mesh_axes else own

    y = x.astype(jnp.float32)
    if isinstance(norm, Norm):
        y = y - mean(y) if norm.centred else y
        inverse = jax.lax.rsqrt(mean(jnp.square(y)) + np.float32(norm.epsilon))
    else:
        inverse = others.pop(0)
        y = y - others.pop(0) if norm.centred else y
    return scaled_rows(y * inverse, *others, form=norm, dtype=dtype)


def scaled_rows(y: jax.Array, *vectors: jax.Array, form: NormForm, dtype: np.dtype) -> jax.Array:
    """Normalised rows times the gain and plus the shift, before the last rounding to `dtype`."""
    left = list(vectors)
    if form.rounded_first:
        y = rounded_to(y, dtype)
    if form.has_gain:
        y = y * left.pop(0).astype(jnp.float32)
    if form.rounded_second:
        y = rounded_to(y, dtype)
    if form.has_shift:
        y = y + left.pop(0).astype(jnp.float32)
    return y


def rounded_to(y: jax.Array, dtype: np.dtype) -> jax.Array:
    """Float32 values as a 16-bit dtype has them. XLA drops pairs of conversions that it can see."""
    return jax.lax.optimization_barrier(y.astype(dtype)).astype(jnp.float32)


def _scale(amax: jax.Array, rule: RowScale, dtype: np.dtype) -> jax.Array:
    scale = jnp.maximum(amax, np.float32(rule.amax_floor)) * per(finite_range(dtype)[1])
    scale = jnp.maximum(scale, np.float32(rule.scale_floor))
    scale = jnp.where(amax == 0, np.float32(rule.of_zeros), scale)
    return jnp.where(jnp.isnan(amax), np.float32(rule.of_nan), scale)
