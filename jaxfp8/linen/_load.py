"""The tensors of a checkpoint as the parameters of a model, each 8-bit weight as it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta

from jaxfp8._recipes import placing
from jaxfp8._recipes.selection import Where, tell
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray, is_held, stored
from jaxfp8._value.transposed import TransposedArray, is_view
from jaxfp8.linen._kernel import INPUT_SCALE, PARAMS, holding

_OPERATION = "jaxfp8.linen.load"


def load(
    variables: Any,
    tensors: Mapping[str, Any],
    mapping: placing.Naming = None,
    *,
    ignore: Where = None,
    keep: Where = None,
) -> Any:
    """The variables of a model with the tensors of a checkpoint in them; 8-bit weights as they lie.

    A kernel with two axes is [N, K] in a checkpoint. In 8 bits it becomes a `TransposedArray`, and
    is read as it lies: no code is moved, widened or copied. In floats it is transposed. Kernels
    with more axes, and all other parameters, have the axes of the model's. Arrays keep their dtypes
    and shardings. All is checked first; of an open checkpoint one tensor is read at a time.

    Args:
      variables: of a model with 8-bit layers of `jaxfp8.linen`; shapes will do, as
        `jax.eval_shape(model.init, key, x)` gives them.
      tensors: arrays and `QArray`s by name, as `jaxfp8.checkpoint.load` or `open` gives them.
      mapping: the name of the tensor for each path in the parameters, as a function or a mapping.
        Its missing paths and its None are named as torch does it: "layers_0/up/kernel" is
        "layers_0.up.weight". Several names are stacked along the first axis, as `nn.scan` does, if
        each fits one index of it. Else they are the parts of a fused weight, one behind the other
        along N of [N, K]; a scale per tensor becomes one per channel. A list of lists does both:
        "gate" and "up" of each expert are joined, then stacked.
      ignore: tensors to leave over: a regular expression to search in the name, a collection of
        names, or a function of name and tensor.
      keep: parameters to leave as they are, likewise by path.

    Returns:
      The variables. `jaxfp8.linen.quantize` leaves them as they are, and lists the floats.

    Warns:
      FallbackWarning: `keep` or a path in `mapping` selects nothing; static scales of inputs are
        left out, because the recipes of their layers choose others.

    Raises:
      ValueError: a parameter has no tensor or a tensor no parameter, all listed; shapes
        do not fit.
      TypeError: a tensor is in 8 bits and its parameter is not, or the other way round, or it is
        not held as the recipe of its layer says.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> model, x = jaxfp8.linen.Dense(32), jnp.ones((1, 64))
      >>> w = jaxfp8.quantize(jnp.ones((32, 64)), channelwise_axes=(0,))  # [N, K]
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0), x)
      >>> variables = load(shapes, {"weight": w, "bias": jnp.zeros(32)})
      >>> model.apply(variables, x).shape
      (1, 32)
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(variables[PARAMS], is_leaf=_is_whole)
    places = {"/".join(str(getattr(e, "key", e)) for e in path): leaf for path, leaf in leaves}
    names = placing.assign(_OPERATION, places, tensors, mapping, ignore, keep)
    for path, own in names.items():
        _check(path, places[path], own, tensors)
    if left := placing.left_scales(names, tensors):
        got = f"hold {len(left)} static scales of inputs, such as {left[0]!r}"
        needs = "the recipes of their layers choose others, so these are left out"
        remedy = "choose them in `ignore`, or give the layers a static recipe"
        tell(message(_OPERATION, "`tensors`", got, needs, remedy))
    filled = [
        leaf if path not in names else _filled(path, leaf, names[path], tensors)
        for path, leaf in places.items()
    ]
    return {**variables, PARAMS: jax.tree.unflatten(tree, filled)}


def _is_whole(leaf: Any) -> bool:
    return is_held(leaf) or isinstance(leaf, meta.AxisMetadata)


