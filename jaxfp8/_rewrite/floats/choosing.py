"""Chooses each float dot's roundings: by the recipe for its path, and by `where`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxfp8._ops.int8_compute import MOST_TERMS
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._recipes.rules import Rule, as_rules, choose
from jaxfp8._recipes.selection import Selection, Where, unmatched_rules
from jaxfp8._rewrite.floats.rounding import FloatDot, Rounded, Split
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.report.build import report_of
from jaxfp8._rewrite.report.model import Site
from jaxfp8._value import dtypes
from jaxfp8._value.errors import message


class Chooser:
    """The decision about each dot of `fun`, by the rules and by `where`."""

    def __init__(
        self, operation: str, fun: Callable[..., Any], rules: tuple[Rule, ...], where: Where
    ) -> None:
        self._operation, self._fun, self._rules = operation, fun, rules
        self._selects = Selection(
            operation, "where", where, what="dots", of="row", example="mlp", texts=_texts
        )
        self._paths: set[str] = set()

    def __call__(self, dot: FloatDot) -> Rounded | Split | tuple[str, str]:
        """The roundings of a dot, or the reason to leave it and a remedy."""
        objection = _objection(dot)
        if objection is not None:
            return objection
        (row,) = report_of(self._fun, Seen([dot.site])).sites
        self._paths.add(row.path)
        if not self._selects(row.path, row):
            return "`where` does not choose it", "choose it in `where`"
        recipe = choose(self._rules, row.path)
        if recipe is None:
            return "no rule gives it a recipe", "add a rule for its path"
        if dot.weight is None and self._selects.given is None:
            return (
                "neither operand is a weight",
                "choose it in `where` to quantize both operands as activations",
            )
        return _by_recipe(dot, recipe)

    def unmatched(self) -> list[str]:
        """A sentence on `where` and on each rule without a chosen dot so far."""
        if not self._paths:
            return []
        rules = unmatched_rules(self._operation, self._rules, self._paths)
        return [text for text in (self._selects.unmatched(), *rules) if text]


def _texts(path: str, row: Site) -> tuple[str, ...]:
    return path, f"{row.where} {row.function}"


def _by_recipe(dot: FloatDot, recipe: Recipe) -> Rounded | Split | tuple[str, str]:
    """The roundings of a dot by its recipe, or the reason to leave it."""
    if dot.has_groups and (recipe.terms or recipe.compute) is not None:
        remedy = "use a recipe without `terms` and `compute`, such as `jaxfp8.FP8_DYNAMIC`"
        return f"{recipe.name} has another product, and none for groups", remedy
    if recipe.terms is not None:
        if any(role.kind == "held" for role in dot.roles):
            return "an operand is 8-bit data", "terms are made of floats; use another recipe"
        return Split(recipe.terms)
    activation = recipe.activation_of(dot.rows)
    kinds = [recipe.weight if i == dot.weight else activation for i in (0, 1)]
    left, right = (
        None if role.kind == "held" else kind for role, kind in zip(dot.roles, kinds, strict=True)
    )
    if left is None and right is None and not any(r.kind == "held" for r in dot.roles):
        why = "holds weights only"
        if recipe.activation is not None:
            why = f"leaves activations of {dot.rows} rows as they are"
        return (
            f"{recipe.name} {why}, and neither operand is a weight",
            "use a recipe for activations, such as `jaxfp8.FP8_DYNAMIC`",
        )
    if recipe.compute is not None and (objection := _not_in_int8(dot)) is not None:
        return objection
    scope = recipe.name if recipe.rows > 1 else ""
    return Rounded((left, right), recipe.compute, scope)


def _not_in_int8(dot: FloatDot) -> tuple[str, str] | None:
    """Why the product cannot be computed in int8, and a remedy; None if it can."""
    if any(value.dtype in dtypes.FLOAT8 for value in dot.operands):
        return "an operand is bare FP8 codes", "convert it to float32 or bfloat16 before the dot"
    size = math.prod(dot.op.inputs[0].shape[axis] for axis in dot.site.contracting(0))
    if size > MOST_TERMS:
        remedy = "use a recipe without `compute`"
        return f"an int32 holds the sum of {MOST_TERMS} products of int8, and it has {size}", remedy
    return None


def _objection(dot: FloatDot) -> tuple[str, str] | None:
    """Why a dot cannot be in 8 bits, and a remedy; None if it can."""
    for value, role in zip(dot.operands, dot.roles, strict=True):
        if value.dtype not in dtypes.WIDE_FLOAT and role.kind != "held":
            return f"an operand is {value.dtype}", "convert it to float32, bfloat16 or float16"
    if any(value.size == 0 for value in dot.operands):
        return "an operand is empty", "there is nothing to do"
    if dot.op.outputs[0].dtype not in dtypes.WIDE_FLOAT:
        return (
            f"the output dtype is {dot.op.outputs[0].dtype}",
            "set preferred_element_type to float32 or bfloat16",
        )
    return None


def checked_rules(recipe: object, operation: str) -> tuple[Rule, ...]:
    """The rules of a recipe; its activation scales must be dynamic."""
    if hasattr(recipe, "gradient_dtype"):
        got, needs = "is for training", "a recipe such as jaxfp8.FP8_DYNAMIC is needed"
        remedy = "train with the layers of `jaxfp8.linen` or `jaxfp8.nnx`"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))
    rules = as_rules(recipe, operation)
    for rule in rules:
        if rule.recipe is None or rule.recipe.activation is None:
            continue
        if rule.recipe.activation.static:
            got = f"{rule.recipe.name} has static scales of activations"
            needs = "an ordinary program has no place for calibrated scales"
            remedy = "use a dynamic one such as `jaxfp8.FP8_DYNAMIC`, or a layer of `jaxfp8.nnx`"
            raise ValueError(message(operation, "recipe", got, needs, remedy))
    return rules
