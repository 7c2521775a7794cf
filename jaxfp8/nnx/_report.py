"""The errors of an nnx model in 8 bits, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxfp8._recipes.accuracy_report import AccuracyReport, Recorder, second_rounding
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._recipes.rules import Rule, choose
from jaxfp8._recipes.training_codes import forward_codes
from jaxfp8._value import accuracy
from jaxfp8._value.errors import message
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._calibrate import observed
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._observe import run_watched
from jaxfp8.nnx._products import stop_training_in_fp8, training_product
from jaxfp8.nnx._quantize import Where, quantize, rules_of, selector, why_unfit
from jaxfp8.nnx._replace import replace
from jaxfp8.nnx._training import training_layers, undo_fp8_training
from jaxfp8.nnx._wide import read_elsewhere

_OPERATION = "jaxfp8.nnx.report"
_AS_IT_IS = Recipe(name="floats", weight=None)
RecipeOf = Callable[[str, nnx.Module], Recipe | None]


def report(
    model: nnx.Module,
    *args: Any,
    recipe: Recipe | Rule | Sequence[Any] | None = None,
    reference: nnx.Module | None = None,
    where: Where = None,
    **kwargs: Any,
) -> AccuracyReport:
    """Measures the error of each layer of a model in 8 bits, and of its outputs, on a sample.

    Each layer gets the input that it has in the float model and is computed in floats and in 8
    bits. So its error is its own, without that of the layers before it. It measures:

    - a float model with a `recipe`: the errors that the recipe would cause.
    - an 8-bit model with its float `reference`: the errors that it has.
    - an 8-bit model alone: the errors from rounding activations. Layers are compared with their
      dequantised weights, as the float ones are unknown.
    - a model in FP8 training alone: the errors of its forward products.

    With a `recipe`, the model is measured without FP8 training, and so is a `reference`.

    Args:
      model: not changed.
      *args, **kwargs: the sample: what the model is called with.
      recipe: as for `jaxfp8.nnx.quantize`.
      reference: the model as it was before it was quantised, with layers at the same paths.
      where: which layers, as for `jaxfp8.nnx.quantize`.

    Returns:
      The report: layers worst first, and which to keep wide.

    Raises:
      TypeError: `model` is no module.
      ValueError: there is no recipe and no 8-bit layer, or both a recipe and a reference.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> found = jaxfp8.nnx.report(model, jnp.ones((2, 64)), recipe=jaxfp8.INT8)
      >>> [row.path for row in found.rows], found.keep_wide
      (['layers/0'], ())
    """
    _check(model, recipe, reference)
    if recipe is not None:
        return _before(_in_floats(model), args, kwargs, recipe, where)
    if reference is not None:
        return _after(model, args, kwargs, _in_floats(reference), selector(_OPERATION, where))
    return _alone(model, args, kwargs, selector(_OPERATION, where))


def _before(
    model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Any, where: Where
) -> AccuracyReport:
    """The errors that a recipe would cause in a float model."""
    rules, selects = rules_of(_OPERATION, recipe), selector(_OPERATION, where)
    seen = observed(model, rules, selects, args, kwargs)
    read = read_elsewhere(model, seen.read)

    def fit(path: str, module: nnx.Module) -> bool:
        return selects(path, module) and path not in read

    def recipe_of(path: str, module: nnx.Module) -> Recipe | None:
        chosen = type(module) in TWINS and fit(path, module) and not why_unfit(module)
        return choose(rules, path) if chosen else None

    recorder = Recorder()
    exact = _run(model, recorder, recipe_of, seen.scales, args, kwargs)
    narrow = nnx.clone(model)
    quantize(narrow, recipe, where=fit, scales=seen.scales)
    total = accuracy.compare(exact, narrow(*args, **kwargs))  # type: ignore[operator]
    return recorder.report(total)


def _after(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reference: nnx.Module,
    selects: Callable[[str, nnx.Module], bool],
) -> AccuracyReport:
    """The errors of an 8-bit model against its float original."""
    layers = _eight_bit_layers(model)
    known = {path: layer.input_scale for path, layer in layers.items()}
    scales = {path: scale[...] for path, scale in known.items() if scale is not None}

    def recipe_of(path: str, module: nnx.Module) -> Recipe | None:
        fit = path in layers and type(module) in TWINS and selects(path, module)
        return layers[path].recipe if fit else None

    recorder = Recorder()
    exact = _run(reference, recorder, recipe_of, scales, args, kwargs)
    narrow = nnx.clone(model)  # running it may move statistics, which are the model's own
    total = accuracy.compare(exact, narrow(*args, **kwargs))  # type: ignore[operator]
    return recorder.report(total)


def _alone(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    selects: Callable[[str, nnx.Module], bool],
) -> AccuracyReport:
    """The errors from rounding activations in an 8-bit model, or of products in FP8 training."""
    recorder, still = Recorder(), nnx.clone(model)
    for _, layer in training_layers(still):
        product: Any = training_product(layer)
        product.use_running_average = True  # what is compared has the scales before the step

    def watch(path: str, layer: Any, method: str, given: tuple[Any, ...], y: Any) -> None:
        eight_bit = isinstance(layer, EightBitLayer)
        row = _eight_bit_row if eight_bit else _training_row
        recorder.layer(path, type(layer).__name__, got=y, **row(layer, method, given))

    def chosen(path: str, module: nnx.Module) -> bool:
        known = isinstance(module, EightBitLayer) or training_product(module) is not None
        return known and selects(path, module)

    got = run_watched(still, chosen, watch, args, kwargs)
    wide = nnx.clone(_in_floats(model))
    replace(wide, lambda path, m: m.to_float() if isinstance(m, EightBitLayer) else m)
    total = accuracy.compare(wide(*args, **kwargs), got)  # type: ignore[operator]
    note = "against what the 8-bit weights stand for; give `reference` for the whole error"
    return recorder.report(total, note if _eight_bit_layers(model) else "")


def _eight_bit_row(layer: EightBitLayer, method: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """One call of an 8-bit layer, against its dequantised weights."""
    return {
        "recipe": layer.recipe.name,
        "exact": getattr(layer.to_float(), method)(*given),
        "activation": _activation(layer, method, given),
        "second": _second(layer, method),
    }


def _training_row(layer: Any, method: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """One call of a layer that trains in FP8, against the same layer in floats."""
    product: Any = training_product(layer)
    wide = nnx.clone(layer)
    stop_training_in_fp8(wide)
    twin = TWINS[type(layer)].of(wide, _AS_IT_IS)
    x, kernel = twin.cast(given[0]), twin.weight
    (x_axes, axes), (x_batch, batch) = twin.numbers(x, *given[1:2])
    state = product.state()
    old = (None, None) if state is None else (state.input, state.kernel)
    return {
        "recipe": type(product.recipe).__name__,
        "exact": getattr(wide, method)(*given),
        "weight": (kernel, forward_codes(product.recipe, kernel, old[1], axes, batch)),
        "activation": (x, forward_codes(product.recipe, x, old[0], x_axes, x_batch)),
    }


def _in_floats(model: nnx.Module) -> nnx.Module:
    """The model, or a copy without FP8 training."""
    if not training_layers(model):
        return model
    copy = nnx.clone(model)
    undo_fp8_training(copy)
    return copy


def _run(
    model: nnx.Module,
    recorder: Recorder,
    recipe_of: RecipeOf,
    scales: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a float model, with each layer that has a recipe computed in 8 bits beside it."""

    def watch(path: str, layer: Any, method: str, given: tuple[Any, ...], y: Any) -> None:
        recipe = recipe_of(path, layer)
        assert recipe is not None  # only such layers are watched
        twin = TWINS[type(layer)].of(layer, recipe, path=path, scale=scales.get(path))
        recorder.layer(
            path,
            type(layer).__name__,
            recipe.name,
            exact=y,
            got=getattr(twin, method)(*given),
            weight=(getattr(layer, twin.WEIGHT)[...], twin.weight),
            activation=_activation(twin, method, given),
            second=_second(twin, method),
        )

    def chosen(path: str, module: nnx.Module) -> bool:
        return recipe_of(path, module) is not None

    return run_watched(model, chosen, watch, args, kwargs)


