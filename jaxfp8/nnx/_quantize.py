"""A live model in 8 bits, in place; what was done to it; and back again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxfp8 import _tables
from jaxfp8._errors import message
from jaxfp8._recipes import Recipe
from jaxfp8._rules import Rule, as_rules, choose
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._calibrate import calibrated, static_activation
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import USUAL, training_product
from jaxfp8.nnx._replace import replace
from jaxfp8.nnx._variables import nbytes

Where = Callable[[str, nnx.Module], bool] | str | None
_OPERATION = "jaxfp8.nnx.quantize"
_HEAD = ("layer", "kind", "weight", "becomes", "recipe", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one layer.

    Attributes:
      path: its place in the model, such as "layers/0/query".
      kind: name of its class.
      shape: shape of its weight.
      before, after: dtypes of the weight.
      recipe: name of the recipe; "" where it was left.
      reason: why it was left as it is; "" where it was not.
      bytes_before, bytes_after: of weight, scale and zero point; a bias is not counted.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    before: str
    after: str
    recipe: str
    reason: str
    bytes_before: int
    bytes_after: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """What was done to a model; prints as a table.

    Attributes:
      rows: one for each layer with a weight, in the order of the model.
    """

    rows: tuple[Change, ...]

    @property
    def changed(self) -> tuple[Change, ...]:
        """The layers that were replaced."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left(self) -> tuple[Change, ...]:
        """The layers that were left as they are."""
        return tuple(row for row in self.rows if row.reason)

    @property
    def bytes_saved(self) -> int:
        """Bytes of weights that the model no longer holds; negative after `dequantize`."""
        return sum(row.bytes_before - row.bytes_after for row in self.rows)

    def to_json(self, indent: int | None = None) -> str:
        """The rows and the bytes saved as JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"bytes_saved": self.bytes_saved, "rows": rows}, indent=indent)

    def to_html(self) -> str:
        """The rows as an HTML table."""
        return _tables.html(self._title(), _HEAD, [_cells(row) for row in self.rows])

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return _tables.text(self._title(), _HEAD, [_cells(row) for row in self.rows])

    def _title(self) -> str:
        before, after = (
            sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after")
        )
        return (
            f"{len(self.changed)} of {len(self.rows)} layers changed; weights were "
            f"{_tables.size(before)}, are {_tables.size(after)}"
        )


def _cells(row: Change) -> tuple[str, ...]:
    weight = f"{row.before}[{','.join(map(str, row.shape))}]"
    if row.reason:
        return row.path, row.kind, weight, "as it was", row.reason, _tables.size(row.bytes_before)
    sizes = f"{_tables.size(row.bytes_before)} -> {_tables.size(row.bytes_after)}"
    return row.path, row.kind, weight, row.after, row.recipe, sizes


def quantize(
    model: nnx.Module,
    recipe: Recipe | Rule | Sequence[Any],
    *,
    where: Where = None,
    sample: tuple[Any, ...] | None = None,
    scales: Mapping[str, Any] | None = None,
) -> Changes:
    """Replaces the layers of a live model by their 8-bit twins, in place.

    `nnx.Linear`, `LinearGeneral`, `Einsum` and `Embed` become those of `jaxfp8.nnx`, wherever in
    the model they stand, stacked layers (`nnx.vmap`, `nnx.scan`) included. Biases are the same
    variables as before; metadata and sharding names go from a kernel to its codes and scales. The
    float weights are gone from the model afterwards, and so is what FP8 training put into it.

    Args:
      model: changed in place.
      recipe: such as `jaxfp8.W8A16`; or rules in order of precedence (`jaxfp8.Rule`, or those of
        qwix), matched with the whole path of a layer. A layer that no rule names is left.
      where: which layers: a function of path and module, or a regular expression that is searched
        in the path. By default all.
      sample: positional arguments to call the model with, for a recipe with static scales: they
        are those of the inputs that the layers then see.
      scales: the static scales of inputs by path, if they are known already.

    Returns:
      What became of each layer with a weight, and the bytes that it saves; print it.

    Raises:
      TypeError: `model` is no module, or `recipe` no recipe for inference.
      ValueError: a chosen layer is in 8 bits already; `model` itself is a layer; a tile does not
        divide the shards of a weight; a static recipe lacks its `sample`.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> changes = jaxfp8.nnx.quantize(model, jaxfp8.W8A16)
      >>> changes.bytes_saved, type(model.layers[0]).__module__
      (12032, 'jaxfp8.nnx._layers')
    """
    _check_model(_OPERATION, model)
    rules, selects = rules_of(_OPERATION, recipe), selector(_OPERATION, where)
    known = dict(scales or {})
    if sample is not None:
        if not isinstance(sample, tuple | list):
            got, needs = f"is {type(sample).__name__}", "a tuple of positional arguments is needed"
            raise TypeError(message(_OPERATION, "`sample`", got, needs, "write `sample=(x,)`"))
        known |= calibrated(model, rules, selects, sample, {})
    rows: list[Change] = []

    def new(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            if where is None or not selects(path, module):
                rows.append(_row(path, module, module, reason="it is in 8 bits already"))
                return module
            got, needs = f"`{path}` is in 8 bits already", "a float layer is needed"
            remedy = "choose others in `where`, or undo it with `jaxfp8.nnx.dequantize`"
            raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
        if not any(isinstance(module, kind) for kind in TWINS):
            return module
        chosen = choose(rules, path)
        reason = _why_left(path, module, chosen, selects)
        twin = module
        if chosen is not None and not reason:
            _check_scale(rules, path, module, known)
            twin = TWINS[type(module)].of(module, chosen, path=path, scale=known.get(path))
        rows.append(_row(path, module, twin, reason=reason))
        return twin

    replace(model, new)
    changes = Changes(rows=tuple(rows))
    _check_some(changes, where)
    return changes


def dequantize(model: nnx.Module, *, where: Where = None) -> Changes:
    """Replaces 8-bit layers of a live model by the layers of Flax that they came from, in place.

    The weights are the floats that the 8 bits stand for, in the dtype that they had; what was
    rounded away does not come back. Biases and metadata stay.

    Args:
      model: changed in place.
      where: which layers, as in `quantize`; by default all.

    Returns:
      What became of each 8-bit layer.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8)
      >>> jaxfp8.nnx.dequantize(model).bytes_saved, type(model.layers[0]).__name__
      (-12032, 'Linear')
    """
    operation = "jaxfp8.nnx.dequantize"
    _check_model(operation, model)
    selects = selector(operation, where)
    rows: list[Change] = []

    def new(path: str, module: nnx.Module) -> nnx.Module:
        if not isinstance(module, EightBitLayer) or not selects(path, module):
            return module
        layer = module.to_float()
        rows.append(_row(path, module, layer))
        return layer

    replace(model, new)
    return Changes(rows=tuple(rows))


def prepare(model: nnx.Module) -> Changes:
    """Lays the 8-bit weights of a live model out as the CPU's kernels read them, in place.

    Once, where a model is loaded for inference: see `jaxfp8.prepare`. On a GPU nothing changes.
    Checkpoints hold weights as they were before: restore them first.

    Args:
      model: changed in place; `dequantize` takes it back to floats.

    Returns:
      What became of each 8-bit layer, and why of one that was left.

    Raises:
      TypeError: `model` is no module.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.quantize(model, jaxfp8.INT8)
      >>> len(jaxfp8.nnx.prepare(model).changed), model.layers[0].weight
      (1, PreparedArray(int8[64,64], contracting=-2))
    """
    _check_module("jaxfp8.nnx.prepare", model)
    rows: list[Change] = []
    chosen: list[EightBitLayer] = []

    def visit(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer):
            reason = module.why_not_prepared()
            row = _row(path, module, module, reason)
            rows.append(row if reason else dataclasses.replace(row, after="prepared"))
            chosen.extend([] if reason else [module])
        return module

    visit("", model)
    replace(model, visit)
    for layer in chosen:
        layer.prepare()
    return Changes(rows=tuple(rows))


def selector(operation: str, where: Where) -> Callable[[str, nnx.Module], bool]:
    """`where` as a function of path and module."""
    if where is None:
        return lambda path, module: True
    if callable(where):
        return where
    try:
        pattern = re.compile(where)
    except (re.error, TypeError) as error:
        got, needs = f"is {where!r}", "a function of path and module or a regular expression"
        remedy = "write one such as `r'layers/\\d+/mlp'`"
        raise ValueError(
            message(operation, "`where`", got, f"{needs} is needed", remedy)
        ) from error
    return lambda path, module: pattern.search(path) is not None


def why_unfit(module: nnx.Module) -> str:
    """Why a layer has no 8-bit twin; "" if it has one."""
    if type(module) not in TWINS:
        return f"{type(module).__name__} is a class of its own"
    for name, usual in USUAL.items():
        value = getattr(module, name, usual)
        if value is not usual and value is not None and value is not training_product(module):
            return f"it has a `{name}` of its own"
    weight = getattr(module, TWINS[type(module)].WEIGHT)[...]
    if weight.dtype not in (jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.float16):
        return f"its weight is {weight.dtype}"
    return "" if weight.size else "its weight is empty"


def _why_left(path: str, module: nnx.Module, recipe: Recipe | None, selects: Any) -> str:
    if not selects(path, module):
        return "`where` does not choose it"
    return why_unfit(module) if recipe is not None else "no rule gives it a recipe"


def _row(path: str, before: nnx.Module, after: nnx.Module, reason: str = "") -> Change:
    old, new = (_weight_variables(module) for module in (before, after))
    recipe = next((m.recipe.name for m in (after, before) if isinstance(m, EightBitLayer)), "")
    return Change(
        path=path,
        kind=type(before).__name__,
        shape=before.weight.shape if isinstance(before, EightBitLayer) else old[0][...].shape,
        before=str(old[0][...].dtype),
        after=str(new[0][...].dtype),
        recipe="" if reason else recipe,
        reason=reason,
        bytes_before=nbytes(*old),
        bytes_after=nbytes(*new),
    )


def _weight_variables(module: nnx.Module) -> list[Any]:
    """Weight, scale and zero point of a layer, None where it has none."""
    if isinstance(module, EightBitLayer):
        held = module.held()
        return [held.codes, held.scale, held.zero_point]
    return [getattr(module, "embedding" if isinstance(module, nnx.Embed) else "kernel")]


def rules_of(operation: str, recipe: Any) -> tuple[Rule, ...]:
    """Rules for inference from what a user gave."""
    if hasattr(recipe, "gradient_dtype"):
        got, needs = "is for training", "a recipe such as jaxfp8.W8A16 is needed"
        remedy = "train with `jaxfp8.nnx.fp8_training(model, recipe)`"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))
    return as_rules(recipe, operation)


def _check_module(operation: str, model: Any) -> None:
    if not isinstance(model, nnx.Module):
        got, needs = f"is of type {type(model).__name__}", "an nnx.Module is needed"
        remedy = "for linen, see `jaxfp8.linen.quantize`"
        raise TypeError(message(operation, "`model`", got, needs, remedy))


def _check_model(operation: str, model: Any) -> None:
    _check_module(operation, model)
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


def _check_scale(rules: Any, path: str, module: nnx.Module, scales: Mapping[str, Any]) -> None:
    """Refuses a static recipe that nothing was, or can be, calibrated for."""
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


def _check_some(changes: Changes, where: Where) -> None:
    """Refuses a call that changed nothing because everything is in 8 bits already."""
    already = [row for row in changes.rows if row.reason == "it is in 8 bits already"]
    if already and len(already) == len(changes.rows):
        got, needs = f"is in 8 bits already, all {len(already)} layers", "float layers are needed"
        remedy = "undo it with `jaxfp8.nnx.dequantize`"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
