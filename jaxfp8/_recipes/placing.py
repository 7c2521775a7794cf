"""Tensors of a checkpoint for the parameters of a model: their places and axis orders.

A checkpoint of torch has the weight of a layer as [N, K], its free axes before the contracted ones.
This order is read as it is: an 8-bit weight becomes a view, and no code is moved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._recipes.selection import Selection, Where, tell, unknown_names
from jaxfp8._value import joining
from jaxfp8._value.checks import is_array
from jaxfp8._value.dtypes import FLOAT8
from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray, adopt
from jaxfp8._value.spec import Shape
from jaxfp8._value.transposed import TransposedArray

Names = str | Sequence[str | Sequence[str]]
Naming = Mapping[str, Names] | Callable[[str], Names | None] | None

# Flax's names for torch's `weight` of a layer.
_WEIGHTS = ("kernel", "embedding", "scale")
_LISTED = 8
# Of a layer whose inputs have static scales. A layer that chooses its own takes none of them.
_INPUT_SCALE = "input_scale"
_OF_INPUTS = (_INPUT_SCALE, "input_zero_point", "output_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter of a model, as far as a tensor has to fit it."""

    path: str  # its path in the model
    shape: Shape  # its shape
    # The contracted axes of a layer's weight; None if it is something else, with the axes of its
    # tensor.
    contracting: Shape | None = None
    batch: Shape = ()  # batch axes of its product, stacked layers among them

    def of_one(self) -> Place:
        """The same for one of several parameters stacked along the first axis."""

        def less(axes: Shape) -> Shape:
            return tuple(axis - 1 for axis in axes if axis)

        contracting = None if self.contracting is None else less(self.contracting)
        return Place(
            path=self.path, shape=self.shape[1:], contracting=contracting, batch=less(self.batch)
        )


def torch_name(path: str) -> str:
    """Torch's name of the parameter at a path of a model.

    Slashes are dots, and `kernel`, `embedding` and `scale` are `weight`.

    Args:
      path: such as "layers/0/up/kernel".

    Returns:
      Its name in a checkpoint.

    Example:
      >>> import jaxfp8.nnx
      >>> jaxfp8.checkpoint.torch_name("layers/0/up/kernel")
      'layers.0.up.weight'
    """
    *module, last = path.split("/")
    return ".".join([*module, "weight" if last in _WEIGHTS else last])


def name_of(mapping: Naming, path: str) -> Names:
    """The name, or the names, of tensors for the parameter at a path."""
    name = mapping(path) if callable(mapping) else (mapping or {}).get(path)
    return torch_name(path) if name is None else name


def assign(
    operation: str,
    places: Mapping[str, Any],
    tensors: Mapping[str, Any],
    mapping: Naming,
    ignore: Where = None,
    keep: Where = None,
) -> dict[str, Names]:
    """The names of the tensors for each parameter, by path.

    Static scales of inputs that their layers do not take may be left over. A ValueError lists all
    parameters without a tensor, and all tensors without a parameter.
    """
    check_mapping(operation, "tensors", tensors)
    if mapping is not None and not callable(mapping):
        check_mapping(operation, "mapping", mapping)
    is_kept = Selection(
        operation, "keep", keep, what="parameters", of="parameter", example="lora", default=False
    )
    is_ignored = Selection(
        operation, "ignore", ignore, what="tensors", of="tensor", example="rotary", default=False
    )
    kept = {path for path, place in places.items() if is_kept(path, place)}
    filled = {path: name_of(mapping, path) for path in places if path not in kept}
    wanted = {path: all_names(names) for path, names in filled.items()}
    empty = [
        f"{path} (from {names[0]})" if len(names) == 1 else path
        for path, names in wanted.items()
        if any(name not in tensors for name in names)
    ]
    used = {name for names in wanted.values() for name in names}
    ignored = {name for name in tensors if is_ignored(name, shape_of(tensors, name))}
    taken = used | ignored | set(left_scales(filled, tensors))
    unused = [name for name in tensors if name not in taken]
    is_kept.tell()  # `ignore` names what some files have: a wrong one leaves a tensor unused
    tell(*unknown_names(operation, "mapping", mapping, places, "parameters"))
    if empty or unused:
        parts = [_listed("no tensor fills", empty), _listed("no parameter takes", unused)]
        got = "; ".join(part for part in parts if part)
        needs = "each parameter needs a tensor, and each tensor a parameter"
        remedy = "name them in `mapping`, or choose them in `keep` (paths) and `ignore` (tensors)"
        raise ValueError(message(operation, "`tensors`", f"do not fit: {got}", needs, remedy))
    return filled


