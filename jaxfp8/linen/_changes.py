"""Runs a model to observe its layers: the change to each parameter, the reasons for floats."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList, meta
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxfp8._value.changes import Changes, change, has_no_row, why_wide
from jaxfp8._value.errors import message, shown
from jaxfp8._value.prepared import is_held
from jaxfp8.linen._kernel import Weight, noted_weights

# Arguments of `jaxfp8.nnx.quantize`. In linen the layers have the recipe.
_OF_LAYERS = ("recipe", "where")


def applied(
    model: nn.Module, variables: Any, args: Any, kwargs: Any, *, constant: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """The output of a model and its changed variables; the arguments stay as they are.

    The model may change caches and statistics, as in any forward pass, and make missing ones. It
    does not change scaling states.

    Args:
      model: the model.
      variables: its variables.
      args, kwargs: arguments of `model.apply`; a `mutable` among them is extended.
      constant: further constant collections, besides scaling states.
    """
    given = {name: value for name, value in kwargs.items() if name != "mutable"}
    mutable = DenyList((OVERWRITE_WITH_GRADIENT, *constant))
    return model.apply(variables, *args, **given, mutable=mutable)


def check_call(operation: str, model: Any, variables: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses all but a model of linen with its variables, and arguments of nnx's functions."""
    if not isinstance(model, nn.Module):
        got, needs = f"is of type {type(model).__name__}", "a module of linen is needed"
        remedy = f"for nnx, see `{operation.replace('linen', 'nnx')}`"
        raise TypeError(message(operation, "`model`", got, needs, remedy))
    if not isinstance(variables, Mapping) or "params" not in variables:
        got, needs = f"is {shown(variables)}", "a mapping with the collection 'params' is needed"
        remedy = "pass what `model.init` gives, or the first result of `quantize` and `prepare`"
        raise TypeError(message(operation, "`variables`", got, needs, remedy))
    for name in _OF_LAYERS:
        if name in kwargs and not _takes(model, kwargs.get("method"), name):
            got, needs = "is given", "the model does not take it, and each layer has its own recipe"
            remedy = "make the layers with it: `jaxfp8.linen.Dense(features, recipe=recipe)`"
            raise TypeError(message(operation, f"`{name}`", got, needs, remedy))


def _takes(model: nn.Module, method: Any, name: str) -> bool:
    """Whether a method of a model, by default the call, has an argument of that name."""
    if method is None or isinstance(method, str):
        method = getattr(type(model), method or "__call__")
    known = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in known)


Path = tuple[str, ...]
_TWINS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Embed)


class Notes:
    """Notes of a model's layers while it runs inside `noted`.

    Attributes:
      weights: descriptions of 8-bit weights by path.
      kinds: classes of modules by path.
    """

    def __init__(self) -> None:
        self.weights: dict[Path, Weight] = {}
        self.kinds: dict[Path, type[nn.Module]] = {}

    def kind(self, path: Path) -> type[nn.Module]:
        """The class of the module of a parameter."""
        return self.kinds.get(path[:-1], nn.Module)

    def changes(self, before: Any, after: Any) -> Changes:
        """A row for each weight of the parameters `before`; `after` are the same, quantized."""
        new, rows, others = dict(parameters(after)), [], []
        for path, leaf in parameters(before):
            kind, weight = self.kind(path), self.weights.get(path)
            if weight is None and has_no_row(kind, path[-1], leaf.ndim):
                others.append(leaf)
            else:
                of_layer = weight is not None or issubclass(kind, _TWINS)
                named = "/".join(path[:-1] if of_layer else path)
                recipe = "" if weight is None else weight.recipe.name
                reason = _why_left(kind, weight, leaf)
                rows.append(change(named, kind, leaf, new[path], recipe=recipe, reason=reason))
        return Changes.of(rows, others)


@contextlib.contextmanager
def noted() -> Iterator[Notes]:
    """Notes the modules called in this context, and the weights of 8-bit layers."""
    notes = Notes()

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        notes.kinds[tuple(map(str, context.module.path))] = type(context.module)
        return call(*args, **kwargs)

    with noted_weights() as notes.weights, nn.intercept_methods(note):
        yield notes


def parameters(tree: Any) -> list[tuple[Path, Any]]:
    """Paths and parameters, without boxes of metadata; an 8-bit parameter is one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_whole)
    return [(names_of(path), meta.unbox(leaf)) for path, leaf in leaves]


def names_of(path: Any) -> Path:
    """The keys of a path in a tree of parameters."""
    return tuple(str(getattr(entry, "key", entry)) for entry in path)


def _is_whole(leaf: Any) -> bool:
    """Whether a node is one parameter; a checkpoint may have restored it as a dictionary."""
    is_restored = isinstance(leaf, Mapping) and "qvalue" in leaf
    return is_held(leaf) or isinstance(leaf, meta.AxisMetadata) or is_restored


def _why_left(kind: type, weight: Weight | None, before: Any) -> str:
    """Why a parameter stays as it is; "" if it is quantized."""
    if weight is None and kind in _TWINS:
        return f"its layer is Flax's, not the {kind.__name__} of `jaxfp8.linen`"
    if weight is None:
        own = issubclass(kind, _TWINS)
        return f"{kind.__name__} is a class of its own" if own else why_wide(kind)
    if is_held(before) or isinstance(before, Mapping):
        return "it is in 8 bits already"
    return "" if weight.recipe.weight else f"{weight.recipe.name} leaves weights as they are"
