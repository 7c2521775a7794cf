"""The float parameters of a model, and the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flax import nnx

from jaxfp8._value.changes import Change, change, has_no_row, why_wide
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._replace import modules, variables

# Wrappers: they compute the weights of the layer inside from its variables.
_READERS = (nnx.WeightNorm, nnx.SpectralNorm)


def read_elsewhere(model: nnx.Module, seen: Iterable[str]) -> dict[str, str]:
    """By path of a layer, the reason to leave it: another module reads its float weight.

    Args:
      model: the model.
      seen: paths of layers with weights seen to be read.
    """
    reasons = dict.fromkeys(seen, "something else than the layer reads its weight")
    wrappers = [m for _, m in nnx.iter_modules(model) if isinstance(m, _READERS)]
    inside = {id(m): w for w in wrappers for _, m in nnx.iter_modules(w.layer_instance)}
    for path, module in modules(model):
        if id(module) in inside:
            reasons[path] = f"{type(inside[id(module)]).__name__} reads its weight as floats"
    return reasons


def wide_parameters(model: nnx.Module) -> tuple[list[Change], list[Any]]:
    """Rows of `nnx.Param`s outside layers with 8-bit twins, and the small ones without a row."""
    rows, others = [], []
    for path, holder, param in variables(model, nnx.Param):
        of_layer = isinstance(holder, (EightBitLayer, *TWINS)) and holder is not model
        if of_layer and param is getattr(holder, weight_name(holder)):
            continue
        kind, value = type(holder), param.get_value()
        if has_no_row(kind, path[-1], len(value.shape)):
            others.append(value)
        else:
            rows.append(change("/".join(path), kind, value, value, reason=why_wide(kind)))
    return rows, others


def weight_name(layer: Any) -> str:
    """The attribute for the weight of a layer, Flax's or ours."""
    return "embedding" if isinstance(layer, nnx.Embed) else getattr(layer, "WEIGHT", "kernel")
