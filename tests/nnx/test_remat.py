"""`nnx.remat` saves products of 8-bit layers where its policy saves those of floats."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from recomputed import products

import jaxfp8
import jaxfp8.nnx

SAVE = jax.checkpoint_policies
CHANGES = {
    "float": lambda model: None,
    "8-bit": lambda model: jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16),
    "trained": lambda model: jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_remat_saves_the_products_of_layers(change):
    rngs = nnx.Rngs(0)
    tanh = jnp.tanh
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), tanh, nnx.Linear(16, 8, rngs=rngs), tanh)
    change(model)
    graph, state = nnx.split(model)

    def found(policy):
        saved = nnx.remat(lambda model, x: model(x), policy=policy)

        def loss(x, state):
            return saved(nnx.merge(graph, state, copy=True), x).sum()

        return products(jax.grad(loss), jnp.ones((4, 16)), state)

    least = found(SAVE.everything_saveable)
    assert found(SAVE.nothing_saveable) == least + 2
    assert found(SAVE.dots_with_no_batch_dims_saveable) == least
