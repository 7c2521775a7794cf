"""Mutants of programs: one equation changed, so that the pattern is another one, or none any more.

The equation is the last one before the first dot (at any depth) that can be another of its kind: a
scale added instead of multiplied, a zero point added instead of subtracted. Where there is none,
the first value of 8 bits that is made wide goes through a curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxfp8._value import compat, dtypes

_OTHERS = {
    "mul": lax.add,
    "div": lax.mul,
    "sub": lax.add,
    "add": lax.sub,
    "max": lax.min,
}
Path = tuple[int, ...]  # positions of equations, outermost first


def mutant(fun: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., list[Any]]:
    """The program with one equation changed."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    paths = list(_before_dot(compat.open_jaxpr(jaxpr)))
    if paths:
        changed = core.jaxpr_as_fun(_swapped(jaxpr, paths[-1]))
        return lambda *given: changed(*jax.tree.leaves(given))
    return lambda *given: _curved(jaxpr, jax.tree.leaves(given))


def _before_dot(jaxpr: Any, path: Path = ()) -> Iterator[Path]:
    """Where equations that can be others stand, up to the first dot."""
    for i, eqn in enumerate(jaxpr.eqns):
        inner = compat.subjaxprs(eqn)
        if eqn.primitive.name == "dot_general":
            return
        if eqn.primitive.name in _OTHERS and _is_data(eqn.outvars[0].aval):
            yield (*path, i)
        if len(inner) == 1:
            yield from _before_dot(inner[0], (*path, i))
            if _has_dot(inner[0]):
                return


def _is_data(aval: Any) -> bool:
    """Whether it is a float, or a matrix of integers; a single one is an index."""
    return aval.dtype in dtypes.WIDE_FLOAT or (aval.dtype == jnp.int32 and aval.ndim > 1)


def _has_dot(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "dot_general" or any(map(_has_dot, compat.subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _swapped(jaxpr: Any, path: Path) -> Any:
    """The jaxpr with the equation at `path` made another one."""
    opened, eqns = compat.open_jaxpr(jaxpr), list(compat.open_jaxpr(jaxpr).eqns)
    eqn = eqns[path[0]]
    if len(path) == 1:
        other = jax.make_jaxpr(_OTHERS[eqn.primitive.name])(0.0, 0.0).eqns[0]
        eqns[path[0]] = eqn.replace(primitive=other.primitive, params=other.params)
    else:
        name, inner = next((k, v) for k, v in eqn.params.items() if _is_jaxpr(v))
        eqns[path[0]] = eqn.replace(params={**eqn.params, name: _swapped(inner, path[1:])})
    changed = opened.replace(eqns=eqns)
    return changed if opened is jaxpr else core.ClosedJaxpr(changed, jaxpr.consts)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(compat.open_jaxpr(value), "eqns")


def _curved(jaxpr: Any, leaves: list[Any]) -> list[Any]:
    """The program with a curve over the first 8-bit values that it widens."""
    opened = compat.open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, compat.consts_of(jaxpr), strict=True))
    env.update(zip(opened.invars, leaves, strict=True))
    curved = False
    for eqn in opened.eqns:
        inputs = [v.val if compat.is_literal(v) else env[v] for v in eqn.invars]
        functions, params = compat.bind_params(eqn)
        if eqn.primitive.name == "dot_general" and not curved:
            curved, wide = True, jnp.promote_types(inputs[0].dtype, inputs[1].dtype)
            if wide in dtypes.EIGHT_BIT or wide not in dtypes.WIDE_FLOAT:
                wide = jnp.float32
            inputs = [jnp.tanh(inputs[0].astype(wide)), jnp.tanh(inputs[1].astype(wide))]
            params = {**params, "preferred_element_type": None}
            out = eqn.primitive.bind(*inputs, **params).astype(eqn.outvars[0].aval.dtype)
        else:
            out = eqn.primitive.bind(*functions, *inputs, **params)
        outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [v.val if compat.is_literal(v) else env[v] for v in opened.outvars]
