"""Calls on arrays are dispatched by `jax.jit`, in C++.

Python takes longer to find the trace that a call belongs to than a small program takes to run. So a
call first goes to a jitted function of the arguments as they are, whose trace looks up the rewrite.
That function refuses what jit cannot tell apart, such as a Python number and an array of rank 0. It
also refuses what must not run under this jit. Then Python finds the trace (`engine.Rewriter`).
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.plan.arguments import Arguments, exact, split

# An argument of these classes is static: there is a jitted function for each of its values.
_STATIC = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
# Each refusal costs a trace. After this many, calls of the function no longer come here.
_MOST_REFUSALS = 8

Lookup = Callable[[Arguments], Any]
# A jitted function, and the constants to give it.
Kept = tuple[Callable[..., Any], tuple[Any, ...]]


class Refused(Exception):
    """`Direct` does not take this call."""


class Direct:
    """The jitted functions of a rewriter, by static arguments.

    Args:
      name: that of the function.
      lookup: from arguments to the rewrite found for them: its constants `consts`, and `bare`,
        from flat arrays to the output; `bare` is None where Python has to dispatch.
      most: how many functions are kept; the one used longest ago goes first.
    """

    def __init__(self, name: str, lookup: Lookup, most: int) -> None:
        self._name, self._lookup, self._most = name, lookup, most
        self._refusals = 0
        self._functions: collections.OrderedDict[Hashable, Kept] = collections.OrderedDict()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the rewritten function; raises `Refused` where Python has to dispatch."""
        statics, rest = _statics(args, kwargs)
        kept = self._functions.get(statics)
        if kept is None:
            raise Refused
        if len(self._functions) > 1:
            self._functions.move_to_end(statics)
        function, consts = kept
        try:
            return function(consts, *rest)
        except Refused:
            self._refusals += 1
            if self._refusals > _MOST_REFUSALS:
                self._functions.clear()
            raise
        except TypeError:
            if split(*rest).others:  # jit takes arrays only
                raise Refused from None
            raise

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], version: Any) -> bool:
        """Take calls like this one, rewritten as `version`, from now on; False if not suited."""
        if self._refusals > _MOST_REFUSALS or version.bare is None:
            return False
        statics, rest = _statics(args, kwargs)
        if _is_mixed(split(*rest)):
            return False
        given = tuple(map(_on_device, version.consts))
        self._functions[statics] = (self._jitted(statics, version.consts), given)
        if len(self._functions) > self._most:
            self._functions.popitem(last=False)
        return True

    def _jitted(self, statics: Any, consts: tuple[Any, ...]) -> Callable[..., Any]:
        def whole(given: tuple[Any, ...], args: list[Any], kwargs: dict[str, Any]) -> Any:
            if _is_mixed(split(tuple(args), kwargs)):
                raise Refused
            arguments = split(*_merged(statics, args, kwargs))
            version = self._lookup(arguments)
            if version.bare is None or not _same(version.consts, consts):
                raise Refused
            return version.bare(*given, *arguments.arrays)

        whole.__name__ = whole.__qualname__ = self._name
        return jax.jit(whole)


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _is_mixed(arguments: Arguments) -> bool:
    """Whether a leaf is no array, or one that jit could have made of a Python number."""
    avals = map(jax.typeof, arguments.arrays)
    return bool(arguments.others) or any(
        a.shape == () and (a.weak_type or a.dtype == bool) for a in avals
    )


def _statics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, Any]:
    """The static arguments by place as a key, and (args, kwargs) without them."""
    named = {k: v for k, v in kwargs.items() if not _is_static(v)}
    placed = [None if _is_static(v) else v for v in args]
    places: list[tuple[int | str, Any]] = list(enumerate(args))
    places += [(k, v) for k, v in kwargs.items() if k not in named]
    statics = [(k, type(v), exact(v), v) for k, v in places if _is_static(v)]
    return tuple(statics), (placed, named)


def _is_static(argument: Any) -> bool:
    """Whether a whole argument is static. A NumPy scalar is an array, though also a `float`."""
    return isinstance(argument, _STATIC) and not isinstance(argument, np.generic)


def _on_device(const: Any) -> Any:
    """A constant as a JAX array, so that no call has to convert it from NumPy."""
    if not isinstance(const, np.ndarray):
        return const
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return jnp.asarray(const)


def _merged(
    statics: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Args and kwargs with the static ones back in their places."""
    places, named = list(args), dict(kwargs)
    for place, _, _, value in statics:
        if isinstance(place, int):
            places[place] = value
        else:
            named[place] = value
    return tuple(places), named
