"""The tensors of a checkpoint into a model, each 8-bit weight as it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxfp8._recipes import placing
from jaxfp8._recipes.recipes import FP8_W8A16, Recipe
from jaxfp8._recipes.rules import Rule, choose
from jaxfp8._recipes.selection import Where, tell, unmatched_rules
from jaxfp8._value.changes import Change, Changes, change
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import is_held
from jaxfp8._value.spec import Shape
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._quantize import check_module, rules_of, weight_of, why_unfit
from jaxfp8.nnx._replace import replace, variables
from jaxfp8.nnx._variables import QParam
from jaxfp8.nnx._wide import weight_name, wide_parameters

_OPERATION = "jaxfp8.nnx.load"
_INPUT_SCALE = "input_scale"
# Made by a forward pass, and in no checkpoint.
_STATE = (nnx.RngState, nnx.Cache, nnx.Intermediate)


def load(
    model: nnx.Module,
    tensors: Mapping[str, Any],
    mapping: placing.Naming = None,
    *,
    recipe: Recipe | Rule | Sequence[Any] | None = None,
    ignore: Where = None,
    keep: Where = None,
) -> Changes:
    """Puts the tensors of a checkpoint into a model, in place; 8-bit weights as they lie.

    A layer with a weight in 8 bits becomes the layer of the same name in `jaxfp8.nnx`. Its kernel
    is [N, K] as the checkpoint has it, and read so: no code is moved, widened or copied. Arrays
    keep their dtypes and shardings. Floats of a layer of Flax are transposed to its [K, N].

    All is checked before anything is changed, so nothing is half loaded. `tensors` may be an open
    checkpoint; then one tensor is read at a time.

    Args:
      model: live, or of shapes as `nnx.eval_shape` makes it. Only loaded arrays are allocated.
      tensors: arrays and `QArray`s by name, as `jaxfp8.checkpoint.load` or `open` gives them;
        weights of layers with the axes of torch, [N, K].
      mapping: the name of the tensor for each path in the model, as a function or a mapping. Its
        missing paths and its None are named as torch does it: "layers/0/up/kernel" is
        "layers.0.up.weight". Several names fill one parameter. They are stacked along its first
        axis, if each fits one index of it. Else they are the parts of a fused weight, one behind
        the other along N of [N, K]; a scale per tensor becomes one per channel. A list of lists
        does both: "gate" and "up" of each expert are joined, then stacked. The largest of
        several static scales of an input is taken.
      recipe: how inputs of 8-bit layers are held: a recipe, or rules by path, as in `quantize`; by
        default an 8-bit layer keeps its own, and any other gets `FP8_W8A16`. The tensors say how
        weights are held. A static recipe takes the tensor "....input_scale" of each layer.
        Any other recipe leaves it out, and the report says so.
      ignore: tensors to leave over: a regular expression to search in the name, a collection of
        names, or a function of name and tensor.
      keep: parameters to leave as they are, likewise by path.

    Returns:
      A row for each weight, also of those in floats, with its bytes; print it.

    Warns:
      FallbackWarning: a rule, `keep` or a path in `mapping` selects nothing.

    Raises:
      ValueError: a parameter has no tensor or a tensor no parameter, all listed; shapes
        do not fit; a layer has no 8-bit twin.
      TypeError: `model` is no module, or `tensors` no mapping; a tensor in 8 bits is for something
        else than a layer's weight.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.eval_shape(lambda: nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0))))
      >>> w = jaxfp8.quantize(jnp.ones((32, 64)), channelwise_axes=(0,))  # [N, K]
      >>> tensors = {"layers.0.weight": w, "layers.0.bias": jnp.zeros(32)}
      >>> changes = jaxfp8.nnx.load(model, tensors)
      >>> changes.bytes_saved, model.layers[0].weight.shape, model(jnp.ones((1, 64))).shape
      (6016, (64, 32), (1, 32))
    """
    check_module(_OPERATION, model)
    placing.check_mapping(_OPERATION, "tensors", tensors)
    rules = () if recipe is None else rules_of(_OPERATION, recipe)
    loading = _Loading(model, tensors, mapping, rules)
    loading.assign(ignore, keep)
    loading.check()
    tell(*unmatched_rules(_OPERATION, rules, loading.eight_bit_layers()))
    return loading.run()


class _Loading:
    """One load: the parameters, their tensors, and the rows of the report.

    Attributes:
      names: by path of a parameter the names of its tensors.
    """

    names: dict[str, placing.Names]

    def __init__(
        self,
        model: nnx.Module,
        tensors: Mapping[str, Any],
        mapping: placing.Naming,
        rules: tuple[Rule, ...],
    ) -> None:
        self.model, self.tensors, self.mapping, self.rules = model, tensors, mapping, rules
        self.slots = {"/".join(path): _Slot(*slot) for path, *slot in _slots(model)}

    def assign(self, ignore: Where, keep: Where) -> None:
        """Finds the tensors of every parameter, and of every static scale of an input."""
        places = {path: slot.variable for path, slot in self.slots.items()}
        for path in self.eight_bit_weights():
            if self.is_static(path):
                places[f"{path.rpartition('/')[0]}/{_INPUT_SCALE}"] = None
        self.names = placing.assign(_OPERATION, places, self.tensors, self.mapping, ignore, keep)

    def eight_bit_weights(self) -> list[str]:
        """Paths of the weights with 8-bit tensors."""
        return [p for p, slot in self.slots.items() if slot.is_weight and self._is_8_bit(p)]

    def eight_bit_layers(self) -> list[str]:
        """Paths of these layers."""
        return [path.rpartition("/")[0] for path in self.eight_bit_weights()]

    def _is_8_bit(self, path: str) -> bool:
        first, *_ = placing.all_names(placing.name_of(self.mapping, path)) or [""]
        return first in self.tensors and is_held(placing.shape_of(self.tensors, first))

    def recipe(self, path: str) -> Recipe:
        """The recipe of the layer of a weight."""
        own = getattr(self.slots[path].holder, "recipe", None)
        return choose(self.rules, path.rpartition("/")[0]) or own or FP8_W8A16

    def is_static(self, path: str) -> bool:
        """Whether its recipe needs a scale of the layer's input."""
        how = self.recipe(path).activation
        return how is not None and how.static

    def check(self) -> None:
        """Refuses a wrong shape or dtype, before anything is read or changed."""
        for path, slot in self.slots.items():
            if path in self.names:
                place, names = slot.place(path), self.names[path]
                tensor = placing.check(_OPERATION, place, names, self.tensors)
                _check_kind(self.model, path, slot, names, tensor)

    def run(self) -> Changes:
        """Fills the model."""
        rows: list[Change] = []
        twins: dict[int, EightBitLayer] = {}
        for path, slot in self.slots.items():
            if path not in self.names:
                continue
            names = self.names[path]
            before: Any = slot.variable.get_value()
            value = placing.fill(_OPERATION, slot.place(path), names, self.tensors)
            if not slot.is_weight:
                slot.variable.set_value(value)
                continue
            layer: Any = slot.holder
            if is_held(value):
                layer = self._eight_bit(path, layer)
                layer.weight = value
                twins[id(slot.holder)] = layer
            else:
                slot.variable.set_value(value)
            rows.append(_row(path, slot.holder, before, layer))
        replace(self.model, lambda _, module: twins.get(id(module), module))
        wide, others = wide_parameters(self.model)
        left = tuple(placing.left_scales(self.names, self.tensors))
        return dataclasses.replace(Changes.of((*rows, *wide), others), left_scales=left)

    def _eight_bit(self, path: str, layer: Any) -> EightBitLayer:
        """The 8-bit twin of a layer, still without its weight; an 8-bit layer itself."""
        module, recipe = path.rpartition("/")[0], self.recipe(path)
        names = self.names.get(f"{module}/{_INPUT_SCALE}")
        scale = None if names is None else placing.input_scale(names, self.tensors)
        if isinstance(layer, EightBitLayer):
            layer.recipe = recipe
            if scale is not None:
                layer.input_scale = nnx.data(QParam(scale))
            return layer
        empty = dataclasses.replace(recipe, weight=None)
        twin: EightBitLayer = TWINS[type(layer)].of(layer, empty, path=module, scale=scale)
        twin.recipe = recipe
        return twin


