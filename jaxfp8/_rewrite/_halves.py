"""A derivative in two halves, and what passes between them: 8-bit data, not its wide copy.

Reverse mode splits a function into a first half, which computes outputs and residuals, and a
second half, linear in tangents or cotangents, which reads the residuals. Each half is rewritten by
itself. A residual that is dequantised 8-bit data would hide that from the second half, and be
kept in memory at full width; so its 8-bit array and scales are passed instead, and the second half
begins with the equations that dequantise them, which its own rewrite then captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfp8 import _compat
from jaxfp8._rewrite import _graph
from jaxfp8._rewrite._decide import resolve
from jaxfp8._rewrite._graph import Value
from jaxfp8._rewrite._walk import Walk

Rewrite = Callable[..., Callable[..., Any]]


class Halves:
    """The two halves of a derivative of one trace.

    Attributes:
      first: from primals to (outputs, what the second half needs).
      second: from that and further arrays to the derivative; if `is_linear`, JAX will transpose it
        in those arrays.
    """

    def __init__(
        self,
        first: Callable[..., tuple[Any, Any]],
        second: Callable[..., Any],
        primals: Sequence[Any],
        rewrite: Rewrite,
        *,
        is_linear: bool,
    ) -> None:
        jaxpr, out_tree, number, residual_tree = _trace(first, primals)
        opened, consts = _compat.open_jaxpr(jaxpr), _compat.consts_of(jaxpr)
        outputs, residuals = opened.outvars[:number], opened.outvars[number:]
        redone, roots = _sources(opened, residuals)

        def forward(*primals: Any) -> tuple[Any, list[Any]]:
            env = dict(zip([*opened.constvars, *opened.invars], [*consts, *primals], strict=True))
            _evaluate(opened.eqns, env)
            outs = [_read(env, v) for v in outputs]
            return jax.tree.unflatten(out_tree, outs), [_read(env, v) for v in roots]

        def backward(passed: Sequence[Any], *values: Any) -> Any:
            env = {v: x for v, x in zip(roots, passed, strict=True) if not _compat.is_literal(v)}
            _evaluate(redone, env)
            leaves = [_read(env, v) for v in residuals]
            return second(jax.tree.unflatten(residual_tree, leaves), *values)

        self.first, self.second = rewrite(forward), rewrite(backward, is_linear=is_linear)


def _trace(
    first: Callable[..., tuple[Any, Any]], primals: Sequence[Any]
) -> tuple[Any, Any, int, Any]:
    """The jaxpr of the first half, and how its outputs divide into outputs and residuals."""
    trees: list[Any] = []

    def flat(*primals: Any) -> list[Any]:
        outputs, residuals = first(*primals)
        out_leaves, out_tree = jax.tree.flatten(outputs)
        residual_leaves, residual_tree = jax.tree.flatten(residuals)
        trees.append((out_tree, len(out_leaves), residual_tree))
        return out_leaves + residual_leaves

    jaxpr = jax.make_jaxpr(flat)(*primals)
    return (jaxpr, *trees[-1])


def _sources(jaxpr: Any, residuals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The equations that only dequantise residuals, and the variables they all start from."""
    known = _dequantised(jaxpr)
    needed = {v for v in residuals if not _compat.is_literal(v)}
    redone, roots = [], []
    for eqn in reversed(jaxpr.eqns):
        if any(v in known and v in needed for v in eqn.outvars):
            redone.append(eqn)
            needed |= {v for v in eqn.invars if not _compat.is_literal(v)}
    made = {v for eqn in redone for v in eqn.outvars}
    roots = [v for v in needed if v not in made]
    return redone[::-1], roots


def _dequantised(jaxpr: Any) -> set[Any]:
    """The variables of a jaxpr that are known to be dequantised 8-bit data."""
    names: dict[Any, Value] = {}
    walk = Walk(resolve)
    consts = [_graph.value_of(v.aval) for v in jaxpr.constvars]
    walk.jaxpr(jaxpr, consts, [_graph.value_of(v.aval) for v in jaxpr.invars], names=names)
    return {var for var, value in names.items() if walk.dequantised(value) is not None}


def evaluate(jaxpr: Any, env: dict[Any, Any]) -> list[Any]:
    """The outputs of an open jaxpr whose inputs, as far as they are read, are in `env`."""
    _evaluate(jaxpr.eqns, env)
    return [_read(env, v) for v in jaxpr.outvars]


def _evaluate(eqns: Sequence[Any], env: dict[Any, Any]) -> None:
    """Evaluate equations as they stand, custom rules included."""
    for eqn in eqns:
        outs = _graph.bind(eqn, [_read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if _compat.is_literal(atom) else env[atom]
