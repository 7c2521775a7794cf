"""The steps of a call after its dot: one class for each kind."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxfp8._rewrite.ir.factors import Factors
from jaxfp8._rewrite.ir.graph import Op, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
    """Multiply by factors over the output of the dot."""

    factors: Factors


@dataclasses.dataclass(frozen=True, eq=False)
class Bias:
    """Add an array of the output's rank; axes of size 1 broadcast."""

    value: Value


@dataclasses.dataclass(frozen=True, eq=False)
class Residual:
    """Add an array of the output's shape."""

    value: Value


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """Apply an activation with a result of `dtype`."""

    name: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Cast:
    """Convert to a float dtype."""

    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """Clip to bounds; None is no bound."""

    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """Round to the nearest whole number, ties to even."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quantize:
    """Convert to an 8-bit dtype."""

    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A transpose or a reshape."""

    op: Op


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """The value under another name."""


Step = Scale | Bias | Residual | Activation | Cast | Clip | Round | Quantize | View | Same
