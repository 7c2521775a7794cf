"""Quantizes a live model in place, and dequantizes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxfp8._recipes.recipes import Recipe
from jaxfp8._recipes.rules import Rule, as_rules, choose
from jaxfp8._recipes.selection import Selection, Where, tell, unknown_names, unmatched_rules
from jaxfp8._value.changes import Change, Changes, change
from jaxfp8._value.errors import message
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._calibrate import Observed, observed, static_activation
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import USUAL, stop_training_in_fp8, training_product
from jaxfp8.nnx._replace import replace
from jaxfp8.nnx._variables import as_qarray
from jaxfp8.nnx._wide import read_elsewhere, weight_name, wide_parameters

Selects = Callable[[str, nnx.Module], bool]  # of path and module
_OPERATION = "jaxfp8.nnx.quantize"
_TABLES = "tables stay in floats unless they are chosen"


def quantize(
    model: nnx.Module,
    recipe: Recipe | Rule | Sequence[Any],
    *,
    where: Where = None,
    sample: tuple[Any, ...] | None = None,
    scales: Mapping[str, Any] | None = None,
) -> Changes:
    """Replaces the layers of a live model by their 8-bit twins, in place.

    `nnx.Linear`, `LinearGeneral`, `Einsum` and `Embed` become those of `jaxfp8.nnx`, anywhere in
    the model, and stacked layers (`nnx.vmap`, `nnx.scan`) too. Biases stay the same variables. The
    codes and scales of a kernel get its metadata and sharding names. The model no longer holds the
    float weights, nor the state of FP8 training.

    Args:
      model: changed in place.
      recipe: such as `jaxfp8.FP8_W8A16`; or rules in order of precedence, `jaxfp8.Rule`s or those
        of qwix. The first match of a layer's path counts. Layers without one stay.
      where: which layers: a regular expression to search in the path, a collection of paths, or a
        function of path and module. By default all but `nnx.Embed`: tables of tokens stay in
        floats, as in `jaxfp8.checkpoint.quantize`, unless `where` or a rule chooses them.
      sample: positional arguments for a call of a copy of the model. Static scales come from the
        inputs of its layers then. A layer stays as it is if another module reads its weight, such
        as a wrapper for normalised weights. Without a sample, layers inside `nnx.WeightNorm` and
        `nnx.SpectralNorm` stay as they are.
      scales: the static scales of inputs by path, if they are known already.

    Returns:
      A row for each weight, with the reason if it stays wide, and the bytes saved; print it.

    Warns:
      FallbackWarning: `where`, a rule or a path in `scales` selects no layer.

    Raises:
      TypeError: `model` is no module, or `recipe` no recipe for inference.
      ValueError: a chosen layer is in 8 bits already; `model` itself is a layer; a tile does not
        divide the shards of a weight; a static recipe lacks its `sample`.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> changes = jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
      >>> changes.bytes_saved, type(model.layers[0]).__module__
      (12032, 'jaxfp8.nnx._layers')
    """
    check_model(_OPERATION, model)
    rules, selects = rules_of(_OPERATION, recipe), Selection(_OPERATION, "where", where)
    seen = _observed(model, rules, selects, sample)
    known, read = {**(scales or {}), **seen.scales}, read_elsewhere(model, seen.read)
    rows = replace_layers(model, rules, selects, known, read)
    tell_unmatched(_OPERATION, rules, selects, rows)
    tell(*unknown_names(_OPERATION, "scales", scales, [row.path for row in rows]))
    wide, others = wide_parameters(model)
    return Changes.of((*rows, *wide), others)


def replace_layers(
    model: nnx.Module,
    rules: tuple[Rule, ...],
    selects: Selection,
    scales: Mapping[str, Any],
    read: Mapping[str, str],
) -> list[Change]:
    """Puts 8-bit layers in place, with static scales by path; `read` has reasons to leave some."""
    rows: list[Change] = []

    def new(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            if selects.given is None or not selects(path, module):
                rows.append(row(path, module, module, reason="it is in 8 bits already"))
                return module
            got, needs = f"`{path}` is in 8 bits already", "a float layer is needed"
            remedy = "choose others in `where`, or undo it with `jaxfp8.nnx.dequantize`"
            raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
        if not any(isinstance(module, kind) for kind in TWINS):
            return module
        chosen = choose(rules, path)
        reason = _why_left(path, module, chosen, selects) or read.get(path, "")
        reason = reason or _why_floats(path, module, rules, selects)
        twin = module
        if chosen is not None and not reason:
            _check_scale(rules, path, module, scales)
            twin = TWINS[type(module)].of(module, chosen, path=path, scale=scales.get(path))
        rows.append(row(path, module, twin, reason=reason))
        return twin

    replace(model, new)
    _check_some(rows)
    return rows


def tell_unmatched(
    operation: str, rules: tuple[Rule, ...], selects: Selection, rows: Sequence[Change]
) -> None:
    """Warns of a selection, and of each rule, without a layer in the rows."""
    selects.tell()
    tell(*unmatched_rules(operation, rules, [row.path for row in rows]))


def _observed(
    model: nnx.Module, rules: tuple[Rule, ...], selects: Selects, sample: tuple[Any, ...] | None
) -> Observed:
    """The model's use of a sample, if there is one."""
    if sample is None:
        return Observed()
    if not isinstance(sample, tuple | list):
        got, needs = f"is {type(sample).__name__}", "a tuple of positional arguments is needed"
        raise TypeError(message(_OPERATION, "`sample`", got, needs, "write `sample=(x,)`"))
    return observed(model, rules, selects, tuple(sample), {})


