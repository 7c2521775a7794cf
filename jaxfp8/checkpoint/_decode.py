"""From the bytes of a tensor to the values of an array: one small reader for each way to store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfp8.checkpoint import _dtypes
from jaxfp8.checkpoint._file import File, Index
from jaxfp8.checkpoint._items import Part

# bitsandbytes stores the largest magnitude of a row, the code 127.
_SCB_CODES = np.float32(127)


def values(file: File, part: Part, index: Index) -> np.ndarray:
    """The values of a slice.

    Args:
      file: the file of the tensor.
      part: the array.
      index: a slice of step 1 for each of its axes.
    """
    return _READERS[part.decode](file, part, index)


def _plain(file: File, part: Part, index: Index) -> np.ndarray:
    if part.entry.shape == part.shape:
        found = file.read(part.entry, index)
    else:  # a scale in another shape: it is small
        found = file.read(part.entry).reshape(part.shape)[index]
    return found.view(part.dtype) if found.dtype != part.dtype else found


def _packed(file: File, part: Part, index: Index) -> np.ndarray:
    """Codes of four to an int32 along the last axis, lowest byte first, code + 128."""
    *outer, last = index
    start, stop, _ = last.indices(part.shape[-1])
    words = slice(start // _dtypes.IN_A_WORD, -(-stop // _dtypes.IN_A_WORD))
    codes = _signed(file.read(part.entry, (*outer, words)))
    first = start - words.start * _dtypes.IN_A_WORD
    return np.ascontiguousarray(codes[..., first : first + stop - start])


def _packed_rows(file: File, part: Part, index: Index) -> np.ndarray:
    """The same along the last axis but one, of a small tensor."""
    turned = np.ascontiguousarray(np.swapaxes(file.read(part.entry), -1, -2))
    rows = part.shape[-2] if len(part.shape) > 1 else 1
    whole = np.swapaxes(_signed(turned), -1, -2)[..., :rows, :]
    return np.ascontiguousarray(whole.reshape(part.shape)[index])


def _signed(words: np.ndarray) -> np.ndarray:
    """The codes in words, in place."""
    codes = words.astype("<i4", copy=False).view(np.uint8)
    np.bitwise_xor(codes, _dtypes.SIGN, out=codes)
    return codes.view(np.int8)


def _over_127(file: File, part: Part, index: Index) -> np.ndarray:
    return (_plain(file, part, index) / _SCB_CODES).astype(part.dtype)


def _one(file: File, part: Part, index: Index) -> np.ndarray:
    """The scale of a weight that is its codes."""
    return np.ones(part.shape, part.dtype)[index]


_READERS: dict[str, Callable[[File, Part, Any], np.ndarray]] = {
    "": _plain,
    "packed": _packed,
    "packed rows": _packed_rows,
    "over 127": _over_127,
    "one": _one,
}
