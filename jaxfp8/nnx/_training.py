"""Switches the layers of an nnx model to FP8 training, in place, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxfp8._recipes.recipes import TrainingRecipe
from jaxfp8._recipes.selection import Selection, Where
from jaxfp8._value.errors import message
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import SLOTS, stop_training_in_fp8, training_product
from jaxfp8.nnx._quantize import why_unfit
from jaxfp8.nnx._replace import replace

_OPERATION = "jaxfp8.nnx.fp8_training"


def fp8_training(
    model: nnx.Module, recipe: TrainingRecipe | None = None, *, where: Where = None
) -> Sequence[str]:
    """Makes the layers of a live model train in FP8, in place; parameters stay as they are.

    Every `nnx.Linear`, `LinearGeneral` and `Einsum` gets a product of its own, `Fp8DotGeneral` or
    `Fp8Einsum`. Parameters and optimisers stay as they are. `nnx.jit`, `nnx.grad`, `nnx.remat`,
    `nnx.scan` and `nnx.vmap` treat the scaling state like batch statistics, and
    `nnx.Optimizer(model, tx, wrt=nnx.Param)` ignores it.

    Args:
      model: changed in place.
      recipe: `jaxfp8.DelayedScaling` (default) or `jaxfp8.CurrentScaling`.
      where: which layers: a regular expression that is searched in the path, a collection of
        paths, or a function of path and module. By default all.

    Returns:
      The paths of the layers that changed.

    Raises:
      TypeError: `recipe` is one for inference.
      ValueError: a chosen layer has 8-bit weights, or no layer is chosen.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
      ['layers/0']
    """
    selects = Selection(_OPERATION, "where", where)
    chosen: list[tuple[str, Any]] = []

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer) and selects(path, module):
            got, needs = f"`{path}` has 8-bit weights", "training needs float master weights"
            remedy = "choose others in `where`, or undo it with `jaxfp8.nnx.dequantize`"
            raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
        fit = type(module) in SLOTS and not why_unfit(module) and not training_product(module)
        if fit and selects(path, module):
            chosen.append((path, module))
        return module

    replace(model, note)
    if not chosen:
        if unmatched := selects.unmatched():
            raise ValueError(unmatched)
        got, needs = "has no layer to change", "an nnx.Linear, LinearGeneral or Einsum is needed"
        remedy = "name one in `where`; those with a `dot_general` of their own are passed over"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    for path, layer in chosen:
        slot, kind = SLOTS[type(layer)]
        stack = layer.kernel[...].shape[: layer.kernel[...].ndim - _rank(layer)]
        setattr(layer, slot, nnx.data(kind(recipe, path=path, stack=stack)))
    return [path for path, _ in chosen]


def undo_fp8_training(model: nnx.Module, *, where: Where = None) -> Sequence[str]:
    """Makes the layers of a live model multiply in floats again, in place: undoes `fp8_training`.

    Parameters stay as they are; the scaling state is dropped.

    Args:
      model: changed in place.
      where: which layers, as in `fp8_training`; by default all.

    Returns:
      The paths of the layers that changed.

    Raises:
      ValueError: no chosen layer trains in FP8.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
      >>> jaxfp8.nnx.undo_fp8_training(model)
      ['layers/0']
    """
    operation = "jaxfp8.nnx.undo_fp8_training"
    selects = Selection(operation, "where", where)
    chosen = [(path, layer) for path, layer in training_layers(model) if selects(path, layer)]
    if not chosen:
        if unmatched := selects.unmatched():
            raise ValueError(unmatched)
        got, needs = "has no such layer that trains in FP8", "there is nothing to undo"
        remedy = "`jaxfp8.nnx.dequantize` undoes `jaxfp8.nnx.quantize`"
        raise ValueError(message(operation, "`model`", got, needs, remedy))
    for _, layer in chosen:
        stop_training_in_fp8(layer)
    return [path for path, _ in chosen]


def training_layers(model: nnx.Module) -> list[tuple[str, Any]]:
    """Paths and layers that train in FP8."""
    found: list[tuple[str, Any]] = []

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if training_product(module) is not None:
            found.append((path, module))
        return module

    replace(model, note)
    return found


def _rank(layer: Any) -> int:
    """Rank of the kernel of a layer that is not stacked."""
    return len(TWINS[type(layer)].shape_of(layer))
