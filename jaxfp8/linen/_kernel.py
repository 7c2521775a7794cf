"""8-bit parameters of linen modules: makes, finds and checks them, with their metadata boxes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8._ops.quantize import quantize
from jaxfp8._recipes.recipes import Recipe, check_recipe
from jaxfp8._value.errors import message
from jaxfp8._value.no_gradient import constant_codes
from jaxfp8._value.prepared import PreparedArray, stored
from jaxfp8._value.qarray import QArray, check_shapes
from jaxfp8._value.shards import check_tiles_fit
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import TransposedArray

PARAMS, INPUT_SCALE = "params", "input_scale"
_DIFFERENTIATE = (
    "differentiate with respect to the floats of `floats, held = jaxfp8.linen.partition(params)`, "
    "and apply the model to `jaxfp8.linen.combine(floats, held)`"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """The description of a weight by its layer.

    Attributes:
      name: name of the parameter.
      shape: its shape.
      contracting: axes of the sum of the layer's product.
      batch: batch axes of that product.
      recipe: how it is held.
      why_not_prepared: why `jaxfp8.linen.prepare` leaves it as it is; "" if it does not.
    """

    name: str
    shape: Shape
    contracting: Shape
    batch: Shape = ()
    recipe: Recipe
    why_not_prepared: str = ""

    def quantize(self, value: Any) -> Any:
        """A float weight in 8 bits; each array gets its box of metadata."""
        if not isinstance(value, meta.AxisMetadata):
            return self.recipe.quantize_weight(value, self.contracting, self.batch)
        q = self.recipe.quantize_weight(value.unbox(), self.contracting, self.batch)
        return jax.tree.map(lambda leaf: _box(value, leaf), q)

    def own(self) -> Any:
        """Shapes and dtypes of the weight under its recipe."""
        return jax.eval_shape(self.quantize, jax.ShapeDtypeStruct(self.shape, jnp.float32))


def weight_of(module: nn.Module, weight: Weight, init: Callable[..., Any], dtype: Any) -> Any:
    """The weight of a module: in 8 bits, or a float array if the recipe leaves it wide.

    `init` makes it in 8 bits. A float weight is quantized while parameters may change, as in
    `jaxfp8.linen.quantize`, and is an error otherwise.
    """
    check_recipe(_operation(module), weight.recipe)
    _note(module, weight)
    if module.has_variable(PARAMS, weight.name):
        _settle(module, weight)

    def quantized(key: jax.Array, shape: Shape, dtype: Any) -> Any:
        value = init(key, shape, dtype)
        _check_shards(module, weight, value)
        return weight.quantize(value)

    if module.has_variable(PARAMS, weight.name) and _lies_otherwise(module, weight):
        value: Any = meta.unbox(module.get_variable(PARAMS, weight.name))
    else:
        value = module.param(weight.name, quantized, weight.shape, dtype)
    return constant_codes(value, _operation(module), weight.name, _DIFFERENTIATE)


# Collects weights by the path of their layer, inside `noted_weights`.
_NOTED: contextvars.ContextVar[dict[tuple[str, ...], Weight] | None] = contextvars.ContextVar(
    "jaxfp8_linen_weights", default=None
)


@contextlib.contextmanager
def noted_weights() -> Iterator[dict[tuple[str, ...], Weight]]:
    """Collects the descriptions of the weights of layers in this context, by path."""
    weights: dict[tuple[str, ...], Weight] = {}
    token = _NOTED.set(weights)
    try:
        yield weights
    finally:
        _NOTED.reset(token)


def _note(module: nn.Module, weight: Weight) -> None:
    noted = _NOTED.get()
    if noted is not None:
        noted[(*map(str, module.path), weight.name)] = weight


def _lies_otherwise(module: nn.Module, weight: Weight) -> bool:
    """Whether arrays have other shapes than `init` makes; Flax would refuse them."""
    given: Any = module.get_variable(PARAMS, weight.name)
    return isinstance(given, PreparedArray | TransposedArray)


def _settle(module: nn.Module, weight: Weight) -> None:
    """Checks the given weight of a module; quantizes it in `jaxfp8.linen.quantize`."""
    given: Any = module.get_variable(PARAMS, weight.name)
    if isinstance(given, Mapping) and "qvalue" in given:
        given = _restored(module, weight, given)
    value = meta.unbox(given)
    if isinstance(value, QArray | TransposedArray):
        check_shapes(stored(value), _operation(module), weight.name)
    if isinstance(value, PreparedArray):
        value = jax.eval_shape(PreparedArray.unprepare, value)
    if tuple(value.shape) != tuple(weight.shape):
        got = f"has shape {tuple(value.shape)}"
        needs, remedy = f"the input asks for {weight.shape}", "apply the layer to what it was for"
        raise ValueError(message(_operation(module), f"`{weight.name}`", got, needs, remedy))
    if isinstance(value, QArray | TransposedArray):
        _check_recipe_holds(module, weight, value)
        return
    if weight.recipe.weight is None:
        return
    if not module.is_mutable_collection(PARAMS):
        got, needs = f"is {value.dtype}", f"{weight.recipe.name} holds it in 8 bits"
        remedy = "convert the variables once with `jaxfp8.linen.quantize(model, variables, x)`"
        raise TypeError(message(_operation(module), f"`{weight.name}`", got, needs, remedy))
    _check_shards(module, weight, given)
    module.put_variable(PARAMS, weight.name, weight.quantize(given))


def _restored(module: nn.Module, weight: Weight, arrays: Mapping[str, Any]) -> QArray:
    """The `QArray` in a dictionary, as a checkpoint restored without a target gives it."""
    if not module.is_mutable_collection(PARAMS):
        got, needs = f"is a dictionary of {sorted(arrays)}", "a QArray is needed"
        remedy = (
            "restore the checkpoint into variables of the model, or convert what it gave once with "
            "`jaxfp8.linen.quantize(model, variables, x)`"
        )
        raise TypeError(message(_operation(module), f"`{weight.name}`", got, needs, remedy))
    if "scale" not in arrays:
        got, needs = f"is a dictionary of {sorted(arrays)}", "its codes need their `scale`"
        remedy = "restore both arrays of the checkpoint"
        raise ValueError(message(_operation(module), f"`{weight.name}`", got, needs, remedy))
    zero_point = arrays.get("zero_point")
    q = QArray(
        arrays["qvalue"], arrays["scale"], zero_point, tiles=getattr(weight.own(), "tiles", None)
    )
    module.put_variable(PARAMS, weight.name, q)
    return q


def _check_shards(module: nn.Module, weight: Weight, value: Any) -> None:
    """Refuses tiles cut by the mesh axes of a box, if the mesh is known."""
    names, how = getattr(value, "names", None), weight.recipe.weight
    if names is None or how is None or len(names) != len(weight.shape):
        return
    if isinstance(value, nn.LogicallyPartitioned):
        names = nn.logical_to_mesh_axes(names, value.rules) or ()
    mesh = value.mesh or jax.sharding.get_abstract_mesh()
    known = [_names_in(mesh, entry) for entry in names]
    sharding = NamedSharding(mesh, PartitionSpec(*known)) if not mesh.empty else None
    tiles = how.tiles(weight.shape, weight.contracting, weight.batch)
    check_tiles_fit(_operation(module), weight.name, weight.shape, sharding, tiles)


def _names_in(mesh: Any, entry: Any) -> tuple[str, ...]:
    """The mesh axes among the names of one axis."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name in mesh.axis_names)