def left_scales(filled: Mapping[str, Names], tensors: Mapping[str, Any]) -> list[str]:
    """Static scales of the inputs of layers that choose their own, as `assign` filled them.

    A layer with a static scale takes it; its zero point would change its numbers, and is not left.
    """
    used = {name for names in filled.values() for name in all_names(names)}
    return [name for name in tensors if _is_left(name, used)]


def _is_left(name: str, used: set[str]) -> bool:
    module, dot, last = name.rpartition(".")
    for part in _OF_INPUTS:
        weight = f"{module}{dot}weight" if last == part else name.removesuffix(f"_{part}")
        if weight != name and weight in used:
            return name.removesuffix(part) + _INPUT_SCALE not in used
    return False


def check_mapping(operation: str, name: str, given: Any) -> None:
    """Refuses what has no names, such as the path of a checkpoint."""
    if not isinstance(given, Mapping):
        got, needs = f"is of type {type(given).__name__}", "a mapping from names is needed"
        remedy = "`jaxfp8.checkpoint.open` makes one of the tensors of a folder"
        raise TypeError(message(operation, f"`{name}`", got, needs, remedy))


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{what} {', '.join(names[:_LISTED])}{more}"


def all_names(names: Names) -> list[str]:
    """One name or several, as a list without lists in it."""
    if isinstance(names, str):
        return [names]
    return [name for part in names for name in all_names(part)]


def shape_of(tensors: Mapping[str, Any], name: str) -> Any:
    """Shape and dtype of a tensor; an open checkpoint tells them without reading it."""
    tell = getattr(tensors, "shape", None)
    return tell(name) if callable(tell) else tensors[name]


def check(operation: str, place: Place, names: Names, tensors: Mapping[str, Any]) -> Any:
    """The future value of a parameter, as shapes; no tensor of an open checkpoint is read."""
    shapes = {name: _struct(operation, name, tensors) for name in all_names(names)}
    return jax.eval_shape(lambda held: _filled(operation, place, names, held.__getitem__), shapes)


def check_dtype(operation: str, path: str, names: Names, tensor: Any, own: Any) -> None:
    """Refuses bare codes and integers for a parameter of floats, and floats for one of integers."""
    kinds = [jnp.issubdtype(dtype, jnp.floating) for dtype in (tensor.dtype, own.dtype)]
    is_codes = tensor.dtype in FLOAT8 and own.dtype not in FLOAT8
    if kinds[0] == kinds[1] and not is_codes:
        return
    got, needs = f"is {tensor.dtype}", f"`{path}` is {own.dtype}"
    remedy = "convert it, or give codes as a QArray with their scale"
    raise TypeError(message(operation, f"tensor `{names}`", got, needs, remedy))


def fill(operation: str, place: Place, names: Names, tensors: Mapping[str, Any]) -> Any:
    """The value of a parameter: an array, or an 8-bit one in the order of the parameter's axes."""
    return _filled(operation, place, names, lambda name: tensors[name])


def input_scale(names: Names, tensors: Mapping[str, Any]) -> jax.Array:
    """The static scale of the input of a layer: the largest among parts with one input."""
    scales = [jnp.asarray(tensors[name]).reshape(()) for name in all_names(names)]
    return functools.reduce(jnp.maximum, scales)


