"""Which shapes and dtypes a scale may have beside its weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxfp8._value import dtypes
from jaxfp8._value.qarray import Tiles
from jaxfp8._value.scales import granularity
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _dtypes
from jaxfp8.checkpoint._scheme import Scheme

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
EXPONENTS = ("F8_E8M0", "U8")
_BLOCK = (128, 128)
_MX = (1, 32)


class Grain(NamedTuple):
    """A scale that fits its weight.

    Attributes:
      tiles: as a `QArray` states them.
      shape: the shape of the scale in a `QArray`.
      dtype: its dtype; exponents of powers of two are stored as bytes too.
      words: the granularity, for a table.
    """

    tiles: Tiles | None
    shape: Shape
    dtype: np.dtype
    words: str


class _Candidate(NamedTuple):
    """A granularity: sizes of a tile, the count of tiles on each axis, and how files shape that."""

    words: str
    tiles: Shape
    counts: Shape
    stored: tuple[Shape, ...]


def grain(shape: Shape, code: str, scale: Shape, scale_code: str, scheme: Scheme) -> Grain | str:
    """The granularity of a scale, or a sentence: what it would have to be.

    Args:
      shape, code: of the weight.
      scale, scale_code: shape and dtype of the scale, as the file has them.
      scheme: what the configuration says.
    """
    for found in _candidates(shape, scale, scale_code, scheme):
        one = math.prod(found.counts) == 1
        if scale not in found.stored and not (one and scale in ((), (1,))):
            continue
        dtype = _dtype(code, scale_code, found.words, scheme.kind)
        if dtype is None:
            needs = "exponents serve FP8" if scale_code in EXPONENTS else "it holds no scales"
            return (
                f"{code} in granularity {found.words} needs {dtypes.names(dtypes.SCALE)}: {needs}"
            )
        tiles = granularity(shape, dict(enumerate(found.tiles))).stated_tiles
        return Grain(tiles, () if one else found.counts, dtype, found.words)
    wanted = [str(list(c.counts)) for c in _candidates(shape, scale, scale_code, scheme)]
    what = f"{scheme.granularity or 'any'}{list(scheme.block) if scheme.block else ''}"
    shapes = " or ".join(dict.fromkeys(wanted)) or "two axes"
    return f"{code}[{','.join(map(str, shape))}] in granularity {what} needs {shapes}"


def _dtype(code: str, scale_code: str, words: str, kind: str) -> np.dtype | None:
    """The dtype of a scale; None if it cannot be one."""
    if scale_code in EXPONENTS and code not in FP8 and kind != "int":
        return None  # nothing says that these are integers: pairs of FP4 have such scales
    if scale_code == "U8":
        return dtypes.E8M0 if code in FP8 and words.startswith("block") else None
    dtype = _dtypes.BY_CODE.get(scale_code)
    return dtype if dtype in dtypes.SCALE else None


def _candidates(
    shape: Shape, scale: Shape, scale_code: str, scheme: Scheme
) -> Iterator[_Candidate]:
    whole = tuple(max(n, 1) for n in shape)
    if scheme.granularity in ("", "tensor", "row"):
        ones = (1,) * len(shape)
        yield _Candidate("tensor", whole, ones, ((), (1,), (1, 1), ones))
        if len(shape) > 2:  # experts, each with its own
            yield _per_first(shape, whole)
    if len(shape) < 2:
        return
    batch, (rows, depth) = shape[:-2], shape[-2:]
    ones = (1,) * len(batch)
    if scheme.granularity in ("", "channel", "row"):
        counts = (*batch, rows, 1)
        if not (batch and scheme.columns):
            yield _Candidate("channel", (*ones, 1, whole[-1]), counts, (counts, counts[:-1]))
        if batch:  # experts as [K, N]
            counts = (*batch, 1, depth)
            shapes = (counts, (*batch, depth, 1)) if scheme.columns else (counts,)
            yield _Candidate("channel", (*ones, whole[-2], 1), counts, shapes)
    for block in _blocks(shape, scale, scale_code, scheme):
        n, k = (-(-size // b) for size, b in zip(shape[-2:], block, strict=True))
        counts = (*batch, n, k)
        stored = [counts, (*batch, n, 1, k, 1)]  # ModelOpt keeps the axes of a tile
        if k == 1:
            stored.append((*batch, n))
        if block[0] == 1:
            stored.append((*counts, 1))  # musubi-tuner keeps the axis of a group
        words = f"block {block[0]}x{block[1]}"
        yield _Candidate(words, (*ones, *block), counts, tuple(stored))


def _per_first(shape: Shape, whole: Shape) -> _Candidate:
    """One scale for each index of the first axis: [E], [E, 1] or [E, 1, 1]."""
    counts = (shape[0], *(1,) * (len(shape) - 1))
    stored = tuple(counts[: axes + 1] for axes in range(len(shape)))
    return _Candidate("tensor", (1, *whole[1:]), counts, stored)


def _blocks(shape: Shape, scale: Shape, scale_code: str, scheme: Scheme) -> list[tuple[int, int]]:
    """Possible block sizes of a scale: the config's, else the common ones."""
    if scheme.block is not None:
        return [scheme.block]
    if scheme.granularity:
        return []
    if scale_code in EXPONENTS:
        return [_MX, _BLOCK]
    scale = scale[:-1] if len(scale) > len(shape) and scale[-1] == 1 else scale
    if len(scale) < 2 or 0 in scale[-2:]:
        return [_BLOCK]
    (rows, depth), (n, k) = shape[-2:], scale[-2:]
    size = rows // n, depth // k
    # Scales of one row beside many are those of the parts of a fused weight in some files. Nothing
    # says so, and blocks of columns would be other numbers.
    is_group = n == rows or (size[0] == size[1] and n > 1 and k > 1)
    exact = rows % n == 0 and depth % k == 0 and is_group
    return [_BLOCK, *([size] if exact else [])]
