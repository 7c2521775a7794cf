"""Runs a model on a sample: for scales of inputs, and to see other readers of float weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfp8._ops.quantize import quantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.rules import Rule, choose
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._observe import note_other_uses, run_watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Observations of a model's run on a sample.

    Attributes:
      scales: for each layer with a static recipe, by path, the largest scale its inputs need.
      read: paths of layers with a weight read or written outside the layer's own call.
    """

    scales: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: frozenset[str] = frozenset()


def static_activation(rules: tuple[Rule, ...], path: str) -> Quantization | None:
    """How the input of a layer is held, if its scale is static."""
    recipe = choose(rules, path)
    how = None if recipe is None else recipe.activation
    return how if how is not None and how.static else None


def observed(
    model: nnx.Module,
    rules: tuple[Rule, ...],
    selects: Callable[[str, nnx.Module], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Observed:
    """Calls a copy of a model with a sample and observes its layers."""
    scales: dict[str, np.ndarray] = {}
    read: set[str] = set()
    sharing: dict[int, list[str]] = {}  # by id of a weight its layers

    def note(path: str, scale: np.ndarray) -> None:
        scales[path] = np.maximum(scales.get(path, 0), scale)

    def watch(path: str, layer: Any, method: str, given: tuple[Any, ...], y: Any) -> None:
        how = static_activation(rules, path)
        x = jnp.asarray(given[0])
        if how is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return
        scale = quantize(x, how.dtype, scale_dtype=how.scale_dtype).scale.reshape(())
        jax.debug.callback(lambda scale: note(path, np.asarray(scale)), scale)

    def chosen(path: str, module: nnx.Module) -> bool:
        is_chosen = type(module) in TWINS and choose(rules, path) is not None
        is_chosen = is_chosen and selects(path, module)
        if is_chosen:
            weight = getattr(module, TWINS[type(module)].WEIGHT)
            paths = sharing.setdefault(id(weight), [])
            paths.append(path)
            if len(paths) == 1:
                note_other_uses(weight, lambda: read.update(paths))
        return is_chosen

    run_watched(model, chosen, watch, args, kwargs)
    jax.effects_barrier()
    return Observed(scales=scales, read=frozenset(read))
