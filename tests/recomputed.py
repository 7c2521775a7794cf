"""How many products a gradient computes again, by the policy of `jax.checkpoint`."""

import jax

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
