"""What a checkpoint becomes: arrays, and weights in 8 bits with their scales."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint._header import Entry


class Part(NamedTuple):
    """One array, made of one tensor of a file.

    Attributes:
      entry: the tensor.
      dtype: the dtype of its values.
      shape: the shape of the array.
      decode: how the file stores the values, as `_decode` names it; "" as they are.
    """

    entry: Entry
    dtype: np.dtype
    shape: Shape
    decode: str = ""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return 0 if self.decode == "one" else self.entry.nbytes


class Item(NamedTuple):
    """The entry of a checkpoint under one name: an array, or a weight with its scale.

    Attributes:
      name: its name.
      value: the values.
      scale, zero_point: for a weight in 8 bits; else None.
      tiles: as a `QArray` states them.
      granularity: of the scale, in words; "" for an array.
      activations: the checkpoint's treatment of the layer's input, in words.
      inputs: the same in the words of compressed-tensors, as JSON; "" for other writers.
      reason: why an array is no 8-bit weight; "" for an 8-bit weight.
      writer: the program that names tensors so; "" for several.
    """

    name: str
    value: Part
    scale: Part | None = None
    zero_point: Part | None = None
    tiles: tuple[int | None, ...] | None = None
    granularity: str = ""
    activations: str = ""
    inputs: str = ""
    reason: str = ""
    writer: str = ""

    @property
    def parts(self) -> list[Part]:
        """All arrays of it."""
        return [part for part in (self.value, self.scale, self.zero_point) if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        scale, zero = self.scale, self.zero_point
        wide = self.value.nbytes + (scale.nbytes if scale else 0)
        return wide + (zero.nbytes if zero else 0)

    def struct(self) -> jax.ShapeDtypeStruct | QArray:
        """Shapes and dtypes alone."""
        if self.scale is None:
            return self.value.struct
        zero = None if self.zero_point is None else self.zero_point.struct
        leaves: tuple = self.value.struct, self.scale.struct, zero
        return QArray(*leaves, tiles=self.tiles)
