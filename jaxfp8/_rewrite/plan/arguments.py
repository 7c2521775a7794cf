"""The arguments of a call: arrays, which are traced, and other leaves, which are static."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._value import compat

# Options of JAX that change a trace.
_CONFIGURATION = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)
# The classes of arrays seen so far: a call may have hundreds of leaves, but of few classes.
_ARRAYS: set[type] = {np.ndarray}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, arrays and other leaves apart.

    Attributes:
      arrays: leaves that are arrays, tracers or abstract arrays, in order.
      others: leaves that are not, as (position, value).
      tree: the structure of (args, kwargs).
    """

    arrays: tuple[Any, ...]
    others: tuple[tuple[int, Any], ...]
    tree: Any

    def key(self) -> Hashable:
        """What a trace depends on: calls with equal keys have the same trace."""
        others = tuple([(i, type(x), exact(x)) for i, x in self.others])
        return (
            _avals(self.arrays),
            others,
            self.tree,
            *[getattr(jax.config, name) for name in _CONFIGURATION],
            jax.default_backend(),
        )

    def restore(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs with the given arrays in their places."""
        leaves: list[Any] = list(arrays)
        for position, value in self.others:
            leaves.insert(position, value)
        return jax.tree.unflatten(self.tree, leaves)


def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Split the leaves of the arguments into arrays and others."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    if _ARRAYS.issuperset(map(type, leaves)):
        return Arguments(tuple(leaves), (), tree)
    known = [is_array(leaf) for leaf in leaves]
    arrays = tuple([leaf for leaf, array in zip(leaves, known, strict=True) if array])
    others = [
        (i, leaf) for i, (leaf, array) in enumerate(zip(leaves, known, strict=True)) if not array
    ]
    return Arguments(arrays, tuple(others), tree)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a tracer or an abstract array."""
    if type(leaf) in _ARRAYS:
        return True
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        _ARRAYS.add(type(leaf))
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def exact(leaf: Any) -> Hashable:
    """A leaf as a key: 0.0 and -0.0 are equal but differ, and NaN equals NaN as a key."""
    return repr(leaf) if isinstance(leaf, float | complex) else leaf


def _avals(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The abstract values of arrays."""
    avals = compat.avals_on_one_device(arrays)
    return tuple(map(_aval, arrays)) if avals is None else avals


def _aval(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return jax.typeof(leaf)