def _struct(operation: str, name: str, tensors: Mapping[str, Any]) -> Any:
    """The shapes of a tensor; it has to be an array."""
    value = adopt(shape_of(tensors, name))
    if not all(is_array(leaf) for leaf in [value, *jax.tree.leaves(value)]):
        got, needs = f"is of type {type(value).__name__}", "an array or a QArray is needed"
        remedy = "load it with `jaxfp8.checkpoint.load`"
        raise TypeError(message(operation, f"tensor `{name}`", got, needs, remedy))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value)


def _filled(operation: str, place: Place, names: Names, read: Callable[[str], Any]) -> Any:
    if isinstance(names, str):
        return _fitted(operation, place, names, read(names))
    if any(not isinstance(part, str) for part in names):  # each index has parts of its own
        each = _place_of_one(operation, place, names)
        parts = [_filled(operation, each, part, read) for part in names]
        return stack(operation, place.path, parts)
    names = all_names(names)
    values = [adopt(read(name)) for name in names]
    _check_kinds(operation, place.path, values)
    one = place.of_one() if place.shape and len(names) == place.shape[0] else None
    if one is not None and all(_fits(one, value) for value in values):
        pairs = zip(names, values, strict=True)
        return stack(operation, place.path, [_fitted(operation, one, n, v) for n, v in pairs])
    # The parts of a fused weight [N, K] follow each other along N, behind axes of a batch.
    axis = len(place.batch) if values[0].ndim == len(place.shape) else 0
    whole = _joined(operation, place, names, values, axis)
    return _fitted(operation, place, ", ".join(names), whole)


def _place_of_one(operation: str, place: Place, names: Names) -> Place:
    """The place for each of the lists in `names`, which are stacked."""
    if place.shape and len(names) == place.shape[0]:
        return place.of_one()
    got, needs = f"names {len(names)} lists", f"`{place.path}` of shape {place.shape} is filled"
    remedy = "give a list for each index of its first axis"
    raise ValueError(message(operation, "`mapping`", got, needs, remedy))


def _in_8_bits(value: Any) -> bool:
    return isinstance(value, QArray | TransposedArray)


def _check_kinds(operation: str, path: str, values: Sequence[Any]) -> None:
    """Refuses floats beside 8 bits, and floats of several dtypes, for one parameter."""
    kinds = {None if _in_8_bits(value) else np.dtype(value.dtype) for value in values}
    if len(kinds) > 1:
        got, needs = f"is made of {len(kinds)} kinds of tensors", "those that are joined are alike"
        remedy = "keep them apart, or quantize all of them alike"
        raise ValueError(message(operation, f"`{path}`", got, needs, remedy))


def _fits(place: Place, value: Any) -> bool:
    """Whether a tensor has a shape fit for a parameter."""
    return tuple(value.shape) in _sizes(place)


def _sizes(place: Place) -> tuple[Shape, ...]:
    """The shapes allowed for a tensor: with all axes of the parameter, or as [N, K]."""
    if place.contracting is None:
        return (place.shape,)
    order = _torch_order(place)
    sizes = tuple(place.shape[axis] for axis in order)
    if place.batch:
        return (sizes,)
    free = len(order) - len(place.contracting)
    return sizes, (math.prod(sizes[:free]), math.prod(sizes[free:]))


def _torch_order(place: Place) -> Shape:
    """The axes of a weight in the order of torch: batch, free, contracted."""
    contracting = place.contracting or ()
    axes = range(len(place.shape))
    free = [axis for axis in axes if axis not in {*contracting, *place.batch}]
    return (*place.batch, *free, *contracting)


