"""Lists what `quantize` does to each parameter of a model, and what stays in floats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from jaxfp8._value.changes import Change, Changes, has_no_row, why_wide
from jaxfp8._value.prepared import is_held
from jaxfp8.linen._apply import applied
from jaxfp8.linen._kernel import PARAMS, Weight, noted_weights

Path = tuple[str, ...]
_TWINS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Embed)


def changes(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Changes:
    """Lists what `jaxfp8.linen.quantize` does to each parameter, or why it stays wide.

    The model is traced. Nothing is computed or changed.

    Args:
      model, variables, *args, **kwargs: as for `jaxfp8.linen.quantize`. `variables` may be its
        result, too.

    Returns:
      A row for each weight; print it.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8.linen
      >>> model = nn.Sequential([jaxfp8.linen.Dense(64), nn.relu, nn.Dense(8)])
      >>> x = jnp.ones((1, 64))
      >>> variables = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]).init(jax.random.key(0), x)
      >>> found = jaxfp8.linen.changes(model, variables, x)
      >>> [row.path for row in found.changed], found.left[0].reason
      (['layers_0'], "its layer is Flax's, not the Dense of `jaxfp8.linen`")
    """
    kinds: dict[Path, type[nn.Module]] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        kinds[tuple(map(str, context.module.path))] = type(context.module)
        return call(*args, **kwargs)

    with noted_weights() as weights, nn.intercept_methods(note):
        after = jax.eval_shape(lambda held: applied(model, held, args, kwargs)[1], variables)
    new, rows, others = dict(_parameters(after[PARAMS])), [], []
    for path, leaf in _parameters(variables[PARAMS]):
        kind, weight = kinds.get(path[:-1], nn.Module), weights.get(path)
        if weight is None and has_no_row(kind, path[-1], leaf.ndim):
            others.append(leaf)
        else:
            rows.append(_row(path, kind, weight, leaf, new[path]))
    return Changes(rows=tuple(rows), others=len(others), other_bytes=sum(map(_nbytes, others)))


def _parameters(tree: Any) -> list[tuple[Path, Any]]:
    """Paths and parameters, without boxes of metadata; an 8-bit parameter is one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_whole)
    return [(tuple(str(getattr(e, "key", e)) for e in path), meta.unbox(x)) for path, x in leaves]


def _is_whole(leaf: Any) -> bool:
    """Whether a node is one parameter; a checkpoint may have restored it as a dictionary."""
    is_restored = isinstance(leaf, Mapping) and "qvalue" in leaf
    return is_held(leaf) or isinstance(leaf, meta.AxisMetadata) or is_restored


def _row(path: Path, kind: type, weight: Weight | None, before: Any, after: Any) -> Change:
    of_layer = weight is not None or issubclass(kind, _TWINS)
    reason = _why_left(kind, weight, before)
    return Change(
        path="/".join(path[:-1] if of_layer else path),
        kind=kind.__name__,
        shape=_codes(before).shape,
        before=str(_codes(before).dtype),
        after=str(_codes(after).dtype),
        recipe="" if reason or weight is None else weight.recipe.name,
        reason=reason,
        bytes_before=_nbytes(before),
        bytes_after=_nbytes(after),
    )


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


def _codes(parameter: Any) -> Any:
    """The values of a parameter, in 8 bits or not."""
    if isinstance(parameter, Mapping):
        return parameter["qvalue"]
    parameter = getattr(parameter, "stored", parameter)
    return getattr(getattr(parameter, "packed", parameter), "qvalue", parameter)


def _nbytes(parameter: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(parameter))
