"""The report on a whole model, and its checks, for linen and nnx."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jaxfp8._recipes.accuracy_recorder import Recorder
from jaxfp8._recipes.accuracy_report import AccuracyReport
from jaxfp8._recipes.recipes import Recipe, TrainingRecipe
from jaxfp8._value import accuracy
from jaxfp8._value.errors import level_of_user, message
from jaxfp8._value.progress import progress

_NOT_WHOLE = "without the rounding of weights (give `reference`, the floats, for the whole error)"


def compared(
    operation: str,
    recorder: Recorder,
    exact: Any,
    got: Any,
    wide: Callable[[], Any] | None,
    *,
    is_whole: bool,
) -> AccuracyReport:
    """The report on a model, after it has run.

    `wide` gives the outputs of the model with dequantized weights; None if it cannot. If the float
    weights are unknown (`is_whole`), `exact` is of dequantized ones, and a warning says so.
    """
    rows = sorted(recorder.rows(), key=lambda row: (not math.isnan(row.sqnr), row.sqnr))
    total = accuracy.compare(exact, got)
    if not is_whole:
        held, needs = "has 8-bit weights alone", "the rounding of weights is not in this report"
        remedy = "give `reference`, the floats that they were made from, for the whole error"
        text = message(operation, "the model", held, needs, remedy)
        warnings.warn(text, UserWarning, stacklevel=level_of_user())
        return AccuracyReport(rows=tuple(rows), total=total, note=_NOT_WHOLE)
    parts: dict[str, Any] = {}
    if wide is not None and any(row.weight and row.activation for row in rows):
        between = wide()
        parts["weights"] = accuracy.compare(exact, between)
        parts["activations"] = accuracy.compare(between, got)
    return AccuracyReport(rows=tuple(rows), total=total, **parts)


def rounds_activations(recipe: Recipe | TrainingRecipe) -> bool:
    """Whether a product of the recipe rounds activations, too."""
    if not isinstance(recipe, Recipe):
        return True
    return recipe.activation is not None or recipe.terms is not None


@contextlib.contextmanager
def recording(layers: int) -> Iterator[Recorder]:
    """A recorder, and on a terminal a bar for so many layers."""
    with progress("measuring layers", layers) as done:
        yield Recorder(lambda path: done(1, path))


def check_some(operation: str, layers: Collection[Any]) -> None:
    """Refuses a model without layers to compare."""
    if not layers:
        got, needs = "has no layer to compare", "8-bit layers, FP8 training or a recipe is needed"
        remedy = "give the `recipe` that you think of"
        raise ValueError(message(operation, "`model`", got, needs, remedy))


def check_reference(operation: str, recipe: Any, reference: Any) -> None:
    """Refuses a recipe and a reference together."""
    if recipe is not None and reference is not None:
        got, needs = "are both given", "one of them says what to compare"
        remedy = "give `recipe` with a float model, `reference` with an 8-bit one"
        raise ValueError(message(operation, "`recipe` and `reference`", got, needs, remedy))


def check_alone(operation: str, operand: str, rounds: bool) -> None:
    """Refuses 8-bit weights without floats if no layer rounds activations: nothing is measured."""
    if not rounds:
        got = "has 8-bit weights, and its recipe rounds nothing else"
        needs = "their error is unknown without the float ones"
        remedy = "give `reference`, the floats that they were made from"
        raise ValueError(message(operation, f"`{operand}`", got, needs, remedy))