def _check_kind(
    model: nnx.Module, path: str, slot: _Slot, names: placing.Names, tensor: Any
) -> None:
    """Refuses 8 bits for a layer without an 8-bit twin, and floats for an 8-bit layer."""
    layer = slot.holder
    is_codes = isinstance(layer, EightBitLayer) and slot.is_weight
    if not is_held(tensor) and not is_codes:
        placing.check_dtype(_OPERATION, path, names, tensor, slot.variable.get_value())
    if isinstance(layer, EightBitLayer):
        if slot.is_weight and not is_held(tensor):
            got, needs = f"is {tensor.dtype}", f"`{path}` is in 8 bits"
            remedy = "load it into the model of Flax's layers, then `jaxfp8.nnx.quantize` it"
            raise TypeError(message(_OPERATION, f"tensor `{names}`", got, needs, remedy))
        return
    if is_held(tensor) and layer is model:
        got, needs = f"is itself a {type(layer).__name__}", "its layers are replaced"
        remedy = f"load into a `jaxfp8.nnx.{type(layer).__name__}`"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    if is_held(tensor) and why_unfit(layer):
        got, needs = f"cannot be in 8 bits: {why_unfit(layer)}", "its tensor is"
        remedy = "give `jaxfp8.dequantize` of the tensor"
        raise ValueError(message(_OPERATION, f"layer of `{path}`", got, needs, remedy))


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A variable to fill, and its module."""

    holder: Any
    variable: Any

    @property
    def is_weight(self) -> bool:
        """Whether it is the weight of an 8-bit layer, or of one with an 8-bit twin."""
        if not isinstance(self.holder, (EightBitLayer, *TWINS)):
            return False
        if getattr(self.holder, "einsum_str", "") is None:
            return False  # only its calls know the axes of the sum
        return self.variable is getattr(self.holder, weight_name(self.holder))

    def place(self, path: str) -> placing.Place:
        """The place for a tensor."""
        if not self.is_weight:
            return placing.Place(path=path, shape=tuple(self.variable.get_value().shape))
        shape, contracting, batch = _weight_axes(self.holder, self.variable)
        return placing.Place(path=path, shape=shape, contracting=contracting, batch=batch)


def _weight_axes(layer: Any, variable: Any) -> tuple[Shape, Shape, Shape]:
    """Shape, contracted and batch axes of the weight of a layer, Flax's or ours."""
    if isinstance(layer, EightBitLayer):
        kind: type[EightBitLayer] = type(layer)
        shape = layer.whole_shape()
    else:
        kind = next(kind for flax, kind in TWINS.items() if isinstance(layer, flax))
        shape = tuple(variable.get_value().shape)
    return (shape, *kind.axes_of(layer, len(shape)))


def _slots(model: nnx.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Path, holder and variable of each parameter; of 8-bit weights the codes alone."""
    for path, holder, variable in variables(model):
        is_part = isinstance(holder, EightBitLayer) and isinstance(variable, QParam)
        is_codes = is_part and variable is getattr(holder, holder.WEIGHT)
        if isinstance(variable, _STATE) or (is_part and not is_codes):
            continue
        yield path, holder, variable


def _row(path: str, before: Any, value: Any, after: Any) -> Change:
    """The row of the weight of a layer; `value` is the former one."""
    new, layer = weight_of(after), path.rpartition("/")[0]
    if is_held(new):
        made = change(layer, type(before), value, new, recipe=after.recipe.name)
        return dataclasses.replace(made, shape=tuple(new.shape))
    return change(layer, type(before), value, new, reason=f"its tensor is {new.dtype}")
