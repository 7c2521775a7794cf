"""Text as token ids, where the `tokenizers` library and the folder's tokenizer.json are there."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any


def tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder.

    Raises:
      ValueError: it, or the library, is missing; it says what to do.
    """
    place = pathlib.Path(folder)
    path = (place.parent if place.is_file() else place) / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} is missing; give token ids with --ids")
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("`pip install tokenizers` for text, or give token ids with --ids")
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path))


def parse(text: str) -> list[int]:
    """Ids from a text such as "1,15043,29871"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--ids: {text!r} is not a list of numbers, such as 1,15043") from error


def joined(ids: Sequence[int]) -> str:
    """The inverse of `parse`."""
    return ",".join(map(str, ids))
