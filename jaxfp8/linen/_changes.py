"""The change to each parameter of a model, and the reasons for floats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from jaxfp8._value.changes import Changes, change, has_no_row, why_wide
from jaxfp8._value.prepared import is_held
from jaxfp8.linen._kernel import Weight, noted_weights

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
        """A row for each weight of the parameters `before`; `after` are the same, quantised."""
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
    """Why a parameter stays as it is; "" if it is quantised."""
    if weight is None and kind in _TWINS:
        return f"its layer is Flax's, not the {kind.__name__} of `jaxfp8.linen`"
    if weight is None:
        own = issubclass(kind, _TWINS)
        return f"{kind.__name__} is a class of its own" if own else why_wide(kind)
    if is_held(before) or isinstance(before, Mapping):
        return "it is in 8 bits already"
    return "" if weight.recipe.weight else f"{weight.recipe.name} leaves weights as they are"
