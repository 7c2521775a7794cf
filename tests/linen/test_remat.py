"""`flax.linen.remat` saves products of 8-bit layers where its policy saves those of floats."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from recomputed import products

import jaxfp8
import jaxfp8.linen

SAVE = jax.checkpoint_policies
TRAINED = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=jaxfp8.CurrentScaling())
LAYERS = {
    "float": nn.Dense,
    "8-bit": functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8_W8A16),
    "trained": functools.partial(nn.Dense, dot_general_cls=TRAINED),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_remat_saves_the_products_of_layers(kind):
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(LAYERS[kind](8)(jnp.tanh(LAYERS[kind](16)(x))))

    def found(policy):
        model = nn.remat(Pair, policy=policy)()
        x = jnp.ones((4, 16))
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return products(jax.grad(lambda x, v: model.apply(v, x).sum()), x, variables)

    least = found(SAVE.everything_saveable)
    assert found(SAVE.nothing_saveable) == least + 2
    assert found(SAVE.dots_with_no_batch_dims_saveable) == least
