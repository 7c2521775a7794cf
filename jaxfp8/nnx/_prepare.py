"""The 8-bit weights of a live model as the CPU's kernels read them, in place; and as they were."""

from __future__ import annotations

import dataclasses

from flax import nnx

from jaxfp8._value.changes import Change, Changes
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._quantize import check_module, row
from jaxfp8.nnx._replace import replace


def prepare(model: nnx.Module) -> Changes:
    """Lays the 8-bit weights of a live model out as the CPU's kernels read them, in place.

    Once, where a model is loaded for inference: see `jaxfp8.prepare`. On a GPU nothing changes.
    The state of the model then holds the weights so laid out. Checkpoints should hold them as they
    were, for any machine: load a checkpoint first, and `unprepare` before you save one.

    Args:
      model: changed in place; `unprepare` takes it back, `dequantize` to floats.

    Returns:
      What became of each 8-bit layer, and why of one that was left.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8)
      >>> len(jaxfp8.nnx.prepare(model).changed), model.layers[0].weight
      (1, PreparedArray(int8[64,64], contracting=-2))
    """
    check_module("jaxfp8.nnx.prepare", model)
    rows: list[Change] = []
    chosen: list[EightBitLayer] = []

    def visit(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            reason = module.why_not_prepared()
            found = row(path, module, module, reason)
            rows.append(found if reason else dataclasses.replace(found, after="prepared"))
            chosen.extend([] if reason else [module])
        return module

    visit("", model)
    replace(model, visit)
    for layer in chosen:
        layer.prepare()
    return Changes(rows=tuple(rows))


def unprepare(model: nnx.Module) -> Changes:
    """Lays the weights of a live model out as they were, in place: undoes `prepare`, bit for bit.

    Args:
      model: changed in place, layer by layer, so that no two copies of the weights are held.

    Returns:
      What became of each 8-bit layer, and why of one that was left.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8), jaxfp8.nnx.prepare(model)
      >>> len(jaxfp8.nnx.unprepare(model).changed), model.layers[0].weight
      (1, QArray(int8[64,64], scale=float32[1,64]))
    """
    check_module("jaxfp8.nnx.unprepare", model)
    rows: list[Change] = []
    chosen: list[EightBitLayer] = []

    def visit(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            is_prepared = module.prepared is not None
            rows.append(row(path, module, module, "" if is_prepared else "it is not prepared"))
            chosen.extend([module] if is_prepared else [])
        return module

    visit("", model)
    replace(model, visit)
    for layer in chosen:
        layer.unprepare()
    return Changes(rows=tuple(rows))
