"""Float programs for quantize_dots, and what they mean with rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxfp8

RECIPES = [
    jaxfp8.FP8_W8A16,
    jaxfp8.INT8_W8A16,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
]


by_name = functools.partial(pytest.mark.parametrize, "recipe", ids=lambda recipe: recipe.name)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


X, W = normal(6, 40), normal(40, 24, seed=1) / 6


def rounded(x, quantization, contracting, batch=()):
    """What 8 bits hold of x, widened."""
    if quantization is None:
        return x
    return jaxfp8.dequantize(quantization.quantize(x, contracting, batch), jnp.float32)


def expected(x, w, recipe):
    """x @ w of rounded operands, in float64."""
    x8, w8 = rounded(x, recipe.activation, (x.ndim - 1,)), rounded(w, recipe.weight, (0,))
    return np.asarray(x8, np.float64) @ np.asarray(w8, np.float64)


def close(got, exact):
    np.testing.assert_allclose(got, exact, rtol=3e-6, atol=3e-6 * np.abs(exact).max())


STACK = jnp.stack([normal(24, 24, seed=s) / 5 for s in range(3)])


Y = normal(6, 24)


def layers(x, stack, recipe):
    for w in stack:
        x = jnp.tanh(jnp.asarray(expected(x, w, recipe), jnp.float32))
    return x


def scanned(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def in_while(x, stack):
    def body(state):
        i, x = state
        return i + 1, jnp.tanh(x @ stack[i])

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def in_cond(x, stack):
    for w in stack:
        x = jax.lax.cond(x[0, 0] > 1e9, lambda x, w: x, lambda x, w: jnp.tanh(x @ w), x, w)
    return x


def rematerialised(x, stack):
    for w in stack:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return x


def jitted(x, stack):
    step = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=())
    for w in stack:
        x = step(x, w)
    return x


@jax.custom_jvp
def step_jvp(x, w):
    return jnp.tanh(x @ w)


@step_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, 7 * (dx @ w) + x @ dw


@jax.custom_vjp
def step_vjp(x, w):
    return jnp.tanh(x @ w)


step_vjp.defvjp(
    lambda x, w: (jnp.tanh(x @ w), (x, w)),
    lambda saved, ct: (7 * (ct @ saved[1].T), saved[0].T @ ct),
)


def in_custom_jvp(x, stack):
    for w in stack:
        x = step_jvp(x, w)
    return x


def in_custom_vjp(x, stack):
    for w in stack:
        x = step_vjp(x, w)
    return x


def in_shard_map(x, stack):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        scanned, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=True
    )(x, stack)


def two_dots(params, x):
    with jax.named_scope("up"):
        h = jax.nn.relu(x @ params["up"])
    with jax.named_scope("down"):
        return h @ params["down"]


PARAMS = {"up": W, "down": normal(24, 40, seed=3)}
