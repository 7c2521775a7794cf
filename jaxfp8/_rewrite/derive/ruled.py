"""A function with a derivative rule, as one primitive open to remat policies.

`jax.custom_jvp` has such rules, too. But a policy of `jax.checkpoint` sees its call as one
equation, and products inside are computed again despite the policy. JAX 0.10 also drops the rule
when it splits a scan. Here JAX splits the equations inside, and both parts keep the rule.

Order of this file: bind, primitive, differentiation, batching, remat, dead code, lowering.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.extend.core.primitives import jit_p
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxfp8._call.ops.remat import Policy, Split, as_equation, unsplit
from jaxfp8._value import compat

# From primals and tangents to outputs and their tangents. A tangent may be a `SymbolicZero`.
Rule = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


def call(value: Callable[..., Sequence[Any]], rule: Rule, arrays: Sequence[Any]) -> Sequence[Any]:
    """`value` of arrays, with a derivative rule; outside a trace nothing is differentiated."""
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return [*map(_as_jax, value(*arrays))]
    jaxpr, consts = compat.hoisted(value, arrays)
    number = len(consts)

    def of_arguments(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return rule(primals[number:], tangents[number:])

    params = {"call_jaxpr": compat.open_jaxpr(jaxpr), "rule": of_arguments}
    return ruled_p.bind(*map(_as_jax, (*consts, *arrays)), **params)


def _as_jax(x: Any) -> Any:
    """An array as JAX has it: some of its caches take no array of numpy, and no number."""
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic | numbers.Number) else x


ruled_p = Primitive("ruled_call")
ruled_p.multiple_results = True


@ruled_p.def_impl
def _run(*arrays: Any, call_jaxpr: Any, rule: Rule) -> list[Any]:
    del rule
    return jax.core.eval_jaxpr(call_jaxpr, (), *arrays)


@ruled_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call_jaxpr: Any, rule: Rule) -> tuple[list[Any], Any]:
    del avals, rule
    return [v.aval for v in call_jaxpr.outvars], call_jaxpr.effects


# Differentiation


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Any, rule: Rule
) -> tuple[list[Any], list[Any]]:
    del call_jaxpr
    moving = [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents]
    outputs, moved = rule(primals, moving)
    zeros = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in moved]
    return [*map(_as_jax, outputs)], [*map(_as_jax, zeros)]


def _transpose(cotangents: Sequence[Any], *args: Any, call_jaxpr: Any, rule: Rule) -> list[Any]:
    """The transpose of a function linear in the undefined arguments."""
    places = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    given = [i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]

    def of_undefined(*values: Any) -> list[Any]:
        outputs = _run(*merged(args, places, values), call_jaxpr=call_jaxpr, rule=rule)
        return [outputs[i] for i in given]

    transposed = jax.linear_transpose(of_undefined, *(args[i].aval for i in places))
    outputs = transposed([cotangents[i] for i in given])
    return merged([None] * len(args), places, outputs)


def merged(items: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The items, with others at some places."""
    out = list(items)
    for i, other in zip(places, others, strict=True):
        out[i] = other
    return out


