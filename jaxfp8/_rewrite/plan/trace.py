"""The first pass: a function as a jaxpr; and what holds while one is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._rewrite.plan.arguments import Arguments, is_array
from jaxfp8._value import compat
from jaxfp8._value.errors import message

# Leaves of an output that are no arrays. They are kept beside the program.
_LABELS = (str, bytes, enum.Enum, np.dtype, type)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A function as a jaxpr.

    Attributes:
      jaxpr: its equations.
      consts: its constants.
      out_tree: the structure of its output.
      labels: leaves of its output that are no arrays, such as strings, as (position, value).
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any
    labels: tuple[tuple[int, Any], ...] = ()

    def restore(self, arrays: Sequence[Any]) -> Any:
        """The output with the given arrays in their places."""
        leaves = list(arrays)
        for position, value in self.labels:
            leaves.insert(position, value)
        return jax.tree.unflatten(self.out_tree, leaves)

    def used(self) -> tuple[int, ...]:
        """Positions of the inputs (constants, then arrays) that anything depends on."""
        jaxpr = compat.open_jaxpr(self.jaxpr)
        read = {v for eqn in jaxpr.eqns for v in eqn.invars if not compat.is_literal(v)}
        read |= {v for v in jaxpr.outvars if not compat.is_literal(v)}
        return tuple(i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars]) if v in read)

    @property
    def is_cacheable(self) -> bool:
        """Whether it holds no tracer of a transformation that is still running."""
        return not any(isinstance(c, jax.core.Tracer) for c in self.consts)


def trace(fun: Callable[..., Any], arguments: Arguments) -> Trace:
    """Trace a function. A jitted one is traced through its jit, with its static arguments."""
    out_tree = None
    labels: tuple[tuple[int, Any], ...] = ()

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree, labels
        args, kwargs = arguments.restore(arrays)
        leaves, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        labels = tuple((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, _LABELS))
        return [_output(fun, leaf) for leaf in leaves if not isinstance(leaf, _LABELS)]

    with cotangents_of_one_dtype():
        jaxpr = jax.make_jaxpr(flat)(*arguments.arrays)
    return Trace(jaxpr, tuple(compat.consts_of(jaxpr)), out_tree, labels)


def _output(fun: Callable[..., Any], leaf: Any) -> Any:
    """A leaf of the output that is an array or a number."""
    if is_array(leaf) or isinstance(leaf, numbers.Number):
        return leaf
    name = getattr(fun, "__name__", type(fun).__name__)
    raise TypeError(
        f"`jaxfp8.rewrite`: `{name}` returns a {type(leaf).__name__}; its outputs need to be "
        "arrays, numbers, strings, enums or dtypes, in pytrees; register the class with "
        "`jax.tree_util`, or return its arrays."
    )


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within this context, the garbage collector does not start by itself.

    Deciding and emitting make tens of thousands of objects that live until the end. After every few
    thousand the collector would visit all objects of the process. For a transformer of 32 layers
    that took longer than all the rest. Reference counting goes on.
    """
    if not gc.isenabled():  # by the user, or by a rewrite around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def cotangents_of_one_dtype() -> Iterator[None]:
    """Traces a derivative.

    Raises:
      TypeError: cotangents of one array differ in dtype. JAX says so outside a trace.
    """
    try:
        yield
    except AssertionError as error:
        types = compat.mixed_cotangents(error)
        if types is None:
            raise
        first, second = types
        got = f"of shape {first.shape} are {first.dtype} and {second.dtype}"
        needs = "JAX adds cotangents of one dtype only"
        remedy = (
            "have the `custom_vjp` return each cotangent in the dtype of its input, as "
            "`ct.astype(x.dtype)`, or differentiate with respect to floats"
        )
        text = message("jaxfp8.rewrite", "cotangents of one array", got, needs, remedy)
        raise TypeError(text) from error
