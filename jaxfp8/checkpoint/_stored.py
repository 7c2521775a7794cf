"""The tensors of a weight as servers have them.

Beside floats they want int8 packed: four codes, each plus 128, in an int32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _dtypes
from jaxfp8.checkpoint._compressed import Held

_SAVE = "jaxfp8.checkpoint.save"


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file: an array, and dtype and shape in the file.

    Attributes:
      array: the values; shape and dtype alone will do for a layout.
      code: the safetensors code of the dtype.
      shape: its shape.
      is_array: whether it is an array of its own, no part of a weight.
    """

    array: Any
    code: str
    shape: Shape
    is_array: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=object)) * _dtypes.BY_CODE[self.code].itemsize


class Lazy:
    """An array, made at the request for its values."""

    def __init__(self, shape: Shape, dtype: np.dtype, make: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype, self._make = shape, dtype, make

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._make(), dtype)


def stored(name: str, q: QArray, form: Held) -> dict[str, Stored]:
    """The tensors of a weight by name, its codes first."""
    parts = {name: q.qvalue, f"{name}_scale": q.scale}
    if q.zero_point is not None:
        parts[f"{name}_zero_point"] = q.zero_point
    made = {}
    for part, array in parts.items():
        code, shape = code_of(part, np.dtype(array.dtype)), tuple(array.shape)
        if part != name and math.prod(shape) == 1:
            shape = (1, 1) if form.strategy == "block" else (1,)
        code = "U8" if form.is_mx and code == "F8_E8M0" else code
        made[part] = Stored(array, code, shape)
    return _packed(name, q) | {f"{name}_scale": made[f"{name}_scale"]} if form.packed else made


def _packed(name: str, q: QArray) -> dict[str, Stored]:
    """The tensors of an int8 weight [N, K] in words, without its scale."""
    zero, shape = q.zero_point, np.asarray(q.shape, np.int64)
    made = {
        f"{name}_packed": _words_of(lambda: on_host(q.qvalue), q.shape),
        f"{name}_shape": Stored(shape, "I64", shape.shape),
    }
    if zero is not None:  # packed along N
        turned = _words_of(lambda: on_host(zero).T, zero.shape[::-1])
        lazy = Lazy(turned.shape[::-1], np.dtype(np.int32), lambda: on_host(turned.array).T)
        made[f"{name}_zero_point"] = Stored(lazy, "I32", lazy.shape)
    return made


def _words_of(codes: Callable[[], np.ndarray], shape: Shape) -> Stored:
    shape = (*shape[:-1], -(-shape[-1] // _dtypes.IN_A_WORD))
    return Stored(Lazy(shape, np.dtype(np.int32), lambda: _words(codes())), "I32", shape)


def _words(codes: np.ndarray) -> np.ndarray:
    """int8 codes, each plus 128, four in a word, the first in the lowest byte."""
    bytes_ = codes.view(np.uint8) ^ np.uint8(_dtypes.SIGN)
    missing = -bytes_.shape[-1] % _dtypes.IN_A_WORD
    padded = np.pad(bytes_, [(0, 0), (0, missing)]) if missing else bytes_
    return np.ascontiguousarray(padded).view("<i4")


def code_of(name: str, dtype: np.dtype) -> str:
    """The safetensors code of a dtype.

    Raises:
      TypeError: safetensors has no code for it.
    """
    if dtype not in _dtypes.CODES:
        needs = f"safetensors holds {', '.join(d.name for d in _dtypes.CODES)}"
        raise TypeError(message(_SAVE, f"`{name}`", f"has dtype {dtype}", needs, "convert it"))
    return _dtypes.CODES[dtype]


def on_host(array: Any) -> np.ndarray:
    """The values of an array, on the host."""
    return np.asarray(jax.device_get(array))
