"""Optimisers train the floats of a model and leave its 8-bit codes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from linen.layers import Classifier

import jaxfp8
import jaxfp8.linen


@pytest.mark.parametrize(
    "recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_STATIC, jaxfp8.INT8_DYNAMIC], ids=lambda r: r.name
)
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


def test_split_state_trains_as_train_state_does():
    layer = nn.Dense(4, dot_general_cls=jaxfp8.linen.Fp8DirectDotGeneralOp)
    x, optimiser = jnp.ones((2, 8)), optax.adamw(1e-2)
    variables = layer.init(jax.random.key(0), x)
    gradients = jax.jit(jax.grad(lambda variables: (layer.apply(variables, x) ** 2).mean()))
    want = TrainState.create(apply_fn=layer.apply, params=variables, tx=optimiser)
    params, state = jaxfp8.linen.split_state(variables)
    moments = optimiser.init(params)
    for _ in range(3):
        of_params, state = jaxfp8.linen.split_state(gradients({**params, **state}))
        updates, moments = optimiser.update(of_params, moments, params)
        params = optax.apply_updates(params, updates)
        want = want.apply_gradients(grads=gradients(want.params))
    jax.tree.map(np.testing.assert_array_equal, {**params, **state}, want.params)


def test_split_state_refuses_a_state_that_an_optimiser_trained():
    layer = nn.Dense(4, dot_general_cls=jaxfp8.linen.Fp8DirectDotGeneralOp)
    variables = nn.Sequential([layer]).init(jax.random.key(0), jnp.ones((2, 8)))
    trained = jax.tree.map(lambda leaf: leaf - 1e-2, variables)
    with pytest.raises(ValueError, match=r"'layers_0'.*amax_history` has -0.01"):
        jaxfp8.linen.split_state(trained)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("part", ["Embed_0", "DenseGeneral_0", "ScanBody_0"])
def test_a_gradient_of_8_bit_codes_is_refused(part, jit):
    model, tokens = Classifier(jaxfp8.FP8_W8A16), jnp.arange(6).reshape(2, 3)
    params = model.init(jax.random.key(0), tokens)["params"]
    (part,) = [name for name in params if part.removeprefix("Scan") in name]

    def loss(own):
        return model.apply({"params": {**params, part: own}}, tokens).sum()

    with pytest.raises(TypeError, match=r"a gradient is asked for.*jaxfp8\.linen\.partition"):
        jit(jax.grad(loss))(params[part])
