"""What a checkpoint becomes: arrays, and weights in 8 bits with their scales."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

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


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How tensors become an array, or a weight with its scale. Thousands of experts share one.

    Attributes:
      value: the values, of the first item with this layout.
      scale, zero_point: for a weight in 8 bits; else None.
      tiles: as a `QArray` states them.
      granularity: of the scale, in words; "" for an array.
      activations: the checkpoint's treatment of the layer's input, in words.
      inputs: the same in the words of compressed-tensors, as JSON; "" for other writers.
      reason: why an array is no 8-bit weight; "" for an 8-bit weight.
      writer: the program that names tensors so; "" for several.
    """

    value: Part
    scale: Part | None = None
    zero_point: Part | None = None
    tiles: tuple[int | None, ...] | None = None
    granularity: str = ""
    activations: str = ""
    inputs: str = ""
    reason: str = ""
    writer: str = ""

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """All arrays of it."""
        parts = (self.value, self.scale, self.zero_point)
        return tuple(part for part in parts if part is not None)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in self.parts)

    def item(self, name: str) -> Item:
        """The first item with this layout."""
        return Item(name, self, tuple(part.entry for part in self.parts))


class Item(NamedTuple):
    """The entry of a checkpoint under one name.

    Attributes:
      name: its name.
      layout: how it is read.
      entries: the tensors of its parts.
    """

    name: str
    layout: Layout
    entries: tuple[Entry, ...]

    @property
    def parts(self) -> list[Part]:
        """All arrays of it: the values, a scale, a zero point."""
        pairs = zip(self.layout.parts, self.entries, strict=True)
        return [part._replace(entry=entry) for part, entry in pairs]

    @property
    def value(self) -> Part:
        """The values."""
        return self.parts[0]

    @property
    def scale(self) -> Part | None:
        """The scale of a weight in 8 bits."""
        return self.parts[1] if self.layout.scale else None

    @property
    def zero_point(self) -> Part | None:
        """The zero point of a weight in 8 bits."""
        return self.parts[2] if self.layout.zero_point else None

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.layout.nbytes

    def struct(self) -> jax.ShapeDtypeStruct | QArray:
        """Shapes and dtypes alone."""
        leaves: Any = [part.struct for part in self.layout.parts]
        return leaves[0] if len(leaves) == 1 else QArray(*leaves, tiles=self.layout.tiles)
