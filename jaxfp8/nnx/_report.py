"""The errors of an nnx model in 8 bits, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from jaxfp8._recipes.accuracy_comparison import (
    check_alone,
    check_reference,
    check_some,
    compared,
    recording,
    rounds_activations,
)
from jaxfp8._recipes.accuracy_recorder import Call
from jaxfp8._recipes.accuracy_report import AccuracyReport
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._recipes.rules import Rule
from jaxfp8._recipes.selection import Selection, Where
from jaxfp8._value.errors import message
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._calibrate import observed, run_watched
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import stop_training_in_fp8, training_product
from jaxfp8.nnx._quantize import check_model, check_module, replace_layers, rules_of, tell_unmatched
from jaxfp8.nnx._replace import modules, replace
from jaxfp8.nnx._training import training_layers
from jaxfp8.nnx._wide import read_elsewhere, weight_name

_OPERATION = "jaxfp8.nnx.report"
_AS_IT_IS = Recipe(name="floats", weight=None)
# The attribute of a float layer for its layer in 8 bits.
_TWIN = "compared_with"


def report(
    model: nnx.Module,
    *args: Any,
    recipe: Recipe | Rule | Sequence[Any] | None = None,
    reference: nnx.Module | None = None,
    where: Where = None,
    **kwargs: Any,
) -> AccuracyReport:
    """Measures the error of each layer of a model in 8 bits, and of its outputs, on a sample.

    Each layer gets its input of the float model and is computed in floats and in 8 bits. So its
    error is its own, without errors of the layers before it. It measures:

    - a float model with a `recipe`: the errors of that recipe.
    - an 8-bit model with its float `reference`: its errors.
    - an 8-bit model alone: the errors from rounding activations, against the dequantized weights.
      The rounding of weights is not in them, as the float ones are unknown.
    - a model in FP8 training alone: the errors of its forward products.

    The error of the outputs is the whole one. Its parts follow if a layer rounds both operands.
    With a `recipe`, the model is measured without FP8 training, and so is a `reference`. A terminal
    shows a bar meanwhile.

    Args:
      model: not changed.
      *args, **kwargs: the sample: arguments of the model.
      recipe: as for `jaxfp8.nnx.quantize`.
      reference: the model as it was before it was quantized, with layers at the same paths.
      where: which layers have a row, as for `jaxfp8.nnx.quantize`. With a `recipe`, the others
        stay in floats.

    Returns:
      The report: layers worst first, and the ones to keep wide.

    Warns:
      UserWarning: an 8-bit model is measured without its `reference`.
      FallbackWarning: `where` or a rule selects no layer.

    Raises:
      TypeError: `model` is no module.
      ValueError: there is nothing to compare: no recipe and no 8-bit layer, or 8-bit weights alone
        without a `reference`; both a recipe and a reference are given; the reference has no float
        layer at the path of an 8-bit one.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> report = jaxfp8.nnx.report(model, jnp.ones((2, 64)), recipe=jaxfp8.INT8_DYNAMIC)
      >>> [row.path for row in report.rows], report.keep_wide
      (['layers/0'], ())
    """
    _check(model, recipe, reference)
    if recipe is not None:
        floats = _in_floats(model)
        narrow = _quantized(floats, recipe, where, args, kwargs)
        already = _narrow_layers(floats)
        layers = {p: layer for p, layer in _narrow_layers(narrow).items() if p not in already}
        return _compared(floats, narrow, layers, args, kwargs)
    selects = Selection(_OPERATION, "where", where)
    layers = {p: layer for p, layer in _narrow_layers(model).items() if selects(p, layer)}
    selects.tell()
    floats = _wide(model) if reference is None else _in_floats(reference)
    is_whole = reference is not None or not any(map(_is_rounded, layers.values()))
    if not is_whole:
        check_alone(_OPERATION, "model", any(map(_rounds_activations, layers.values())))
    return _compared(floats, model, layers, args, kwargs, is_whole=is_whole)


def _quantized(
    model: nnx.Module, recipe: Any, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nnx.Module:
    """A copy of a float model in 8 bits, with static scales from the sample."""
    rules, selects = rules_of(_OPERATION, recipe), Selection(_OPERATION, "where", where)
    seen = observed(model, rules, selects, args, kwargs)
    read = read_elsewhere(model, seen.read)
    narrow = nnx.clone(model)
    rows = replace_layers(narrow, rules, selects, seen.scales, read)
    tell_unmatched(_OPERATION, rules, selects, rows)
    return narrow


def _compared(
    floats: nnx.Module,
    narrow: nnx.Module,
    layers: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_whole: bool = True,
) -> AccuracyReport:
    """A model against the float one. Each of `layers` is computed beside the float layer.

    Args:
      floats, narrow: the two; they are not changed.
      layers: those of `narrow` with a row, by path.
      args, kwargs: the sample.
      is_whole: whether `floats` has the weights from before they were rounded.
    """
    narrow = _without_updates(narrow)
    with recording(len(layers)) as recorder:

        def watch(path: str, layer: Any, method: str, given: tuple[Any, ...], y: Any) -> None:
            twin = getattr(layer, _TWIN)
            got, is_known = getattr(twin, method)(*given), is_whole or not _is_rounded(twin)
            recorder.layer(_call(path, layer, method, given, is_known), exact=y, got=got)

        paired = _paired(floats, layers)
        exact = run_watched(paired, lambda _, m: hasattr(m, _TWIN), watch, args, kwargs)

    def run(model: nnx.Module) -> Any:
        return nnx.clone(model)(*args, **kwargs)  # type: ignore[operator]

    wide = None if training_layers(narrow) else lambda: run(_wide(narrow))
    return compared(_OPERATION, recorder, exact, run(narrow), wide, is_whole=is_whole)


def _is_rounded(layer: Any) -> bool:
    """Whether a layer holds its weight in 8 bits, and the float one is unknown."""
    return isinstance(layer, EightBitLayer) and layer.recipe.weight is not None


def _rounds_activations(layer: Any) -> bool:
    product = training_product(layer)
    return rounds_activations(layer.recipe if product is None else product.recipe)


def _without_updates(model: nnx.Module) -> nnx.Module:
    """A copy; its layers in FP8 training keep the scales from before the step."""
    copy = nnx.clone(model)
    for _, layer in training_layers(copy):
        product: Any = training_product(layer)
        product.use_running_average = True
    return copy


def _paired(floats: nnx.Module, layers: Mapping[str, Any]) -> nnx.Module:
    """A copy of the float model; each of its layers holds the other one.

    So transformations such as `nnx.scan` take both apart in the same way.
    """
    copy, left = nnx.clone(floats), dict(layers)

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if path in left and _fits(module, left[path]):
            setattr(module, _TWIN, left.pop(path))
        return module

    replace(copy, note)
    if left:
        got = f"has no float layer of the same kind and shape at {', '.join(sorted(left))}"
        needs, remedy = "each 8-bit layer needs one", "give the model as it was before"
        raise ValueError(message(_OPERATION, "`reference`", got, needs, remedy))
    return copy


def _fits(layer: nnx.Module, twin: Any) -> bool:
    """Whether a layer is the float one of another."""
    if not isinstance(twin, EightBitLayer):
        return type(layer) is type(twin)
    return type(layer) is twin.FLOAT and _weight(layer).shape == twin.whole_shape()


def _weight(layer: Any) -> Any:
    return getattr(layer, weight_name(layer))[...]


def _call(path: str, layer: Any, method: str, given: tuple[Any, ...], is_known: bool) -> Call:
    """A call of a float layer beside its twin in 8 bits or FP8 training."""
    twin, wide = getattr(layer, _TWIN), _weight(layer)
    product = training_product(twin)
    common: dict[str, Any] = {"path": path, "kind": type(layer).__name__, "is_known": is_known}
    if product is None and method == "__call__" and twin.WEIGHT == "embedding":
        return Call(recipe=twin.recipe, wide=wide, held=twin.weight, **common)
    narrow = twin if product is None else TWINS[type(layer)].of(layer, _AS_IT_IS)
    x = narrow.cast(given[0])
    common |= {"x": x, "numbers": narrow.numbers(x, *given[1:2])}
    if product is None:
        held, scale = twin.weight, twin.static_scale()
        return Call(recipe=twin.recipe, wide=wide, held=held, scale=scale, **common)
    state = product.state()
    old = (None, None) if state is None else (state.input, state.kernel)
    return Call(recipe=product.recipe, wide=narrow.weight, state=old, **common)


def _in_floats(model: nnx.Module) -> nnx.Module:
    """The model, or a copy without FP8 training."""
    if not training_layers(model):
        return model
    copy = nnx.clone(model)
    for _, layer in training_layers(copy):
        stop_training_in_fp8(layer)
    return copy


def _wide(model: nnx.Module) -> nnx.Module:
    """A copy without FP8 training, with dequantized weights."""
    wide = nnx.clone(_in_floats(model))
    replace(wide, lambda path, m: m.to_float() if isinstance(m, EightBitLayer) else m)
    return wide


def _narrow_layers(model: nnx.Module) -> dict[str, Any]:
    """The layers in 8 bits or FP8 training, by path."""
    return {
        path: module
        for path, module in modules(model)
        if isinstance(module, EightBitLayer) or training_product(module) is not None
    }


def _check(model: Any, recipe: Any, reference: Any) -> None:
    check_module(_OPERATION, model)
    check_reference(_OPERATION, recipe, reference)
    if recipe is not None:
        check_model(_OPERATION, model)
    else:
        check_some(_OPERATION, _narrow_layers(model))
