"""Operands of chosen distributions, or from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

# One value in a thousand is 20 times as large, as in layers of a language model.
_OUTLIERS, _FACTOR = 1e-3, 20.0
# The logarithm of a magnitude has this deviation.
_SPREAD = 1.0
Shape = tuple[int, int, int]
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _outliers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return _normal(rng, shape) * np.where(rng.random(shape) < _OUTLIERS, np.float32(_FACTOR), 1)


def _lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.sign(_normal(rng, shape)) * np.exp(np.float32(_SPREAD) * _normal(rng, shape))


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "outliers": _outliers,
    "lognormal": _lognormal,
}
FORM = f"{', '.join(DISTRIBUTIONS)}, a weight W.npy [K, N], or X.npy,W.npy with x [M, K]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Two operands in float32."""

    name: str  # "MxNxK", and their source
    x: np.ndarray  # [M, K]
    w: np.ndarray  # [K, N]

    @property
    def shape(self) -> Shape:
        """M, N and K."""
        return self.x.shape[0], self.w.shape[1], self.x.shape[1]

    def exact(self) -> np.ndarray:
        """The product in float64."""
        return self.x.astype(np.float64) @ self.w.astype(np.float64)


def drawn(distribution: str, shape: Shape, seed: int = 0) -> Data:
    """Both operands of a distribution; the weight is divided by the root of K."""
    m, n, k = shape
    rng, draw = np.random.default_rng(seed), DISTRIBUTIONS[distribution]
    x, w = draw(rng, (m, k)), draw(rng, (k, n)) / np.float32(np.sqrt(k))
    return Data(name=name_of(shape, distribution), x=x.astype(np.float32), w=w.astype(np.float32))


def name_of(shape: Shape, source: str) -> str:
    """As `16x4096x4096 normal`."""
    return f"{'x'.join(map(str, shape))} {source}"


def loaded(text: str, rows: int) -> Data:
    """The operands in files: "W.npy", with `rows` rows of normal values, or "X.npy,W.npy"."""
    paths = text.split(",")
    if len(paths) > 2:
        raise ValueError(f"--data {text}: that is none of {FORM}")
    arrays = [_matrix(path) for path in paths]
    w = arrays[-1]
    if len(arrays) == 1:
        x = _normal(np.random.default_rng(0), (rows, w.shape[0]))
    else:
        x = arrays[0]
    if x.shape[1] != w.shape[0]:
        raise ValueError(
            f"--data {text}: x is {list(x.shape)} and w {list(w.shape)}; they need to be [M, K] "
            "and [K, N]"
        )
    return Data(name=name_of((len(x), w.shape[1], len(w)), text), x=x, w=w)


def _matrix(path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--data {path}: it cannot be read as a .npy file: {error}") from error
    is_float = isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)
    if not is_float or array.ndim != 2 or 0 in array.shape:
        held = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else "no array"
        raise ValueError(f"--data {path}: it holds {held}; a matrix of floats is needed")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"--data {path}: it holds NaN or infinities; errors would be NaN")
    return array
