"""Prepares the 8-bit weights of a live model for the kernels, in place, and undoes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flax import nnx

from jaxfp8._value.changes import Change, Changes, nbytes
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._quantize import check_module, row, weight_of
from jaxfp8.nnx._replace import modules


def prepare(model: nnx.Module) -> Changes:
    """Prepares the 8-bit weights of a live model for the kernels of the device, in place.

    Call it once, after a model is loaded for inference: see `jaxfp8.prepare`. On a GPU only layers
    with activations in 8 bits change. The state of the model then has other arrays.
    A checkpoint should have the old ones, readable on any machine: load before you prepare, and
    `unprepare` before you save.

    Args:
      model: changed in place; `unprepare` undoes it, `dequantize` gives floats.

    Returns:
      A row for each 8-bit layer: the change, or the reason against it.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
      >>> len(jaxfp8.nnx.prepare(model).changed), model.layers[0].weight
      (1, PreparedArray(int8[64,64], contracting=-2))
    """
    check_module("jaxfp8.nnx.prepare", model)
    return _changed(
        model, lambda layer: layer.why_not_prepared(), lambda layer: layer.prepare(), "prepared"
    )


def unprepare(model: nnx.Module) -> Changes:
    """Undoes `prepare` in place, bit for bit.

    Args:
      model: changed in place, layer by layer: two copies of the weights are never held.

    Returns:
      A row for each 8-bit layer: the change, or the reason against it.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC), jaxfp8.nnx.prepare(model)
      >>> len(jaxfp8.nnx.unprepare(model).changed), model.layers[0].weight
      (1, QArray(int8[64,64], scale=float32[1,64]))
    """
    check_module("jaxfp8.nnx.unprepare", model)
    return _changed(model, _why_not_unprepared, lambda layer: layer.unprepare())


def _why_not_unprepared(layer: EightBitLayer) -> str:
    return "it is not prepared" if layer.prepared is None else ""


def _changed(
    model: nnx.Module,
    why_not: Callable[[EightBitLayer], str],
    change: Callable[[EightBitLayer], None],
    after: str = "",
) -> Changes:
    """Changes the 8-bit layers without a reason against it, and makes a row for each layer."""
    rows: list[Change] = []
    chosen: list[tuple[int, EightBitLayer]] = []  # with the number of its row
    for path, module in [("", model), *modules(model)]:
        if isinstance(module, EightBitLayer):
            reason = why_not(module)
            made = row(path, module, module, reason=reason)
            if after and not reason:
                made = dataclasses.replace(made, after=after)
            chosen.extend([] if reason else [(len(rows), module)])
            rows.append(made)
    for number, layer in chosen:
        change(layer)
        rows[number] = dataclasses.replace(rows[number], bytes_after=nbytes(weight_of(layer)))
    return Changes.of(rows)
