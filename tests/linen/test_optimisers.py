"""Optimisers train the floats of a model and leave its 8-bit codes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen.layers import Classifier

import jaxfp8
import jaxfp8.linen


@pytest.mark.parametrize("recipe", [jaxfp8.W8A16, jaxfp8.FP8, jaxfp8.INT8], ids=lambda r: r.name)
def test_an_optimiser_trains_the_floats_and_leaves_the_8_bits(recipe):
    model, tokens = Classifier(recipe), jnp.arange(6).reshape(2, 3)
    params = model.init(jax.random.key(0), tokens)["params"]
    floats, held = jaxfp8.linen.partition(params)
    assert jax.tree.structure(jaxfp8.linen.combine(floats, held)) == jax.tree.structure(params)
    optimiser = optax.adamw(1e-2, weight_decay=0.1)

    def loss(floats):
        y = model.apply({"params": jaxfp8.linen.combine(floats, held)}, tokens)
        return jnp.mean((y - 1) ** 2)

    @jax.jit
    def step(floats, state):
        value, gradients = jax.value_and_grad(loss)(floats)
        updates, state = optimiser.update(gradients, state, floats)
        return value, optax.apply_updates(floats, updates), state

    state, values = optimiser.init(floats), []
    for _ in range(5):
        value, floats, state = step(floats, state)
        values.append(float(value))
    assert values == sorted(values, reverse=True) and np.isfinite(values).all()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("part", ["Embed_0", "DenseGeneral_0", "ScanBody_0"])
def test_a_gradient_of_8_bit_codes_is_refused(part, jit):
    model, tokens = Classifier(jaxfp8.W8A16), jnp.arange(6).reshape(2, 3)
    params = model.init(jax.random.key(0), tokens)["params"]
    (part,) = [name for name in params if part.removeprefix("Scan") in name]

    def loss(own):
        return model.apply({"params": {**params, part: own}}, tokens).sum()

    with pytest.raises(TypeError, match=r"a gradient is asked for.*jaxfp8\.linen\.partition"):
        jit(jax.grad(loss))(params[part])
