"""FP8 training on a GPU: the numbers of the CPU, and no pass over memory that only transposes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8

RECIPES = {
    "delayed": jaxfp8.DelayedScaling(amax_history_length=16),
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="channel"),
}
# x and w by the axes they have: tokens, batch of tokens, heads.
SHAPES = {
    "matrix": ((64, 256), (256, 128), (((1,), (0,)), ((), ()))),
    "tokens": ((4, 32, 256), (256, 8, 16), (((2,), (0,)), ((), ()))),
    "odd": ((33, 100), (100, 72), (((1,), (0,)), ((), ()))),
}

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def step(recipe, numbers, x, w, g, state):
    """A product, its gradients and its next state."""

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, numbers, state, recipe=recipe)

    y, pull_back = jax.vjp(product, x, w, state)
    return y, *pull_back(g)


def problem(recipe, shapes):
    keys = jax.random.split(jax.random.key(0), 3)
    x_shape, w_shape, numbers = shapes
    g_shape = (*x_shape[:-1], *w_shape[1:])
    x, w, g = (
        jax.random.normal(key, shape).astype(jnp.bfloat16)
        for key, shape in zip(keys, (x_shape, w_shape, g_shape), strict=True)
    )
    delayed = isinstance(recipe, jaxfp8.DelayedScaling)
    state = jaxfp8.ScalingState.init(recipe) if delayed else None
    return numbers, (x, w, g, state)


# Of several blocks along each axis, the last of them partial or not.
BLOCKS = {
    "matrix": ((304, 400), (400, 272), (((1,), (0,)), ((), ()))),
    "tokens": ((2, 256, 384), (384, 256), (((2,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("shapes", BLOCKS.values(), ids=BLOCKS)
def test_rows_and_blocks_agree_with_the_cpu(shapes, granularity):
    test_two_steps_agree_with_the_cpu(shapes, jaxfp8.CurrentScaling(granularity=granularity))


@each_recipe
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_two_steps_agree_with_the_cpu(shapes, recipe):
    numbers, args = problem(recipe, shapes)

    def two_steps(x, w, g, state):
        return step(recipe, numbers, x, w, g, step(recipe, numbers, x, w, g, state)[3])

    cpu = jax.devices("cpu")[0]
    with jaxfp8.strict():
        got = jax.jit(two_steps)(*args)
    with jax.default_device(cpu):
        want = jax.jit(two_steps)(*jax.device_put(args, cpu))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("recipe", "shapes"),
    [
        (RECIPES["delayed"], SHAPES["tokens"]),
        (RECIPES["current"], SHAPES["tokens"]),
        (jaxfp8.CurrentScaling(granularity="block"), BLOCKS["tokens"]),
    ],
    ids=["delayed", "current", "block"],
)
def test_codes_are_never_transposed_by_a_pass_of_its_own(recipe, shapes):
    numbers, args = problem(recipe, shapes)
    program = jax.jit(lambda *args: step(recipe, numbers, *args))
    text = program.lower(*args).compile().as_text()
    assert not re.findall(r"(?:u8|f8\w+)\[[\d,]*\]\S* (?:transpose|copy)\(", text)
