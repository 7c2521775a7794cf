"""Ragged dots with random operands, and their values in float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxfp8 import QArray

Tile = tuple[int, int]
# As in `oracle`: roundings of float32 sums, and what tensor cores cut off of FP8.
_ROUNDING, FP8_LOSS = 2.0**-24, 2.0**-10


def codes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random codes, all finite."""
    drawn = rng.integers(0, 256, shape, np.uint8).view(np.dtype(dtype))
    return np.where(np.isfinite(drawn.astype(np.float32)), drawn, 1).astype(np.dtype(dtype))


def factor(
    rng: np.random.Generator, shape: tuple[int, ...], tiles: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Scales of tiles, and the same repeated for each value."""
    counts = [-(-size // tile) for size, tile in zip(shape, tiles, strict=True)]
    scale = rng.uniform(0.5, 2, counts).astype(np.float32)
    each = scale
    for axis, (size, tile) in enumerate(zip(shape, tiles, strict=True)):
        each = np.take(np.repeat(each, tile, axis), range(size), axis)
    return scale, each.astype(np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged:
    """A problem; tiles are (rows, K) and (columns, K), rows of one group where it is masked."""

    sizes: tuple[int, ...]
    rows: int
    columns: int
    depth: int
    lhs: str = "float8_e4m3fn"
    rhs: str = "float8_e4m3fn"
    lhs_tile: Tile = (1, 128)
    rhs_tile: Tile = (128, 128)
    masked: bool = False

    def draw(self, seed: int = 0) -> tuple[QArray, QArray, tuple[np.ndarray, np.ndarray]]:
        """lhs, and rhs stored as [G, N, K]; and both dequantised in float64."""
        rng, groups = np.random.default_rng(seed), len(self.sizes)
        lead = ((groups,), (1,)) if self.masked else ((), ())
        sides, wide = [], []
        for shape, dtype, tiles in (
            ((*lead[0], self.rows, self.depth), self.lhs, (*lead[1], *self.lhs_tile)),
            ((groups, self.columns, self.depth), self.rhs, (1, *self.rhs_tile)),
        ):
            tiles = tuple(min(t, n) for t, n in zip(tiles, shape, strict=True))
            values, (scale, each) = codes(rng, shape, dtype), factor(rng, shape, tiles)
            sides.append(QArray(jnp.asarray(values), jnp.asarray(scale), tiles=tiles))
            wide.append(values.astype(np.float64) * each)
        return sides[0], sides[1], (wide[0], wide[1])

    def group_of_row(self) -> np.ndarray:
        """The group of each row, -1 for none; [G, M] where it is masked."""
        sizes = np.clip(self.sizes, 0, None)
        if self.masked:
            rows = np.arange(self.rows)[None] < sizes[:, None]
            return np.where(rows, np.arange(len(sizes))[:, None], -1)
        groups = np.repeat(np.arange(len(sizes)), np.minimum(sizes, self.rows))[: self.rows]
        return np.pad(groups, (0, self.rows - len(groups)), constant_values=-1)

    def expected(self, wide: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The product in float64, and the sum of the magnitudes of its terms."""
        lhs, rhs = wide
        groups = self.group_of_row()
        y = np.zeros((*groups.shape, self.columns))
        size = np.zeros_like(y)
        for group in range(len(self.sizes)):
            own = groups == group
            y[own] = lhs[own] @ rhs[group].T
            size[own] = abs(lhs[own]) @ abs(rhs[group]).T
        return y, size

    def assert_right(self, y: np.ndarray, wide: tuple[np.ndarray, np.ndarray], loss: float) -> None:
        """Asserts that an output is the product, within its bound, and 0 where no group is."""
        wanted, size = self.expected(wide)
        last = {2: 2.0**-8 if y.dtype == jnp.bfloat16 else 2.0**-11, 4: 2.0**-24}[y.itemsize]
        bound = 1.2 * ((self.depth + 8) * _ROUNDING + loss) * size + 1.1 * last * abs(wanted)
        error = abs(y.astype(np.float64) - wanted)
        assert y.shape == wanted.shape
        assert np.all(error <= bound), f"{np.sum(error > bound)} of {error.size} outputs"
        assert not np.any(y[self.group_of_row() < 0].astype(np.float64))