def _activation(twin: Any, method: str, given: tuple[Any, ...]) -> Any:
    """The input of a product in floats and in 8 bits; None for a lookup."""
    if _is_lookup(twin, method):
        return None
    x = twin.cast(given[0])
    return x, twin.activation(x, twin.numbers(x, *given[1:2]))


def _second(twin: EightBitLayer, method: str) -> Any:
    """The weight of a product and the axes that it sums over, if it is rounded once more."""
    if _is_lookup(twin, method):
        return None
    weight = twin.weight
    return second_rounding(twin.recipe, weight, twin.axes_of(twin, weight.ndim)[0])


def _is_lookup(twin: EightBitLayer, method: str) -> bool:
    return method == "__call__" and twin.WEIGHT == "embedding"


def _eight_bit_layers(model: nnx.Module) -> dict[str, Any]:
    found = {}

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            found[path] = module
        return module

    replace(model, note)
    return found


def _check(model: Any, recipe: Any, reference: Any) -> None:
    if not isinstance(model, nnx.Module):
        got, needs = f"is of type {type(model).__name__}", "an nnx.Module is needed"
        remedy = "for linen, see `jaxfp8.linen.report`"
        raise TypeError(message(_OPERATION, "`model`", got, needs, remedy))
    if recipe is not None and reference is not None:
        got, needs = "are both given", "one of them says what to compare"
        remedy = "give `recipe` with a float model, `reference` with an 8-bit one"
        raise ValueError(message(_OPERATION, "`recipe` and `reference`", got, needs, remedy))
    if recipe is None and not _eight_bit_layers(model) and not training_layers(model):
        got, needs = "has no layer in 8 bits or FP8 training", "there is nothing to compare"
        remedy = "give the `recipe` that you think of"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