def dequantize(model: nnx.Module, *, where: Where = None) -> Changes:
    """Replaces 8-bit layers of a live model by their layers of Flax, in place.

    It undoes `quantize` and `fp8_training`. 8-bit weights are dequantized to their former dtype;
    rounding is not undone. Layers in FP8 training multiply in floats again, and their scaling state
    is dropped. Biases and metadata stay.

    Args:
      model: changed in place.
      where: which layers, as in `quantize`; by default all.

    Returns:
      A row for each 8-bit layer, and for each layer in FP8 training.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
      >>> jaxfp8.nnx.dequantize(model).bytes_saved, type(model.layers[0]).__name__
      (-12032, 'Linear')
    """
    operation = "jaxfp8.nnx.dequantize"
    check_model(operation, model)
    selects = Selection(operation, "where", where)
    rows: list[Change] = []
    trained: list[nnx.Module] = []

    def new(path: str, module: nnx.Module) -> nnx.Module:
        product = training_product(module)
        if product is None and not isinstance(module, EightBitLayer):
            return module
        if not selects(path, module):
            return module
        layer = module.to_float() if isinstance(module, EightBitLayer) else module
        trained.extend([module] if product is not None else [])
        recipe = "" if product is None else type(product.recipe).__name__
        rows.append(row(path, module, layer, recipe=recipe))
        return layer

    replace(model, new)
    for layer in trained:
        stop_training_in_fp8(layer)
    selects.tell()
    return Changes.of(rows)


def why_unfit(module: nnx.Module) -> str:
    """Why a layer has no 8-bit twin; "" if it has one."""
    if type(module) not in TWINS:
        return f"{type(module).__name__} is a class of its own"
    for name, usual in USUAL.items():
        value = getattr(module, name, usual)
        if value is not usual and value is not None and value is not training_product(module):
            return f"it has a `{name}` of its own"
    weight = getattr(module, TWINS[type(module)].WEIGHT).get_value()
    if weight.dtype not in (jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.float16):
        return f"its weight is {weight.dtype}"
    return "" if weight.size else "its weight is empty"


def _why_left(path: str, module: nnx.Module, recipe: Recipe | None, selects: Selects) -> str:
    if not selects(path, module):
        return "`where` does not choose it"
    return why_unfit(module) if recipe is not None else "no rule gives it a recipe"


