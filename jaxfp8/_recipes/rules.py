"""Recipes for parts of a model: rules on paths, ours and qwix's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jaxfp8._recipes.quantization import Granularity, Quantization
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value.errors import message, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The recipe of every layer in whose path `where` is found; the first such rule counts.

    Attributes:
      where: a regular expression that is searched in the path of a layer, such as `r"/attention/"`.
      recipe: its recipe; None leaves it as it is.

    Example:
      >>> import jaxfp8
      >>> from jaxfp8._recipes.rules import as_rules, choose
      >>> rules = as_rules([jaxfp8.Rule(where="^head$", recipe=None), jaxfp8.FP8_DYNAMIC])
      >>> choose(rules, "head"), choose(rules, "layers/0/mlp").name
      (None, 'FP8_DYNAMIC')
    """

    where: str = ".*"
    recipe: Recipe | None

    @classmethod
    def from_qwix(cls, rule: Any) -> Rule:
        """A `qwix.QuantizationRule` as a `Rule`.

        qwix gives a weight one scale per channel and an activation one per token. A static
        activation has one scale. `tile_size` cuts the contracted axis into tiles.

        Args:
          rule: anything with the fields of `qwix.QuantizationRule`; missing ones have its defaults.

        Returns:
          A `Rule` of the same paths; its recipe is None where the rule quantizes nothing.

        Raises:
          TypeError: a `QArray` cannot hold the dtype, such as int4.
          ValueError: the rule is for some operations only, or no recipe calibrates in its way.
        """
        if getattr(rule, "op_names", ()):
            raise _unsaid(
                "op_names", rule.op_names, "a recipe is for every product of a layer", "()"
            )
        weight = _operand(rule, "weight", _tile(rule), static=False)
        static = bool(getattr(rule, "act_static_scale", None))
        activation = _operand(rule, "act", "tensor" if static else _tile(rule), static=static)
        both_wide = weight is None and activation is None
        name = f"qwix rule {rule.module_path!r}"
        recipe = None if both_wide else Recipe(name=name, weight=weight, activation=activation)
        path = rule.module_path  # qwix matches all of a path
        return cls(where=path if path == Rule.where else rf"\A(?:{path})\Z", recipe=recipe)


def as_rules(recipe: Any, operation: str = "jaxfp8.Rule") -> tuple[Rule, ...]:
    """Rules from a recipe, a rule, a rule of qwix, or a sequence of these, in order."""
    if isinstance(recipe, Recipe):
        return (Rule(recipe=recipe),)
    if isinstance(recipe, Rule):
        return (recipe,)
    if hasattr(recipe, "weight_qtype"):
        return (Rule.from_qwix(recipe),)
    if isinstance(recipe, Iterable) and not isinstance(recipe, str | dict):
        return tuple(rule for item in recipe for rule in as_rules(item, operation))
    got, needs = f"is {shown(recipe)}", "a recipe, a rule or a list of rules is needed"
    remedy = "pass the object, such as `jaxfp8.FP8_DYNAMIC`"
    raise TypeError(message(operation, "`recipe`", got, needs, remedy))


def choose(rules: Iterable[Rule], path: str) -> Recipe | None:
    """The recipe of the first rule that matches `path`, or None."""
    return next((rule.recipe for rule in rules if re.search(rule.where, path)), None)


def _operand(
    rule: Any, kind: str, granularity: Granularity, *, static: bool
) -> Quantization | None:
    dtype = getattr(rule, f"{kind}_qtype", None)
    if dtype is None:
        return None
    field = f"{kind}_calibration_method"
    method = getattr(rule, field, None) or "absmax"
    if method not in ("absmax", "minmax"):
        raise _unsaid(field, method, "a recipe takes the whole range of the values", "'absmax'")
    return Quantization(
        dtype=dtype,
        granularity=granularity,
        symmetric=method == "absmax",
        static=static,
    )


def _tile(rule: Any) -> Granularity:
    tile = getattr(rule, "tile_size", None)
    if isinstance(tile, float):
        raise _unsaid("tile_size", tile, "a recipe states how many values share a scale", "128")
    return "channel" if tile is None else (tile, 1)


def _unsaid(field: str, value: Any, needs: str, example: str) -> ValueError:
    remedy = f"use a value such as {example}, or write the recipe yourself"
    return ValueError(
        message("jaxfp8.Rule.from_qwix", f"`{field}`", f"is {shown(value)}", needs, remedy)
    )
