"""A derivative in two halves, and what passes between them: 8-bit data, not its wide copy.

Reverse mode splits a function into a first half, which computes outputs and residuals, and a
second half, linear in tangents or cotangents, which reads the residuals. Each half is rewritten by
itself. A residual that is dequantised 8-bit data would hide that from the second half, and be
kept in memory at full width; so its 8-bit array and scales are passed instead, and the second half
begins with the equations that dequantise them, which its own rewrite then captures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8 import _compat
from jaxfp8._rewrite import _graph, _rebuilt
from jaxfp8._rewrite._decide import resolve
from jaxfp8._rewrite._graph import Value
from jaxfp8._rewrite._walk import Walk

Rewrite = Callable[..., Callable[..., Any]]


class Halves:
    """The two halves of a derivative of one trace.

    Attributes:
      first: from primals to (outputs, what the second half needs).
      second: from that and further arrays to the derivative; if `is_linear`, JAX will transpose it
        in those arrays. If the function may `cut` the gradient of dequantised data, what is made
        again has no derivative of its own, and asking for one is an error.
    """

    def __init__(
        self,
        first: Callable[..., tuple[Any, Any]],
        second: Callable[..., Any],
        primals: Sequence[Any],
        rewrite: Rewrite,
        *,
        is_linear: bool,
        cut: bool,
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
            given = {v: x for v, x in zip(roots, passed, strict=True) if not _compat.is_literal(v)}
            env = {v: _differentiated_once(x) for v, x in given.items()} if cut else dict(given)
            for step in redone:
                step(env)
            env.update(given)
            leaves = [_read(env, v) for v in residuals]
            return second(jax.tree.unflatten(residual_tree, leaves), *values)

        self.first, self.second = rewrite(forward), rewrite(backward, is_linear=is_linear)


def _differentiated_once(x: Any) -> Any:
    return _once(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@jax.custom_jvp
def _once(x: Any) -> Any:
    """The identity, for what may not be differentiated any more."""
    return x


@_once.defjvp
def _once_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    raise NotImplementedError(
        "`jaxfp8.rewrite`: a second derivative goes through scales of 8-bit data whose gradient "
        "`stop_gradient` or a custom rule changes; rewrite the derivative instead, as in "
        "`jaxfp8.rewrite(jax.hessian(f))`, or keep the scales out of what is differentiated twice."
    )


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


Step = Callable[[dict[Any, Any]], None]  # adds variables to an environment


def _sources(jaxpr: Any, residuals: Sequence[Any]) -> tuple[list[Step], list[Any]]:
    """The steps that only dequantise residuals, and the variables they all start from."""
    names: dict[Any, Value] = {}
    walk = Walk(resolve)
    consts = [_graph.value_of(v.aval) for v in jaxpr.constvars]
    walk.jaxpr(jaxpr, consts, [_graph.value_of(v.aval) for v in jaxpr.invars], names=names)
    variables = {value: var for var, value in names.items()}
    needed = {v for v in residuals if not _compat.is_literal(v)}
    steps: list[Step] = []
    made: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        for step, outputs, inputs in _dequantising(walk, eqn, names, variables, needed):
            steps.append(step)
            made.update(outputs)
            needed.update(inputs)
    return steps[::-1], [v for v in needed if v not in made]


def _dequantising(
    walk: Walk, eqn: Any, names: dict[Any, Value], variables: dict[Value, Any], needed: set[Any]
) -> Iterator[tuple[Step, Sequence[Any], Sequence[Any]]]:
    """Steps to do again for one equation: each with the variables that it makes and reads."""
    facts = {v: walk.dequantised(names[v]) for v in eqn.outvars if v in names and v in needed}
    known = {v: fact for v, fact in facts.items() if fact is not None}
    if not known:
        return
    if not _holds_a_dot(eqn):
        inputs = [v for v in eqn.invars if not _compat.is_literal(v)]
        yield functools.partial(_evaluate, [eqn]), eqn.outvars, inputs
        return
    for var, fact in known.items():
        again = _rebuilt.of(fact, names[var].dtype, set(variables))
        if again is not None:
            sources = [variables[value] for value in again.program.inputs]
            yield functools.partial(_rebuild, again, var, sources), [var], sources


def _holds_a_dot(eqn: Any) -> bool:
    """Whether to do an equation again would be to do a product again."""
    return any(
        inner.primitive.name == "dot_general" or _holds_a_dot(inner)
        for jaxpr in _compat.subjaxprs(eqn)
        for inner in jaxpr.eqns
    )


def _rebuild(
    again: _rebuilt.Rebuilt, var: Any, sources: Sequence[Any], env: dict[Any, Any]
) -> None:
    env[var] = again.run([env[source] for source in sources])


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
