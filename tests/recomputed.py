"""What a gradient runs and computes again, by the policy of `jax.checkpoint`."""

import collections

import jax
from jax.interpreters import partial_eval

from jaxfp8._value import compat

_PRODUCTS = ("dot_general", "scaled_dot", "split_dot", "ragged_dot", "joint_dots")


def equations(fun, *args):
    """The names of the primitives in a function, at any depth."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in compat.subjaxprs(eqn):
                yield from inside(inner)

    return list(inside(compat.open_jaxpr(jax.make_jaxpr(fun)(*args))))


def products(fun, *args):
    """How many products stand in a function, at any depth."""
    return sum(map(equations(fun, *args).count, _PRODUCTS))


def again(fun, policy, x):
    """How many products the gradient computes again, and how many copies it makes."""
    kept, asked = (
        jax.grad(jax.checkpoint(fun, policy=p))
        for p in (jax.checkpoint_policies.everything_saveable, policy)
    )
    return products(asked, x) - products(kept, x), equations(asked, x).count("device_put")


def calls(fun, *args):
    """How often a function runs each primitive, once what nothing reads is left out."""
    traced = jax.make_jaxpr(fun)(*args)
    used, _ = partial_eval.dce_jaxpr(compat.open_jaxpr(traced), [True] * len(traced.out_avals))
    found = collections.Counter()

    def count(jaxpr, times):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += times
            for inner in compat.subjaxprs(eqn):
                count(inner, times * eqn.params.get("length", 1))

    count(used, 1)
    return found
