"""Sizes of products: of known models, and as users write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# N x K of the weights of a layer, and of the last product if there is one.
MODELS = {
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "minilm": ((384, 384), (1536, 384), (384, 1536)),
}
TABLE = "table"
ROWS = (1, 16, 256)
_ITEM = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")
FORM = f"{TABLE}, or models ({', '.join(MODELS)}) and sizes (NxK, MxNxK) with commas between"


def shapes(text: str, rows: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """M, N and K of the requested products, such as "minilm,4096x4096,1x14336x4096"."""
    items = [item.strip() for item in text.split(",")]
    asked = [shape for item in items for shape in _written(item, rows)]
    if rows is not None and all(item.count("x") == 2 for item in items):
        raise ValueError(f"--rows goes with models and NxK; {text!r} has rows of its own")
    return asked


def rows_of(text: str) -> list[int]:
    """Numbers of rows such as "1,16,256"."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise ValueError(f"{text!r} is not a list of rows such as 1,16,256")
    return [int(item) for item in items]


def _written(item: str, rows: Sequence[int] | None) -> Iterator[tuple[int, int, int]]:
    if item in MODELS:
        yield from ((m, n, k) for n, k in MODELS[item] for m in rows or ROWS)
        return
    parts = _ITEM.fullmatch(item)
    if not parts or 0 in (sizes := [int(size) for size in parts.groups() if size]):
        raise ValueError(f"{item!r} is none of {FORM}")
    n, k = sizes[-2:]
    for m in sizes[:-2] or rows or ROWS:
        yield m, n, k
