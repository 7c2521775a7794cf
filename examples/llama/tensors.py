"""Tensors of a checkpoint in another form, each made when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxfp8
from llama.names import HEAD, TOKENS


class Floats(Mapping[str, Any]):
    """The tensors of a checkpoint with 8-bit weights as the floats that they stand for."""

    def __init__(self, tensors: Mapping[str, Any], dtype: Any) -> None:
        self.tensors, self.dtype = tensors, dtype

    def __getitem__(self, name: str) -> jax.Array:
        tensor = self.tensors[name]
        if isinstance(tensor, jaxfp8.QArray):
            return jaxfp8.dequantize(tensor, self.dtype)
        return tensor.astype(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shape(self, name: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a tensor; `jaxfp8.nnx.load` asks for them before it reads any."""
        return jax.ShapeDtypeStruct(shape(self.tensors, name).shape, self.dtype)


class HeadIn8Bits(Mapping[str, Any]):
    """The tensors of a checkpoint with the head in FP8, a scale for each token.

    A tied head becomes a tensor of its own. The table of tokens stays as it is. A head that is in 8
    bits already stays, too.
    """

    def __init__(self, tensors: Mapping[str, Any], tied: bool) -> None:
        self.tensors, self.source = tensors, TOKENS if tied else HEAD

    def __getitem__(self, name: str) -> Any:
        if name != HEAD:
            return self.tensors[name]
        table = self.tensors[self.source]
        return table if isinstance(table, jaxfp8.QArray) else _narrow(table)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self.tensors if name != HEAD)
        yield HEAD

    def __len__(self) -> int:
        return len({*self.tensors, HEAD})

    def shape(self, name: str) -> Any:
        """Shape and dtype of a tensor, without a look at its values."""
        if name != HEAD:
            return shape(self.tensors, name)
        table = shape(self.tensors, self.source)
        return table if isinstance(table, jaxfp8.QArray) else jax.eval_shape(_narrow, table)


@jax.jit
def _narrow(table: jax.Array) -> jaxfp8.QArray:
    """A table [vocabulary, width] in FP8 with a scale for each row."""
    return jaxfp8.quantize(table, jnp.float8_e4m3fn, channelwise_axes=(0,))


def shape(tensors: Mapping[str, Any], name: str) -> Any:
    """Shape and dtype of a tensor; an open checkpoint tells them without reading it."""
    tell = getattr(tensors, "shape", None)
    return tensors[name] if tell is None else tell(name)
