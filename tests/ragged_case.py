"""Ragged dots with random operands, and their values in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8 import QArray

Tile = tuple[int, int]
# Roundings of float32 sums, as in `oracle`. And what tensor cores cut off of FP8: they align 32
# products, and the sum, with the largest of them, and keep some 13 bits of it.
_ROUNDING, FP8_LOSS = 2.0**-24, 2.0**-8


def codes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random codes, all finite; of 16 bits random values."""
    if is_wide(dtype):
        return rng.standard_normal(shape).astype(np.dtype(dtype))
    drawn = rng.integers(0, 256, shape, np.uint8).view(np.dtype(dtype))
    return np.where(np.isfinite(drawn.astype(np.float32)), drawn, 1).astype(np.dtype(dtype))


def is_wide(dtype: str) -> bool:
    """Whether values have 16 bits, and no scale."""
    return dtype in ("bfloat16", "float16")


def spread(factor: np.ndarray, shape: tuple[int, ...], tiles: tuple[int, ...]) -> np.ndarray:
    """A factor of tiles, repeated for each value."""
    for axis, (size, tile) in enumerate(zip(shape, tiles, strict=True)):
        factor = np.take(np.repeat(factor, tile, axis), range(size), axis)
    return factor.astype(np.float64)


def with_nan(q: QArray, wide: np.ndarray, *places: object) -> tuple[QArray, np.ndarray]:
    """An FP8 operand, and the same dequantized, with NaN at these indices."""
    values, wide = q.qvalue, wide.copy()
    for place in places:
        values, wide[place] = values.at[place].set(jnp.asarray(np.nan, values.dtype)), np.nan
    return dataclasses.replace(q, qvalue=values), wide


def _stored(
    values: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    tiles: tuple[int, ...],
    k_first: bool,
) -> QArray:
    """A `QArray`, or its matrices transposed."""
    parts = [None if x is None else jnp.asarray(x) for x in (values, scale, zero)]
    if k_first:
        parts = [None if x is None else x.mT for x in parts]
        tiles = (*tiles[:-2], tiles[-1], tiles[-2])
    return QArray(parts[0], parts[1], parts[2], tiles=tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged:
    """A problem; tiles are (rows, K) and (columns, K), rows of one group where it is masked.

    What the groups divide is "rows", "masked" rows of each, or the axis "contracted". rhs may have
    zero points, and be stored `k_first`, [G, K, N].
    """

    sizes: tuple[int, ...]
    rows: int
    columns: int
    depth: int
    lhs: str = "float8_e4m3fn"
    rhs: str = "float8_e4m3fn"
    lhs_tile: Tile = (1, 128)
    rhs_tile: Tile = (128, 128)
    grouping: str = "rows"
    zero_points: bool = False
    k_first: bool = False

    def draw(self, seed: int = 0) -> tuple[Any, Any, tuple[np.ndarray, np.ndarray]]:
        """lhs, and rhs stored as [G, N, K] or [N, K]; and both dequantized in float64.

        16-bit values are an array, others a `QArray`.
        """
        rng, groups = np.random.default_rng(seed), (len(self.sizes),)
        of_lhs = groups if self.grouping == "masked" else ()
        of_rhs = () if self.grouping == "contracted" else groups
        sides: list[Any] = []
        wide = []
        for lead, lines, dtype, tile in (
            (of_lhs, self.rows, self.lhs, self.lhs_tile),
            (of_rhs, self.columns, self.rhs, self.rhs_tile),
        ):
            shape, tiles = (*lead, lines, self.depth), (*(1 for _ in lead), *tile)
            tiles = tuple(min(t, n) for t, n in zip(tiles, shape, strict=True))
            values = codes(rng, shape, dtype)
            if is_wide(dtype):
                sides.append(jnp.asarray(values))
                wide.append(values.astype(np.float64))
                continue
            counts = [-(-size // t) for size, t in zip(shape, tiles, strict=True)]
            scale = rng.uniform(0.5, 2, counts).astype(np.float32)
            zero = None
            exact = values.astype(np.float64)
            if self.zero_points and sides:
                zero = codes(rng, tuple(counts), dtype)
                exact = exact - spread(zero, shape, tiles)
            wide.append(exact * spread(scale, shape, tiles))
            sides.append(_stored(values, scale, zero, tiles, bool(sides) and self.k_first))
        return sides[0], sides[1], (wide[0], wide[1])

    def groups_along(self, size: int) -> np.ndarray:
        """The group of each position along an axis that the groups divide, -1 for none."""
        sizes = np.clip(self.sizes, 0, size)
        groups = np.repeat(np.arange(len(sizes)), sizes)[:size]
        return np.pad(groups, (0, size - len(groups)), constant_values=-1)

    def outside(self) -> np.ndarray:
        """Which rows of the output are of no group, or of one without positions."""
        if self.grouping == "rows":
            return self.groups_along(self.rows) < 0
        if self.grouping == "masked":
            return np.arange(self.rows) >= np.asarray(self.sizes)[:, None]
        own = self.groups_along(self.depth)
        return ~np.isin(np.arange(len(self.sizes)), own)[:, None].repeat(self.rows, 1)

    def product(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        """The product of these values, [M, N] or [G, M, N]."""
        groups = range(len(self.sizes))
        if self.grouping == "contracted":
            own = self.groups_along(self.depth)
            return np.stack([lhs[:, own == g] @ rhs[:, own == g].T for g in groups])
        if self.grouping == "masked":
            return np.where(self.outside()[..., None], 0, lhs @ rhs.swapaxes(1, 2))
        y, own = np.zeros((self.rows, self.columns)), self.groups_along(self.rows)
        for group in groups:
            y[own == group] = lhs[own == group] @ rhs[group].T
        return y

    def expected(self, wide: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The product in float64, and the sum of the magnitudes of its terms."""
        return self.product(*wide), self.product(*map(abs, wide))

    def assert_right(self, y: np.ndarray, wide: tuple[np.ndarray, np.ndarray], loss: float) -> None:
        """Asserts that an output is the product, within its bound; NaN as there, 0 outside."""
        wanted, size = self.expected(wide)
        last = {2: 2.0**-8 if y.dtype == jnp.bfloat16 else 2.0**-11, 4: 2.0**-24}[y.itemsize]
        bound = 1.2 * ((self.depth + 8) * _ROUNDING + loss) * size + 1.1 * last * abs(wanted)
        found = y.astype(np.float64)
        right = (abs(found - wanted) <= bound) | (np.isnan(found) & np.isnan(wanted))
        assert y.shape == wanted.shape
        assert np.all(right), f"{np.sum(~right)} of {right.size} outputs"
        assert not np.any(y[self.outside()].astype(np.float64))
