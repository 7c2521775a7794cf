"""Static scales of activations: those of the inputs that layers see on a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfp8._quantization import Quantization
from jaxfp8._quantize import quantize
from jaxfp8._rules import Rule, choose
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._observe import run_watched


def static_activation(rules: tuple[Rule, ...], path: str) -> Quantization | None:
    """How the input of a layer is held, if its scale is static."""
    recipe = choose(rules, path)
    how = None if recipe is None else recipe.activation
    return how if how is not None and how.static else None


def calibrated(
    model: nnx.Module,
    rules: tuple[Rule, ...],
    selects: Callable[[str, nnx.Module], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, np.ndarray]:
    """For each layer with a static recipe the largest scale that its inputs on a sample need."""
    if not any(r.recipe and r.recipe.activation and r.recipe.activation.static for r in rules):
        return {}
    scales: dict[str, np.ndarray] = {}

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
        found = type(module) in TWINS and selects(path, module)
        return found and static_activation(rules, path) is not None

    run_watched(model, chosen, watch, args, kwargs)
    jax.effects_barrier()
    return scales