def _why_floats(path: str, module: nnx.Module, rules: tuple[Rule, ...], selects: Selection) -> str:
    """Why a table stays in floats: nobody chose it by its path."""
    if not isinstance(module, nnx.Embed) or selects.given is not None:
        return ""
    rule = next(rule for rule in rules if re.search(rule.where, path))
    return "" if rule.where != Rule.where else _TABLES


def row(
    path: str, before: nnx.Module, after: nnx.Module, *, reason: str = "", recipe: str = ""
) -> Change:
    """The row of the weight of a layer."""
    named = [m.recipe.name for m in (after, before) if isinstance(m, EightBitLayer)]
    old, new = weight_of(before), weight_of(after)
    return change(path, type(before), old, new, recipe=next(iter(named), recipe), reason=reason)


def weight_of(module: Any) -> Any:
    """The weight of a layer, Flax's or ours: floats, or in 8 bits."""
    if isinstance(module, EightBitLayer):
        return as_qarray(module.held())
    return getattr(module, weight_name(module)).get_value()


def rules_of(operation: str, recipe: Any) -> tuple[Rule, ...]:
    """Rules for inference from the argument `recipe`."""
    if hasattr(recipe, "gradient_dtype"):
        got, needs = "is for training", "a recipe such as jaxfp8.FP8_W8A16 is needed"
        remedy = "train with `jaxfp8.nnx.fp8_training(model, recipe)`"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))
    return as_rules(recipe, operation)


def check_module(operation: str, model: Any) -> None:
    """Refuses anything but a module."""
    if not isinstance(model, nnx.Module):
        got, needs = f"is of type {type(model).__name__}", "an nnx.Module is needed"
        remedy = f"for linen, see `{operation.replace('nnx', 'linen')}`"
        if isinstance(model, Changes):
            remedy = "pass the model itself: it was changed in place"
        raise TypeError(message(operation, "`model`", got, needs, remedy))


def check_model(operation: str, model: Any) -> None:
    """Refuses anything but a module with layers below it, and shapes in place of arrays."""
    check_module(operation, model)
    if isinstance(model, EightBitLayer) or type(model) in TWINS:
        got, needs = f"is itself a {type(model).__name__}", "its layers are replaced, not itself"
        remedy = f"convert it with `jaxfp8.nnx.{type(model).__name__}.of(layer, recipe)`"
        raise ValueError(message(operation, "`model`", got, needs, remedy))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model))):
        got, needs = "has shapes in place of arrays", "arrays are needed"
        remedy = (
            "call it in the function that is given to `nnx.eval_shape`, on the model made there"
        )
        raise TypeError(message(operation, "`model`", got, needs, remedy))


def _check_scale(
    rules: tuple[Rule, ...], path: str, module: nnx.Module, scales: Mapping[str, Any]
) -> None:
    """Refuses a static recipe without its scale, or without a way to calibrate it."""
    how = static_activation(rules, path)
    if how is not None and not how.symmetric:
        got, needs = (
            f"`{path}` has a static recipe with a zero point",
            "only scales are calibrated",
        )
        remedy = "make the activation symmetric, or dynamic as in `jaxfp8.INT8_ASYMMETRIC`"
        raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
    if how is not None and path not in scales and not isinstance(module, nnx.Embed):
        got, needs = f"`{path}` has a static recipe", "a scale of its input is needed"
        remedy = "pass `sample`, arguments with which the model calls every layer"
        raise ValueError(message(_OPERATION, "layer", got, needs, remedy))


def _check_some(layers: Sequence[Change]) -> None:
    """Refuses a call without effect, if everything is in 8 bits already."""
    already = [row for row in layers if row.reason == "it is in 8 bits already"]
    if already and len(already) == sum(row.reason != _TABLES for row in layers):
        got, needs = f"is in 8 bits already, all {len(already)} layers", "float layers are needed"
        remedy = "undo it with `jaxfp8.nnx.dequantize`"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
