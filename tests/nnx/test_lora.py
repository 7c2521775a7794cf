"""`nnx.LoRALinear`: the base in 8 bits, the adapter in floats and trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx

X = jnp.sin(jnp.arange(3 * 16.0)).reshape(3, 16)


def adapted(rngs=0):
    """A LoRALinear whose adapter is not zero."""
    layer = nnx.LoRALinear(16, 8, lora_rank=2, rngs=nnx.Rngs(rngs))
    layer.lora.lora_b[...] = jnp.cos(jnp.arange(16.0)).reshape(2, 8)
    return layer


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC], ids=str)
def test_the_base_is_in_8_bits_and_the_adapter_as_it_was(recipe):
    model = nnx.Sequential(adapted(), nnx.relu)
    wide = model.layers[0]
    base = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    base.kernel, base.bias = wide.kernel, wide.bias
    jaxfp8.nnx.quantize(model, recipe)
    layer = model.layers[0]
    assert type(layer) is jaxfp8.nnx.LoRALinear and layer.lora is wide.lora
    want = jaxfp8.nnx.Linear.of(base, recipe)(X) + wide.lora(X)
    np.testing.assert_array_equal(layer(X), want)


def test_dequantize_gives_the_layer_of_flax_back():
    model = nnx.Sequential(adapted(), nnx.relu)
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    want = model(X)
    jaxfp8.nnx.dequantize(model)
    assert type(model.layers[0]) is nnx.LoRALinear
    np.testing.assert_allclose(model(X), want, rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trained():
    layer = jaxfp8.nnx.LoRALinear.of(adapted())
    codes = np.asarray(layer.weight.qvalue)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            return jnp.mean((layer(X) - 1) ** 2)

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
        optimizer.update(layer, gradients)
        return value

    losses = [float(step(layer, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(layer.weight.qvalue, codes)


def test_a_checkpoint_goes_into_the_base():
    base = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (8, 16)), channelwise_axes=(0,))
    tensors = {"weight": base, "bias": jnp.ones(8)}
    layer = nnx.LoRALinear(16, 8, lora_rank=2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, nnx.relu)
    named = {f"layers.0.{name}": value for name, value in tensors.items()}
    jaxfp8.nnx.load(model, named, keep=r"lora")
    got, want = model(X), nnx.relu(X @ jaxfp8.dequantize(base).T + 1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