def _place(path: str, leaf: Any, names: placing.Names) -> placing.Place:
    """The place for a tensor; the first axis of a stack is that of the layers."""
    shape, name = tuple(_bare(leaf).shape), path.rpartition("/")[2]
    lead = () if isinstance(names, str) or len(shape) == 2 else (0,)
    if len(shape) != len(lead) + 2 or name not in ("kernel", "embedding"):
        every = () if is_held(leaf) else None
        return placing.Place(path=path, shape=shape, contracting=every)
    contracting = (len(shape) - 2,) if name == "kernel" else (len(shape) - 1,)
    return placing.Place(path=path, shape=shape, contracting=contracting, batch=lead)


def _bare(leaf: Any) -> Any:
    """A parameter without boxes of metadata, and before it was prepared."""
    bare = meta.unbox(leaf)
    return (
        jax.eval_shape(PreparedArray.unprepare, bare) if isinstance(bare, PreparedArray) else bare
    )


def _check(path: str, leaf: Any, names: placing.Names, tensors: Mapping[str, Any]) -> None:
    if path.rpartition("/")[2] == INPUT_SCALE:
        return
    own = _bare(leaf)
    shapes = placing.check(_OPERATION, _place(path, leaf, names), names, tensors)
    tensor = jax.eval_shape(lambda value: _like(own, value), shapes)
    if is_held(tensor) != is_held(own):
        got = f"is {tensor if is_held(tensor) else tensor.dtype}"
        needs = f"`{path}` is {own if is_held(own) else own.dtype}"
        remedy = "give the layer of that parameter the class, and the recipe, of its tensor"
        raise TypeError(message(_OPERATION, f"tensor `{names}`", got, needs, remedy))
    if not is_held(own):
        placing.check_dtype(_OPERATION, path, names, tensor, own)
    if is_held(own) and holding(own) != holding(tensor):
        got, needs = f"is {tensor}", f"`{path}` is held as {own}"
        remedy = "give its layer a recipe that holds weights as the tensor is"
        raise TypeError(message(_OPERATION, f"tensor `{names}`", got, needs, remedy))


def _filled(path: str, leaf: Any, names: placing.Names, tensors: Mapping[str, Any]) -> Any:
    if path.rpartition("/")[2] == INPUT_SCALE:
        return placing.input_scale(names, tensors).reshape(leaf.shape)
    value = placing.fill(_OPERATION, _place(path, leaf, names), names, tensors)
    value = _like(_bare(leaf), value)
    if not is_held(leaf):
        return leaf.replace_boxed(value) if isinstance(leaf, meta.AxisMetadata) else value
    box = next((b for b in jax.tree.leaves(leaf, is_leaf=_is_box) if _is_box(b)), None)
    return value if box is None else _boxed(box, value)


def _like(own: Any, value: Any) -> Any:
    """A weight with zero points of 0 if its parameter has some; files leave these out."""
    if not all(map(is_held, (own, value))):
        return value
    codes, wanted = stored(value), stored(own).zero_point
    if wanted is None or codes.zero_point is not None:
        return value
    whole = dataclasses.replace(codes, zero_point=jnp.zeros_like(codes.scale, dtype=wanted.dtype))
    return TransposedArray(whole, value.order) if is_view(value) else whole


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _boxed(box: Any, value: Any) -> Any:
    """The arrays of an 8-bit weight in boxes like that of its codes, names in the stored order."""
    axes = value.axes if isinstance(value, TransposedArray) else range(value.ndim)
    by_stored = dict(zip(axes, box.names, strict=True))
    names = [by_stored[axis] for axis in range(value.ndim)]

    def boxed(array: Any) -> Any:
        if array.ndim != stored(value).ndim:
            return array
        kept = tuple(n if size > 1 else None for n, size in zip(names, array.shape, strict=True))
        return box.replace_boxed(array).replace(names=kept)

    return jax.tree.map(boxed, value)