# Batching. An output independent of all mapped inputs is not mapped.


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, call_jaxpr: Any, rule: Rule
) -> tuple[Sequence[Any], list[int | None]]:
    names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    mapped: Any = functools.partial(jax.vmap, axis_size=axis.size, **names)
    dims = tuple(dims)
    out_dims: list[int | None] = []
    run = functools.partial(_run, call_jaxpr=call_jaxpr, rule=rule)

    def probe(*arrays: Any) -> list[Any]:
        outputs = run(*arrays)
        out_dims[:] = [0 if compat.is_mapped(x) else None for x in outputs]
        return outputs

    jax.eval_shape(mapped(probe, in_axes=dims), *args)

    def of_mapped(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        places = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def both(primals: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, Any]:
            zeros = [still(x) for x in primals]
            outputs, moved = rule(primals, merged(zeros, places, moving))
            return outputs, [None if isinstance(t, SymbolicZero) else t for t in moved]

        in_axes = (dims, tuple(dims[i] for i in places))
        of_arrays = mapped(both, in_axes=in_axes, out_axes=(out_dims, out_dims))
        outputs, moved = of_arrays(tuple(primals), tuple(tangents[i] for i in places))
        pairs = zip(outputs, moved, strict=True)
        return outputs, [still(x) if t is None else t for x, t in pairs]

    return call(mapped(run, in_axes=dims, out_axes=out_dims), of_mapped, args), out_dims


def still(x: Any) -> Any:
    """The tangent of an array independent of the differentiated inputs: zero, and as `x` lies."""
    return zero_from_primal(x, symbolic_zeros=True)


# Remat


def _partial_eval(
    policy: Policy, unknown: Sequence[bool], present: Sequence[bool], eqn: Any
) -> Split:
    """The split of the equations inside by JAX, as for a jit."""
    if any(unknown):
        return unsplit(eqn, present)
    inside = functools.partial(_run, **eqn.params)
    with eqn.ctx.manager:
        inlined = as_equation(inside, [v.aval for v in eqn.invars])
    rule: Any = partial_eval.partial_eval_jaxpr_custom_rules[jit_p]
    known, staged, unknown_outs, present_outs, passed = rule(
        policy, unknown, present, inlined.replace(invars=eqn.invars, outvars=eqn.outvars)
    )
    forward = _with_more_outputs(eqn, known)
    if not staged.outvars and not staged.effects:
        return forward, None, unknown_outs, present_outs, []
    return forward, _from_saved(eqn, staged, present_outs), unknown_outs, present_outs, passed


def _with_more_outputs(eqn: Any, known: Any) -> Any:
    """The equation with the saved values as further outputs, without derivatives."""
    jaxpr, own = compat.open_jaxpr(known.params["jaxpr"]), eqn.params["rule"]
    number = len(eqn.outvars)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outputs, moved = own(primals, tangents)
        saved = ruled_p.bind(*primals, call_jaxpr=jaxpr, rule=rule)[number:]
        return [*outputs, *saved], [*moved, *map(still, saved)]

    return known.replace(primitive=ruled_p, params={"call_jaxpr": jaxpr, "rule": rule})


def _from_saved(eqn: Any, staged: Any, present: Sequence[bool]) -> Any:
    """The equation from saved values, with a derivative in the equation's inputs alone."""
    inside, number = compat.open_jaxpr(staged.params["jaxpr"]), len(staged.invars)
    invars = [*staged.invars, *eqn.invars]

    def run(*arrays: Any) -> list[Any]:
        return jax.core.eval_jaxpr(inside, (), *arrays[:number])

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outputs, moved = eqn.params["rule"](primals[number:], tangents[number:])
        return _chosen(outputs, present), _chosen(moved, present)

    with eqn.ctx.manager:
        jaxpr = compat.open_jaxpr(jax.make_jaxpr(run)(*(v.aval for v in invars)))
    params = {"call_jaxpr": jaxpr, "rule": rule}
    return staged.replace(primitive=ruled_p, invars=invars, params=params)


def _chosen(items: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [item for item, chosen in zip(items, which, strict=True) if chosen]


# Dead code. Inputs stay: the rule may need all of them.


def _without_dead(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    *_, eqn = rest  # from JAX 0.12 on there is one more argument, about references
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    jaxpr, _ = partial_eval.dce_jaxpr(eqn.params["call_jaxpr"], used, True)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outputs, moved = eqn.params["rule"](primals, tangents)
        return _chosen(outputs, used), _chosen(moved, used)

    params = {"call_jaxpr": jaxpr, "rule": rule}
    outvars = _chosen(eqn.outvars, used)
    alive = eqn.replace(outvars=outvars, params=params, effects=jaxpr.effects)
    return [True] * len(eqn.invars), alive


# Registration

ad.primitive_jvps[ruled_p] = _jvp
ad.primitive_transposes[ruled_p] = _transpose
batching.fancy_primitive_batchers[ruled_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[ruled_p] = _partial_eval
partial_eval.dce_rules[ruled_p] = _without_dead
mlir.register_lowering(ruled_p, mlir.lower_fun(_run, multiple_results=True))
