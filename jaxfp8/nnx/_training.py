"""Switches the layers of an nnx model to FP8 training, in place."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxfp8._recipes.recipes import DelayedScaling, TrainingRecipe
from jaxfp8._recipes.selection import Selection, Where
from jaxfp8._value.changes import Change, Changes
from jaxfp8._value.errors import message
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import SLOTS, training_product
from jaxfp8.nnx._quantize import row, why_unfit
from jaxfp8.nnx._replace import modules

_OPERATION = "jaxfp8.nnx.fp8_training"


def fp8_training(
    model: nnx.Module, recipe: TrainingRecipe | None = None, *, where: Where = None
) -> Changes:
    """Makes the layers of a live model train in FP8, in place; parameters stay as they are.

    Every `nnx.Linear`, `LinearGeneral` and `Einsum` gets a product of its own, `Fp8DotGeneral` or
    `Fp8Einsum`. Parameters and optimisers stay as they are. `nnx.jit`, `nnx.grad`, `nnx.remat`,
    `nnx.scan` and `nnx.vmap` treat the scaling state like batch statistics, and
    `nnx.Optimizer(model, tx, wrt=nnx.Param)` ignores it. `dequantize` undoes it.

    Args:
      model: changed in place.
      recipe: `jaxfp8.DelayedScaling` (default) or `jaxfp8.CurrentScaling`.
      where: which layers: a regular expression to search in the path, a collection of paths, or a
        function of path and module. By default all.

    Returns:
      A row for each layer: the change, or the reason against it.

    Raises:
      TypeError: `recipe` is one for inference.
      ValueError: a chosen layer has 8-bit weights, or no layer is chosen.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> changes = jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
      >>> [(row.path, row.recipe) for row in changes.changed]
      [('layers/0', 'CurrentScaling')]
    """
    selects, name = Selection(_OPERATION, "where", where), type(recipe or DelayedScaling()).__name__
    rows: list[Change] = []
    chosen: list[tuple[str, Any]] = []
    for path, module in modules(model):
        if isinstance(module, EightBitLayer) and selects(path, module):
            got, needs = f"`{path}` has 8-bit weights", "training needs float master weights"
            remedy = "choose others in `where`, or undo it with `jaxfp8.nnx.dequantize`"
            raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
        if type(module) in SLOTS:
            reason = _why_left(path, module, selects)
            rows.append(row(path, module, module, reason=reason, recipe=name))
            chosen.extend([] if reason else [(path, module)])
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
    return Changes.of(rows)


def _why_left(path: str, layer: nnx.Module, selects: Selection) -> str:
    """Why a layer stays as it is; "" if it is to train in FP8."""
    reason = why_unfit(layer)
    if not reason and training_product(layer) is not None:
        reason = "it trains in FP8 already"
    return reason or ("" if selects(path, layer) else "`where` does not choose it")


def training_layers(model: nnx.Module) -> list[tuple[str, Any]]:
    """Paths and layers in FP8 training."""
    return [item for item in modules(model) if training_product(item[1]) is not None]


def _rank(layer: Any) -> int:
    """Rank of the kernel of an unstacked layer."""
    return len(TWINS[type(layer)].shape_of(layer))
