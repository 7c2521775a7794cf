"""`rewrite`: trace a function, decide, and call what came out; cached by what was traced."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8 import _compat
from jaxfp8._rewrite import _derivatives
from jaxfp8._rewrite._decide import Decision, decide
from jaxfp8._rewrite._report import Report, report

# Leaves of an output that hold no array, and so may be kept beside the program.
_LABELS = (str, bytes, enum.Enum, np.dtype, type)
# Each value of an argument that is no array is a trace of its own, as in jax.jit.
_MOST_TRACES = 256


# What of JAX's configuration changes a trace.
_CONFIGURATION = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, arrays apart from everything else.

    Attributes:
      arrays: leaves that are arrays, tracers or abstract arrays, in order.
      others: leaves that are not, as (position, value).
      tree: the structure of (args, kwargs).
    """

    arrays: tuple[Any, ...]
    others: tuple[tuple[int, Any], ...]
    tree: Any

    def key(self) -> Hashable:
        """What a trace depends on; two calls of one key have the same trace."""
        avals = tuple(map(_aval, self.arrays))
        others = tuple((i, type(x), _exact(x)) for i, x in self.others)
        return (
            avals,
            others,
            self.tree,
            *(getattr(jax.config, name) for name in _CONFIGURATION),
            jax.default_backend(),
        )

    def after_first(self) -> int:
        """How many arrays come after those of the first argument."""
        (first, *_), _ = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        return self.tree.num_leaves - len(jax.tree.leaves(first))

    def restore(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs with the given arrays in their places."""
        leaves: list[Any] = list(arrays)
        for position, value in self.others:
            leaves.insert(position, value)
        return jax.tree.unflatten(self.tree, leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _exact(leaf: Any) -> Hashable:
    """A leaf as a key: 0.0 and -0.0 are equal but not the same, NaN is the same but not equal."""
    return repr(leaf) if isinstance(leaf, float | complex) else leaf


def _aval(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return jax.typeof(leaf)


def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Tell the arrays among the leaves of the arguments from the rest."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = tuple(leaf for leaf in leaves if _is_array(leaf))
    others = tuple((i, leaf) for i, leaf in enumerate(leaves) if not _is_array(leaf))
    return Arguments(arrays, others, tree)


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

    @property
    def is_cacheable(self) -> bool:
        """Whether it holds no tracer of a transformation that is still under way."""
        return not any(isinstance(c, jax.core.Tracer) for c in self.consts)


def trace(fun: Callable[..., Any], arguments: Arguments) -> Trace:
    """The first pass. A jitted function is traced through its own jit, static arguments and all."""
    out_tree = None
    labels: tuple[tuple[int, Any], ...] = ()

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree, labels
        args, kwargs = arguments.restore(arrays)
        leaves, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        labels = tuple((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, _LABELS))
        return [_output(fun, leaf) for leaf in leaves if not isinstance(leaf, _LABELS)]

    jaxpr = jax.make_jaxpr(flat)(*arguments.arrays)
    return Trace(jaxpr, tuple(_compat.consts_of(jaxpr)), out_tree, labels)


def _output(fun: Callable[..., Any], leaf: Any) -> Any:
    """A leaf of the output that is an array or a number."""
    if _is_array(leaf) or isinstance(leaf, numbers.Number):
        return leaf
    name = getattr(fun, "__name__", type(fun).__name__)
    raise TypeError(
        f"`jaxfp8.rewrite`: `{name}` returns a {type(leaf).__name__}; its outputs need to be "
        "arrays, numbers, strings, enums or dtypes, in pytrees; register the class with "
        "`jax.tree_util`, or return its arrays."
    )


Found = tuple[Trace, Callable[..., Any] | None]


class Rewriter:
    """The rewrites of one function, by what they were traced on.

    With `is_linear`, JAX will transpose the function in all arguments but the first, so what
    depends on those keeps to operations that can be transposed.
    """

    def __init__(
        self, fun: Callable[..., Any], *, strict: bool = False, is_linear: bool = False
    ) -> None:
        self.fun, self.strict, self.is_linear = fun, strict, is_linear
        self._cache: collections.OrderedDict[Hashable, Found] = collections.OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = split(args, kwargs)
        traced, call = self._lookup(arguments)
        if call is None:
            return self.fun(*args, **kwargs)
        outputs = call(*traced.consts, *arguments.arrays)
        return traced.restore(outputs)

    def _lookup(self, arguments: Arguments) -> Found:
        try:
            key = arguments.key()
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        except TypeError:  # a leaf that is neither an array nor hashable: traced at each call
            key, found = None, None
        if found is None:
            found = self._build(arguments)
            if key is not None and found[0].is_cacheable:
                self._cache[key] = found
                if len(self._cache) > _MOST_TRACES:
                    self._cache.popitem(last=False)
        return found

    def _build(self, arguments: Arguments) -> Found:
        traced = trace(self.fun, arguments)
        decision = decide(traced.jaxpr, arguments.after_first() if self.is_linear else 0)
        if self.strict:
            _refuse_misses(report(self.fun, decision.seen))
        if not decision.changed:
            return traced, None
        return traced, _callable(self.fun, traced, decision)


def _callable(fun: Callable[..., Any], traced: Trace, decision: Decision) -> Callable[..., Any]:
    """The rewritten function on flat arrays, with the derivatives of the original."""

    def run(*arrays: Any) -> list[Any]:
        return decision.program.run(arrays)

    run.__name__ = run.__qualname__ = getattr(fun, "__name__", "rewritten")
    call = _derivatives.differentiable(run, traced.jaxpr, Rewriter)
    ops = decision.program.ops
    if len(ops) == 1 and ops[0][0].name in ("jit", "pjit"):
        return call  # its own jit donates and shards; another around it would hide that
    return jax.jit(call)


def _refuse_misses(found: Report) -> None:
    if found.missed:
        first = found.missed[0]
        raise ValueError(
            f"`jaxfp8.rewrite`: strict, but {len(found.missed)} of {len(found.sites)} 8-bit dots "
            f"of `{found.name}` cannot be rewritten; the first, at {first.where}: {first.reason}; "
            f"{first.remedy}."
        )


def _check_callable(operation: str, fun: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"`jaxfp8.{operation}`: `fun` is {fun!r}, of type {type(fun).__name__}; it needs to be "
            f"a function: `jaxfp8.{operation}(f)(x)`."
        )


def rewrite(fun: Callable[..., Any], *, strict: bool = False) -> Callable[..., Any]:
    """Makes the dequantise-matmul patterns of a function into products of the 8-bit data itself.

    Wherever an operand of a `dot_general` in `fun` is, algebraically, an 8-bit array times scales
    (`q.astype(dtype) * scale`, in whatever order, shape and disguise), the dot, its scales, and the
    bias, residual, activation and 8-bit output that follow it become one scaled dot. Everything
    else is left as it is; if nothing matches, `fun` itself is called. Derivatives are those of
    `fun`, custom rules included, and are rewritten in turn.

    Args:
      fun: any function of pytrees of arrays, jitted or not. As with `jax.jit`, it is traced once
        for each combination of shapes, dtypes and values of arguments that are not arrays.
      strict: raise if a dot whose operand is or was 8-bit data cannot be rewritten.

    Returns:
      A function with the signature of `fun`, for use inside and outside `jit`, `grad`, `vmap`.

    Raises:
      TypeError: if `fun` is no function.
      ValueError: when called, if `strict` and a dot is missed; says which one and why.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> def f(x, q, scale):
      ...     return x @ (q.astype(jnp.float32) * scale)
      >>> x, q = jnp.ones((2, 3)), jnp.ones((3, 4), jnp.float8_e4m3fn)
      >>> float(jaxfp8.rewrite(f)(x, q, jnp.full((4,), 0.5))[0, 0])
      1.5
    """
    _check_callable("rewrite", fun)
    rewriter = Rewriter(fun, strict=strict)

    @functools.wraps(fun)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        return rewriter(*args, **kwargs)

    return rewritten


def explain(fun: Callable[..., Any]) -> Callable[..., Report]:
    """Says of every dot in a function whether `rewrite` captures it, and why not.

    Args:
      fun: the function, as given to `rewrite`.

    Returns:
      A function of the same arguments (`jax.ShapeDtypeStruct` in place of arrays will do) that
      returns a `Report`; nothing of `fun` is executed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> f = lambda x, q: x @ (q.astype(jnp.float32) * 0.5)
      >>> found = jaxfp8.explain(f)(jnp.ones((2, 3)), jnp.ones((3, 4), jnp.float8_e4m3fn))
      >>> len(found.matched), len(found.missed)
      (1, 0)
    """
    _check_callable("explain", fun)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Report:
        traced = trace(fun, split(args, kwargs))
        return report(fun, decide(traced.jaxpr).seen)

    return explained
