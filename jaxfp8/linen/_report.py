"""What 8 bits cost a model of linen, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from jaxfp8 import _accuracy, _einsum
from jaxfp8._accuracy_report import AccuracyReport, Recorder
from jaxfp8._dimensions import normalise
from jaxfp8._errors import message
from jaxfp8._qarray import QArray
from jaxfp8._quantize import dequantize
from jaxfp8._recipes import Recipe
from jaxfp8._rules import Rule, as_rules, choose
from jaxfp8._spec import Shape
from jaxfp8.linen import _layers
from jaxfp8.linen._kernel import PARAMS
from jaxfp8.linen._quantize import quantize

_OPERATION = "jaxfp8.linen.report"
_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dense: _layers.Dense,
    nn.DenseGeneral: _layers.DenseGeneral,
    nn.Einsum: _layers.Einsum,
    nn.Embed: _layers.Embed,
}
_FLAX = {ours: theirs for theirs, ours in _OURS.items()}
_METHODS = ("__call__", "attend")


def report(
    model: nn.Module,
    variables: Any,
    *args: Any,
    recipe: Recipe | Rule | Sequence[Any] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    **kwargs: Any,
) -> AccuracyReport:
    """Measures what 8 bits cost each layer of a model, and its outputs, on a sample.

    Each layer is given the input that it has in the float model, and computed in floats and in 8
    bits; so its error is its own, not that of the layers before it. The model is one of:

    - a model of Flax's layers, with a `recipe`: what would it cost?
    - a model of `jaxfp8.linen`'s layers, with the float variables that it was made from: what does
      it cost? With 8-bit variables, layers are compared with what their weights stand for, which
      leaves the rounding of activations.

    Args:
      model: the model.
      variables: its variables.
      *args, **kwargs: the sample: what `model.apply` is called with.
      recipe: as for `jaxfp8.nnx.quantize`, paths being those of modules.
      where: which layers: a function of path and module. By default all.

    Returns:
      The report: layers worst first, and which to keep wide.

    Raises:
      ValueError: there is nothing to compare.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfp8, jaxfp8.linen
      >>> model, x = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]), jnp.ones((2, 64))
      >>> variables = model.init(jax.random.key(0), x)
      >>> found = jaxfp8.linen.report(model, variables, x, recipe=jaxfp8.INT8)
      >>> sorted(row.path for row in found.rows)
      ['layers_0', 'layers_2']
    """
    watch = _Watch(as_rules(recipe) if recipe is not None else (), where, exact=True)
    exact = watch.run(model, variables, args, kwargs)
    if not watch.told:
        got, needs = "has no layer to compare", "layers of jaxfp8.linen, or a recipe, are needed"
        remedy = "give the `recipe` that you think of"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    narrow = _Watch(watch.rules, where, exact=False).run(model, variables, args, kwargs)
    note = "" if not watch.narrow else "against what the 8-bit weights stand for"
    return watch.recorder.report(_accuracy.compare(exact, narrow), note)


class _Watch:
    """An interceptor of calls; layers go on with their float output if `exact`, else the 8-bit one.

    Attributes:
      recorder: what was measured, if `exact`.
      told: whether any layer was compared.
      narrow: whether the float weights of a layer were not known.
      is_inside: whether a layer is being compared: what it calls is not.
    """

    def __init__(self, rules: tuple[Rule, ...], where: Any, *, exact: bool) -> None:
        self.rules, self.where, self.exact = rules, where, exact
        self.recorder = Recorder()
        self.told = self.narrow = self.is_inside = False

    def run(self, model: nn.Module, variables: Any, args: Any, kwargs: Any) -> Any:
        """Applies the model under watch."""
        with nn.intercept_methods(self._intercept):
            # Layers in 8 bits quantise float variables where these may change.
            return model.apply(variables, *args, **kwargs, mutable=[PARAMS])[0]

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if self.is_inside or context.method_name not in _METHODS:
            return call(*args, **kwargs)
        module, path = context.module, "/".join(context.module.path)
        recipe = self._recipe(path, module)
        if recipe is None or (self.where is not None and not self.where(path, module)):
            return call(*args, **kwargs)
        theirs, ours = _twins(module, recipe)
        floats = meta.unbox(module.variables[PARAMS])
        wide = {name: _widened(value) for name, value in floats.items()}
        self.narrow |= any(isinstance(value, QArray) for value in floats.values())
        method, self.is_inside = context.method_name, True
        try:
            y = theirs.apply({PARAMS: wide}, *args, **kwargs, method=method)
            held = quantize(ours, {PARAMS: floats}, *args, **kwargs, method=method)
            y8 = ours.apply(held, *args, **kwargs, method=method)
        finally:
            self.is_inside = False
        if not self.exact:
            return y8
        return self._tell(path, module, recipe, args[0], y, y8, wide, held[PARAMS], method)

    def _recipe(self, path: str, module: nn.Module) -> Recipe | None:
        if type(module) in _FLAX:
            return module.recipe  # type: ignore[attr-defined]
        return choose(self.rules, path) if type(module) in _OURS else None

    def _tell(
        self,
        path: str,
        module: nn.Module,
        recipe: Recipe,
        x: Any,
        y: Any,
        y8: Any,
        wide: Any,
        held: Any,
        method: str,
    ) -> jax.Array:
        self.told = True
        name = "embedding" if "embedding" in held else "kernel"
        activation = None
        x = jnp.asarray(x)
        if not (name == "embedding" and method == "__call__"):
            axes = _summed(module, x, wide[name].shape)
            scale = held.get("input_scale")
            activation = x, recipe.quantize_activation(x, *axes, scale=scale)
        known = not self.narrow
        return self.recorder.layer_of(
            path,
            type(module).__name__,
            recipe.name,
            exact=y,
            got=y8,
            weight=(wide[name], held[name]) if known else None,
            activation=activation,
        )


def _widened(value: Any) -> Any:
    return dequantize(value, jnp.float32) if isinstance(value, QArray) else value


def _twins(module: nn.Module, recipe: Recipe) -> tuple[nn.Module, nn.Module]:
    """The layer as Flax has it, and as we do."""
    theirs, ours = _FLAX.get(type(module), type(module)), _OURS.get(type(module), type(module))
    return _like(module, theirs), _like(module, ours, recipe=recipe)


def _like(module: nn.Module, kind: type[nn.Module], **fields: Any) -> nn.Module:
    """A module of another class with the fields that both have."""
    names = {f.name for f in dataclasses.fields(kind) if f.init} - {"parent", "name", *fields}
    shared = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return kind(**shared, **fields, parent=None)


def _summed(module: Any, x: jax.Array, kernel: Shape) -> tuple[Shape, Shape]:
    """Axes of an input that a layer's product sums over, and its batch axes."""
    if isinstance(module, nn.DenseGeneral | _layers.DenseGeneral):
        return tuple(_positive(module.axis, x)), tuple(_positive(module.batch_dims, x))
    if isinstance(module, nn.Einsum | _layers.Einsum) and module.einsum_str:
        parsed = _einsum.parse(_OPERATION, module.einsum_str, x.ndim, len(kernel))
        (axes, _), (batch, _) = normalise(_OPERATION, parsed.dimension_numbers, (x.shape, kernel))
        return tuple(axes), tuple(batch)
    return (x.ndim - 1,), ()


def _positive(axes: Any, x: jax.Array) -> list[int]:
    return [axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes)]
