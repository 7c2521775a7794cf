"""What a train step compiles to."""

import re

import jax
import jax.numpy as jnp
from training.samples import MATRIX, each_recipe, first_state, normal

import jaxfp8


def mlp(params, x, recipe):
    for w, state in params[:-1]:
        x = jax.nn.relu(jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe))
    w, state = params[-1]
    return jnp.sum(jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe) ** 2)


@each_recipe
def test_train_step_multiplies_8_bit_data_only(recipe):
    x = normal(48, 64, dtype=jnp.bfloat16)
    weights = [normal(64, 96), normal(96, 80), normal(80, 40)]
    params = [(w.astype(jnp.bfloat16), first_state(recipe)) for w in weights]
    text = jax.jit(jax.grad(mlp), static_argnums=2).lower(params, x, recipe).compile().as_text()
    # Forward and weight gradient of three layers, input gradient of those that another feeds.
    assert len(re.findall(r"custom_call_target=\"jaxfp8_scaled_dot", text)) == 3 + 3 + 2
    assert " dot(" not in text
    assert not widened(text)


def widened(text):
    """Conversions of 8-bit values to a wide dtype in optimised HLO; scales are not values."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", text))
    types |= dict(re.findall(r"(%?[\w.-]+): (\w+\[[\d,]+\])", text))
    converts = re.findall(r"= ((?:f32|bf16|f16)\[\d[\d,]*\])\S* convert\((%[\w.-]+)\)", text)
    return [(to, name) for to, name in converts if re.match("f8e[45]|[us]8", types.get(name, ""))]


def test_a_widened_operand_would_be_seen():
    w = jnp.ones((64, 32), jnp.float8_e4m3fn)
    product = jax.jit(lambda x, w: x @ w.astype(jnp.float32))
    assert widened(product.lower(jnp.ones((8, 64)), w).compile().as_text())
