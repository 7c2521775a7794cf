"""The parameters of a model that stay in floats, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flax import nnx

from jaxfp8._value.changes import Change, has_no_row, why_wide
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._replace import replace
from jaxfp8.nnx._variables import nbytes
from jaxfp8.nnx._walk import variables

# Wrappers that compute the weights of the layer inside from its variables.
_READERS = (nnx.WeightNorm, nnx.SpectralNorm)


def read_elsewhere(model: nnx.Module, seen: Iterable[str]) -> dict[str, str]:
    """For each layer whose float weight another module reads, by path, the reason to leave it.

    Args:
      model: the model.
      seen: paths of layers whose weight was seen to be read.
    """
    found = dict.fromkeys(seen, "something else than the layer reads its weight")
    wrappers = [m for _, m in nnx.iter_modules(model) if isinstance(m, _READERS)]
    inside = {id(m): w for w in wrappers for _, m in nnx.iter_modules(w.layer_instance)}

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if id(module) in inside:
            found[path] = f"{type(inside[id(module)]).__name__} reads its weight as floats"
        return module

    replace(model, note)
    return found


def wide_parameters(model: nnx.Module) -> tuple[list[Change], list[nnx.Variable]]:
    """Rows of `nnx.Param`s outside layers with 8-bit twins, and the small ones without a row."""
    rows, others = [], []
    for path, holder, param in variables(model, nnx.Param):
        of_layer = isinstance(holder, (EightBitLayer, *TWINS)) and holder is not model
        if of_layer and param is getattr(holder, weight_name(holder)):
            continue
        if has_no_row(type(holder), path[-1], len(param.get_value().shape)):
            others.append(param)
        else:
            rows.append(_row("/".join(path), holder, param))
    return rows, others


def weight_name(layer: Any) -> str:
    """The attribute that holds the weight of a layer, Flax's or ours."""
    return "embedding" if isinstance(layer, nnx.Embed) else getattr(layer, "WEIGHT", "kernel")


def _row(path: str, holder: Any, param: nnx.Variable) -> Change:
    value: Any = param.get_value()
    dtype, size = str(value.dtype), nbytes(param)
    return Change(
        path=path,
        kind=type(holder).__name__,
        shape=tuple(value.shape),
        before=dtype,
        after=dtype,
        recipe="",
        reason=why_wide(type(holder)),
        bytes_before=size,
        bytes_after=size,
    )