def _check_recipe_holds(module: nn.Module, weight: Weight, value: Any) -> None:
    """Refuses an 8-bit weight of another recipe than its layer's."""
    own = weight.own()
    if isinstance(own, QArray) and holding(own) == holding(value):
        return
    needs = f"{weight.recipe.name} holds it as {own if isinstance(own, QArray) else 'floats'}"
    remedy = (
        "give the layer the recipe that its variables were made with, or make them anew from the "
        "float ones with `jaxfp8.linen.quantize(model, variables, x)`"
    )
    raise TypeError(message(_operation(module), f"`{weight.name}`", f"is {value}", needs, remedy))


def holding(q: Any) -> tuple[Any, ...]:
    """The part of an 8-bit weight settled by a recipe; the dtype of the scale is free."""
    return stored(q).qvalue.dtype, q.tile_sizes, stored(q).zero_point is None


def _operation(module: nn.Module) -> str:
    path = "/".join(map(str, module.path))
    return f"jaxfp8.linen.{type(module).__name__}" + (f" at {path}" if path else "")


def input_scale(module: nn.Module, recipe: Recipe, x: jax.Array) -> jax.Array | None:
    """The scale of the activations of a static recipe: a parameter, calibrated on the first input.

    Further inputs in `jaxfp8.linen.quantize` can make it larger.
    """
    how = recipe.activation
    if how is None or not how.static:
        return None
    known = module.has_variable(PARAMS, INPUT_SCALE)
    if not known and not module.is_mutable_collection(PARAMS):
        got, needs = "is missing", f"{recipe.name} needs the scale that calibration found"
        remedy = "make it with `jaxfp8.linen.quantize(model, variables, x)`"
        raise ValueError(message(_operation(module), "`input_scale`", got, needs, remedy))
    if known and not module.is_mutable_collection(PARAMS):
        return module.get_variable(PARAMS, INPUT_SCALE)
    scale = quantize(x, how.dtype, scale_dtype=how.scale_dtype).scale.reshape(())
    if known:
        scale = jnp.maximum(module.get_variable(PARAMS, INPUT_SCALE), scale)
    module.put_variable(PARAMS, INPUT_SCALE, scale)
    return scale


def _box(box: Any, leaf: jax.Array) -> Any:
    """An array of a `QArray` in the metadata box of its weight; axes of size 1 are not sharded."""
    names = getattr(box, "names", None)
    if names is None or len(names) != leaf.ndim:
        return leaf if leaf.ndim == 0 else box.replace_boxed(leaf)
    kept = tuple(n if size > 1 else None for n, size in zip(names, leaf.shape, strict=True))
    return box.replace_boxed(leaf).replace(names=kept)
