"""What it means to produce and encode values: the problem as a spec, and its definition in jnp.

y     = activation(x) * factor, or c * inverse * gain + shift with c = x or x - mean, or x;
        rounded to 16 bits
codes = saturate(round(y / scale)), for each of some given scales; a scale of 0 counts as 1
amax  = max|y|; NaN and infinities do not count
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.reference.quantize_reference import codes_of, finite_amax, with_transpose
from jaxfp8._call.reference.rows_reference import NormForm, activated, rounded_to, scaled_rows
from jaxfp8._value.spec import array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeSpec:
    """Everything that is known before the data is.

    The operands are `x`; the factor, of the same shape; of a norm the inverse of each row's root
    mean square and, if `centred`, its mean, both float32 [..., 1], then gain and shift [K], of
    `row_dtype` or float32; each where there is one. Then the scales, float32 with axes of size 1.
    The results are for each scale the codes and, if wanted, their transposed copy; then the amax,
    float32 with axes of size 1.

    Attributes:
      dtype: of the codes.
      row_dtype: of the values that are encoded: that of `x`, or narrower where `x` is rounded.
      norm: how a norm is applied; None for an activation and a factor, or a rounding.
      activation: of `x`. Its value is rounded to `row_dtype`.
      has_factor: whether there is an array to multiply by.
      transpose_from: the first of the axes that transposed copies have in front; None for none.
      scales: how many scales there are.
    """

    dtype: np.dtype
    row_dtype: np.dtype
    norm: NormForm | None = None
    activation: str = "none"
    has_factor: bool = False
    transpose_from: int | None = None
    scales: int = 1

    def told(self, x: Any) -> str:
        """The encoding of an array of the type of `x` in words, for messages."""
        return f"the encoding of {array(x)} for training"

    @property
    def of_rows(self) -> int:
        """How many operands have one number for each row."""
        return 0 if self.norm is None else 1 + self.norm.centred

    @property
    def vectors(self) -> int:
        """How many operands are vectors."""
        return 0 if self.norm is None else self.norm.vectors

    @property
    def layouts(self) -> int:
        """How many arrays of codes each scale has."""
        return 1 if self.transpose_from is None else 2


def encoded(x: jax.Array, *others: jax.Array, spec: EncodeSpec) -> list[jax.Array]:
    """Codes and amax by definition; the operands and results are those of `EncodeSpec`."""
    made, scales = others[: -spec.scales], others[-spec.scales :]
    y = rounded_to(_produced(x, *made, spec=spec), spec.row_dtype)
    codes = [codes_of(spec.dtype, y, scale) for scale in scales]
    copies = [copy for one in codes for copy in with_transpose(one, spec.transpose_from)]
    return [*copies, finite_amax(y)]


def _produced(x: jax.Array, *others: jax.Array, spec: EncodeSpec) -> jax.Array:
    if spec.norm is None and x.dtype != spec.row_dtype:
        return x
    if spec.norm is None:
        return activated(x, *others, activation=spec.activation)
    inverse, *vectors = others
    y = x.astype(jnp.float32)
    if spec.norm.centred:
        y = y - vectors.pop(0)
    return scaled_rows(y * inverse, *vectors, form=spec.norm, dtype=spec.row_dtype)
