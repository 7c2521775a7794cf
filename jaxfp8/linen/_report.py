"""The errors of a linen model in 8 bits, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from jaxfp8._ops import einsum
from jaxfp8._ops.dimensions import normalise
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.accuracy_report import AccuracyReport, Recorder, second_rounding
from jaxfp8._recipes.recipes import Recipe, TrainingRecipe
from jaxfp8._recipes.rules import Rule, as_rules, choose
from jaxfp8._recipes.training_codes import forward_codes
from jaxfp8._value import accuracy
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import is_held
from jaxfp8._value.spec import Shape
from jaxfp8.linen import _layers
from jaxfp8.linen._apply import applied
from jaxfp8.linen._kernel import PARAMS
from jaxfp8.linen._quantize import quantize
from jaxfp8.linen._training import scaling_of, training_recipe

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
    """Measures the error of each layer of a model in 8 bits, and of its outputs, on a sample.

    Each layer gets the input that it has in the float model and is computed in floats and in 8
    bits. So its error is its own, without that of the layers before it. It measures:

    - a model of Flax's layers with a `recipe`: the errors that the recipe would cause.
    - a model of `jaxfp8.linen`'s layers with the float variables that it was made from: the errors
      that it has. With 8-bit variables: the errors from rounding activations, as layers are
      compared with their dequantised weights.
    - a model in FP8 training with all its variables: the errors of its forward products. With a
      `recipe`: the errors that the recipe would cause. Both are relative to the float model.

    Args:
      model: the model.
      variables: its variables; not changed, also where a forward pass changes some.
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
    watch = _Watch(as_rules(recipe, _OPERATION) if recipe is not None else (), where, exact=True)
    exact = watch.run(model, variables, args, kwargs)
    if not watch.compared:
        got, needs = "has no layer to compare", "8-bit layers, FP8 training or a recipe is needed"
        remedy = "give the `recipe` that you think of"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    narrow = _Watch(watch.rules, where, exact=False).run(model, variables, args, kwargs)
    note = "" if not watch.narrow else "against what the 8-bit weights stand for"
    return watch.recorder.report(accuracy.compare(exact, narrow), note)


class _Watch:
    """An interceptor of calls. Layers return their float output if `exact`, else the 8-bit one.

    Attributes:
      recorder: what was measured, if `exact`.
      compared: whether a layer was compared.
      narrow: whether the float weights of a layer were not known.
      is_inside: whether a layer is being compared; layers inside it are not.
    """

    def __init__(self, rules: tuple[Rule, ...], where: Any, *, exact: bool) -> None:
        self.rules, self.where, self.exact = rules, where, exact
        self.recorder = Recorder()
        self.compared = self.narrow = self.is_inside = False

    def run(self, model: nn.Module, variables: Any, args: Any, kwargs: Any) -> Any:
        """Applies the model and compares its layers."""
        with nn.intercept_methods(self._intercept):
            # Parameters may change, so that 8-bit layers quantise float ones.
            return applied(model, variables, args, kwargs)[0]

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if self.is_inside or context.method_name not in _METHODS:
            return call(*args, **kwargs)
        module, path = context.module, "/".join(context.module.path)
        recipe = self._recipe(path, module)
        if recipe is not None and self.where is not None and not self.where(path, module):
            recipe = None
        if recipe is None and training_recipe(module) is None:
            return call(*args, **kwargs)
        floats = meta.unbox(module.variables[PARAMS])
        wide = {name: _widened(value) for name, value in floats.items()}
        method, self.is_inside = context.method_name, True
        try:
            y = _as_flax(module).apply({PARAMS: wide}, *args, **kwargs, method=method)
            if recipe is None:
                return y
            if isinstance(recipe, Recipe):
                held, y8 = _in_8_bits(module, recipe, floats, args, kwargs, method)
            else:
                held, y8 = floats, call(*args, **kwargs)
        finally:
            self.is_inside = False
        self.narrow |= any(is_held(value) for value in floats.values())
        if not self.exact:
            return y8
        return self._record(path, module, recipe, args[0], y, y8, wide, held, method)

    def _recipe(self, path: str, module: nn.Module) -> Recipe | TrainingRecipe | None:
        if type(module) in _FLAX:
            return module.recipe  # type: ignore[attr-defined]
        if type(module) not in _OURS:
            return None
        training = training_recipe(module)
        if getattr(module, "dot_general_cls", None) is not None and training is None:
            return None  # a product of its own
        return choose(self.rules, path) if self.rules else training

    def _record(
        self,
        path: str,
        module: nn.Module,
        recipe: Recipe | TrainingRecipe,
        x: Any,
        y: Any,
        y8: Any,
        wide: Any,
        held: Any,
        method: str,
    ) -> jax.Array:
        self.compared = True
        name = "embedding" if "embedding" in held else "kernel"
        activation, second, x = None, None, jnp.asarray(x)
        weight = (wide[name], held[name]) if not self.narrow else None
        if not (name == "embedding" and method == "__call__"):
            axes, batch, of_kernel = _summed(module, x, wide[name].shape)
            if isinstance(recipe, Recipe):
                scale = held.get("input_scale")
                activation = x, recipe.quantize_activation(x, axes, batch, scale=scale)
                second = second_rounding(recipe, held[name], of_kernel[0])
            else:
                activation = x, forward_codes(recipe, x, scaling_of(module, "input"), axes, batch)
                old = scaling_of(module, "kernel")
                weight = wide[name], forward_codes(recipe, wide[name], old, *of_kernel)
        return self.recorder.layer_of(
            path,
            type(module).__name__,
            recipe.name if isinstance(recipe, Recipe) else type(recipe).__name__,
            exact=y,
            got=y8,
            weight=weight,
            activation=activation,
            second=second,
        )


