"""Recipes, arrays and one step of the tests of training."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8

MATRIX = (((1,), (0,)), ((), ()))
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
TENSOR = jaxfp8.CurrentScaling()
ROW = jaxfp8.CurrentScaling(granularity="channel")
BLOCK = jaxfp8.CurrentScaling(granularity="block")
RECIPES = {"delayed": DELAYED, "tensor": TENSOR, "row": ROW}
# Half a step of e4m3 and of e5m2, relative to a value.
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
blocks_too = pytest.mark.parametrize("recipe", [*RECIPES.values(), BLOCK], ids=[*RECIPES, "block"])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def first_state(recipe):
    return jaxfp8.ScalingState.init(recipe) if recipe is DELAYED else None


def plain_step(x, w, g, state, recipe, numbers=MATRIX):
    """The product, and what its backward pass makes of the cotangent `g`."""

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, numbers, state, recipe=recipe)

    y, pull_back = jax.vjp(product, x, w, state)
    return y, *pull_back(g.astype(y.dtype))


step = jax.jit(plain_step, static_argnums=(4, 5))


def settled(x, w, g, recipe, numbers=MATRIX, step=step):
    """The product at the second step, when delayed scales have seen the data."""
    state = step(x, w, g, first_state(recipe), recipe, numbers)[3]
    return step(x, w, g, state, recipe, numbers)


PRODUCTS = {
    "matrix": ((5, 32), (32, 7), MATRIX),
    "transposed": ((32, 5), (7, 32), (((0,), (1,)), ((), ()))),
    "general": ((3, 8, 2, 4), (4, 6, 8), (((1, 3), (2, 0)), ((), ()))),
    "batch": ((3, 5, 2, 8), (2, 8, 3, 4), (((3,), (1,)), ((2, 0), (0, 2)))),
    "vector": ((32,), (32, 7), (((0,), (0,)), ((), ()))),
    "inner": ((32,), (32,), (((0,), (0,)), ((), ()))),
    "empty": ((0, 32), (32, 7), MATRIX),
}


def refuse(error, text, *args, **kwargs):
    with pytest.raises(error, match=text):
        jaxfp8.fp8_dot_general(*args, **kwargs)