def _joined(
    operation: str, place: Place, names: Sequence[str], values: Sequence[Any], axis: int
) -> Any:
    """Tensors one behind the other."""
    rests = {(*v.shape[:axis], *v.shape[axis + 1 :]) for v in values}
    if len(rests) > 1 or not values[0].shape:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        got, needs = (
            f"have shapes {shapes}",
            f"`{place.path}` of shape {place.shape} is made of all",
        )
        remedy = "name tensors that fit one behind the other along N of [N, K], or one for each "
        remedy += "index of the first axis"
        raise ValueError(message(operation, f"tensors `{', '.join(names)}`", got, needs, remedy))
    if _in_8_bits(values[0]):
        return joining.joined(operation, place.path, values, axis)
    return joining.concatenated(values, axis)


def _fitted(operation: str, place: Place, name: str, value: Any) -> Any:
    """A tensor in the order of the parameter's axes; a view if it is in 8 bits."""
    value = adopt(value)
    if place.contracting is None:
        if _in_8_bits(value):
            got = f"is {value}, and `{place.path}` is no weight of a layer that has an 8-bit twin"
            needs, remedy = "floats are needed", "give `jaxfp8.dequantize` of it"
            raise TypeError(message(operation, f"tensor `{name}`", got, needs, remedy))
        if tuple(value.shape) != place.shape:
            raise _misfit(operation, place, name, value, place.shape)
        return value
    order, sizes = _torch_order(place), _sizes(place)[0]
    if not _fits(place, value):
        raise _misfit(operation, place, name, value, sizes)
    if tuple(value.shape) != sizes:
        free = len(order) - len(place.contracting)
        value = _split(operation, place, name, value, sizes, free)
    return _transposed(value, tuple(order.index(axis) for axis in range(len(order))))


def _transposed(value: Any, axes: Shape) -> Any:
    if axes == tuple(range(len(axes))):
        return value
    if _in_8_bits(value):
        return value.transpose(axes)
    return jnp.transpose(value, axes)


def _misfit(operation: str, place: Place, name: str, value: Any, sizes: Shape) -> ValueError:
    got = f"has shape {tuple(value.shape)}"
    needs = f"`{place.path}` of shape {place.shape} needs {sizes}"
    if place.contracting is not None and tuple(value.shape) == place.shape:
        remedy = "a weight is [N, K], as torch stores it: pass `.mT` of it"
    else:
        remedy = "make the model with the sizes of the checkpoint, or name another tensor"
    return ValueError(message(operation, f"tensor `{name}`", got, needs, remedy))


def _split(operation: str, place: Place, name: str, value: Any, sizes: Shape, free: int) -> Any:
    """[N, K] with N and K split into the layer's own axes."""
    parts = (sizes[:free], sizes[free:])

    def reshaped(leaf: Any) -> Any:
        if leaf is None or not leaf.shape:
            return leaf
        shape: list[int] = []
        for count, size, inner in zip(leaf.shape, value.shape, parts, strict=True):
            if count not in (1, size):
                tiles = f"tiles of {size // count} along an axis of {size}"
                needs = f"the layer has axes of {inner} there, which these may cut"
                remedy = "use a layer with one axis, such as Linear, and reshape what it gives"
                raise ValueError(
                    message(operation, f"tensor `{name}`", f"has {tiles}", needs, remedy)
                )
            shape += inner if count == size else [1] * len(inner)
        return leaf.reshape(shape)

    if isinstance(value, TransposedArray):
        value = value.contiguous()
    if not isinstance(value, QArray):
        return reshaped(value)
    return QArray(
        reshaped(value.qvalue), reshaped(value.scale), reshaped(value.zero_point), tiles=None
    )


def stack(operation: str, name: str, values: Sequence[Any]) -> Any:
    """Arrays of one kind as one with a new first axis; 8-bit ones keep their codes."""
    _check_kinds(operation, name, values)
    if _in_8_bits(values[0]):
        return joining.stacked(operation, name, values, 0)
    return joining.concatenated([value[None] for value in values], 0)