def _widened(value: Any) -> Any:
    return dequantize(value, jnp.float32) if is_held(value) else value


def _as_flax(module: nn.Module) -> nn.Module:
    """The layer of Flax, in floats."""
    fields = {"dot_general_cls": None} if hasattr(module, "dot_general_cls") else {}
    return _like(module, _FLAX.get(type(module), type(module)), **fields)


def _in_8_bits(
    module: nn.Module, recipe: Recipe, floats: Any, args: Any, kwargs: Any, method: str
) -> tuple[Any, Any]:
    """The parameters of the 8-bit layer, and its output."""
    ours = _like(module, _OURS.get(type(module), type(module)), recipe=recipe)
    held = quantize(ours, {PARAMS: floats}, *args, **kwargs, method=method)
    return held[PARAMS], ours.apply(held, *args, **kwargs, method=method)


def _like(module: nn.Module, kind: type[nn.Module], **fields: Any) -> nn.Module:
    """A module of another class with the fields that both have."""
    names = {f.name for f in dataclasses.fields(kind) if f.init} - {"parent", "name", *fields}
    shared = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return kind(**shared, **fields, parent=None)


def _summed(module: Any, x: jax.Array, kernel: Shape) -> tuple[Shape, Shape, tuple[Shape, Shape]]:
    """Axes of an input that a product sums over, its batch axes, and those of the kernel."""
    if isinstance(module, nn.DenseGeneral | _layers.DenseGeneral):
        axes, batch = tuple(_positive(module.axis, x)), tuple(_positive(module.batch_dims, x))
        first = len(batch)
        return axes, batch, (tuple(range(first, first + len(axes))), tuple(range(first)))
    if isinstance(module, nn.Einsum | _layers.Einsum) and module.einsum_str:
        parsed = einsum.parse(_OPERATION, module.einsum_str, x.ndim, len(kernel))
        numbers = normalise(_OPERATION, parsed.dimension_numbers, (x.shape, kernel))
        (axes, of_kernel), (batch, shared) = numbers
        return tuple(axes), tuple(batch), (tuple(of_kernel), tuple(shared))
    axis = 1 if isinstance(module, nn.Embed | _layers.Embed) else 0
    return (x.ndim - 1,), (), ((axis,), ())


def _positive(axes: Any, x: jax.Array) -> list[int]:
    return [axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes)]
