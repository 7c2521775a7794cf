"""Errors of arrays against exact ones: the measures of all reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """The error of an array, or of several together.

    Attributes:
      name: the measured array or product.
      signal: sum of squares of the exact values.
      noise: sum of squares of the differences.
      max_abs: largest absolute difference.
    """

    name: str = ""
    signal: float
    noise: float
    max_abs: float

    @property
    def relative_l2(self) -> float:
        """`|got - exact| / |exact|` in the Euclidean norm; 0 if they are equal."""
        if self.noise == 0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise, `20 log10(1 / relative_l2)`, in dB; inf if equal."""
        return decibels(self.signal, self.noise)

    def __str__(self) -> str:
        named = f"{self.name}: " if self.name else ""
        return (
            f"{named}SQNR {self.sqnr:.1f} dB, relative L2 error {self.relative_l2:.3g}, "
            f"largest difference {self.max_abs:.3g}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The error of one program's outputs against another's.

    Attributes:
      total: over all float outputs.
      outputs: of each float output, named by its place.
    """

    total: Error
    outputs: tuple[Error, ...]

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise of all outputs, in dB."""
        return self.total.sqnr

    @property
    def relative_l2(self) -> float:
        """Relative Euclidean error of all outputs."""
        return self.total.relative_l2

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of all outputs."""
        return self.total.max_abs

    def __str__(self) -> str:
        rows = self.outputs if len(self.outputs) > 1 else ()
        return "\n".join([str(self.total), *(f"  {row}" for row in rows)])


def decibels(signal: float, noise: float) -> float:
    """`10 log10(signal / noise)`: inf without noise, -inf without signal, NaN for NaN."""
    if noise == 0 or signal == 0:
        return math.inf if noise == 0 else -math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if noise < math.inf else -math.inf


def error(exact: Any, got: Any, name: str = "") -> Error:
    """The error of `got`; sums are taken in float64, on the host."""
    exact, got = (np.asarray(jax.device_get(x), np.float64) for x in (exact, got))
    difference = got - exact
    return Error(
        name=name,
        signal=float(np.sum(exact**2)),
        noise=float(np.sum(difference**2)),
        max_abs=float(np.max(np.abs(difference), initial=0)),
    )


def pooled(errors: Iterable[Error]) -> Error:
    """The error of several arrays together."""
    errors = tuple(errors)
    return Error(
        name="",
        signal=sum(e.signal for e in errors),
        noise=sum(e.noise for e in errors),
        max_abs=max((e.max_abs for e in errors), default=0.0),
    )


def compare(exact: Any, got: Any) -> Comparison:
    """Compares the float leaves of two pytrees of one structure."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    rows = zip(jax.tree.leaves(exact), jax.tree.leaves(got), names, strict=True)
    errors = tuple(error(*row) for row in rows if _is_float(row[1]))
    return Comparison(total=pooled(errors), outputs=errors)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float) or jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating)
