"""What it means to produce and quantise rows: the problem as a spec, and its definition in jnp.

    y     = activation(x) * factor, or norm(x) * gain + shift, rounded to the dtype of x
    amax  = max|y| of a row; NaN and infinities count
    scale = max(max(amax, amax_floor) / highest, scale_floor)
    code  = saturate(round(y / scale))

A norm divides `x`, or `x` without its mean, by its root mean square, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.reference.dot_reference import ACTIVATIONS
from jaxfp8._call.reference.quantize_reference import plain_amax, plain_codes
from jaxfp8._value.dtypes import finite_range
from jaxfp8._value.scales import per
from jaxfp8._value.spec import array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScale:
    """How the scale of a row follows from its amax.

    Attributes:
      amax_floor: the least amax that counts as itself.
      scale_floor: the least scale.
      of_zeros: the scale of a row of zeros, where 0 / 0 is NaN in FP8.
      of_nan: the scale of a row that holds NaN.
    """

    amax_floor: float = 0.0
    scale_floor: float = 0.0
    of_zeros: float = 0.0
    of_nan: float = float("nan")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowScale) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, ...]:
        return tuple(repr(value) for value in dataclasses.astuple(self))  # NaN equals itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormForm:
    """What a norm does beside its means: RMSNorm, or LayerNorm where the mean is taken away.

    Attributes:
      centred: whether the mean is taken away first.
      has_gain, has_shift: whether there is a vector to multiply by, and one to add.
      rounded_first: whether what the gain multiplies is rounded to the dtype of `x`.
      rounded_second: whether what the shift is added to is.
    """

    centred: bool = False
    has_gain: bool = False
    has_shift: bool = False
    rounded_first: bool = False
    rounded_second: bool = False

    @property
    def vectors(self) -> int:
        """How many vectors there are."""
        return self.has_gain + self.has_shift


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(NormForm):
    """A norm that finds its means.

    Attributes:
      epsilon: what is added to the mean square.
    """

    epsilon: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """Everything that is known before the data is.

    The operands are `x` [..., K]; the factor, of the same shape; gain and shift [K], of the dtype
    of `x` or float32; each where there is one. The results are the codes [..., K], and in
    float32 the scale [..., 1] and the amax [..., 1].

    Attributes:
      dtype: of the codes.
      scale: the rule of the scale.
      norm: the norm; None for an activation and a factor.
      activation: of `x`, as `ScaledDotSpec` has it. Its value is rounded to the dtype of `x`.
      has_factor: whether there is an array to multiply by.
    """

    dtype: np.dtype
    scale: RowScale
    norm: Norm | None = None
    activation: str = "none"
    has_factor: bool = False

    def told(self, x: Any) -> str:
        """The quantisation of an array of the type of `x` in words, for messages."""
        return f"the quantisation of rows of {array(x)}"

    @property
    def vectors(self) -> int:
        """How many operands are vectors."""
        return 0 if self.norm is None else self.norm.vectors


def quantized_rows(
    x: jax.Array, *others: jax.Array, spec: RowsSpec, mesh_axes: tuple[str, ...] = ()
) -> list[jax.Array]:
    """Codes, scales and amaxes by definition.

    Args:
      x: bfloat16 or float16, [..., K].
      *others: as `spec` has them.
      spec: what is computed.
      mesh_axes: the mesh axes over which rows are spread in equal parts.
    """
    y = rounded_to(_produced(x, *others, spec=spec, mesh_axes=mesh_axes), x.dtype)
    amax = plain_amax(y)
    amax = jax.lax.pmax(amax, mesh_axes) if mesh_axes else amax
    scale = _scale(amax, spec)
    return [plain_codes(y, scale, dtype=spec.dtype, lowest=None), scale, amax]


def _produced(
    x: jax.Array, *others: jax.Array, spec: RowsSpec, mesh_axes: tuple[str, ...]
) -> jax.Array:
    """The rows that are quantised, in float32 before their last rounding."""
    if spec.norm is not None:
        return _normed(x, others, spec.norm, mesh_axes)
    return activated(x, *others, activation=spec.activation)


def activated(x: jax.Array, *factor: jax.Array, activation: str) -> jax.Array:
    """An activation times a factor, if there is one, in float32 before the last rounding."""
    y = rounded_to(ACTIVATIONS[activation](x.astype(jnp.float32)), x.dtype)
    return y * factor[0].astype(jnp.float32) if factor else y


def _normed(
    x: jax.Array, vectors: Sequence[jax.Array], norm: Norm, mesh_axes: tuple[str, ...]
) -> jax.Array:
    def mean(y: jax.Array) -> jax.Array:
        own = y.mean(-1, keepdims=True)
        return jax.lax.pmean(own, mesh_axes) if mesh_axes else own

    y = x.astype(jnp.float32)
    if norm.centred:
        y = y - mean(y)
    inverse = jax.lax.rsqrt(mean(jnp.square(y)) + np.float32(norm.epsilon))
    return scaled_rows(y * inverse, *vectors, form=norm, dtype=x.dtype)


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


def _scale(amax: jax.Array, spec: RowsSpec) -> jax.Array:
    rule = spec.scale
    scale = jnp.maximum(amax, np.float32(rule.amax_floor)) * per(finite_range(spec.dtype)[1])
    scale = jnp.maximum(scale, np.float32(rule.scale_floor))
    scale = jnp.where(amax == 0, np.float32(rule.of_zeros), scale)
    return jnp.where(jnp.isnan(amax), np.float32(rule.of_nan), scale)
