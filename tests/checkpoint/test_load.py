"""Reading: what comes back is what the file has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import checkpoint

W = jax.random.normal(jax.random.key(0), (300, 520))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


KINDS = {
    "tensor": jaxfp8.quantize(W, scale=jnp.float32(0.01)),
    "channel": jaxfp8.quantize(W, channelwise_axes=(0,)),
    "channel in bfloat16": jaxfp8.quantize(W, channelwise_axes=(0,), scale_dtype=jnp.bfloat16),
    "partial blocks": jaxfp8.quantize(W, tiled_axes={0: 128, 1: 128}),
    "groups": jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), tiled_axes={1: 40}),
    "int8": jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,)),
    "zero points": jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), zero_point=True),
    "mx": jaxfp8.quantize(
        W, channelwise_axes=(0,), tiled_axes={1: 32}, scale_dtype=jnp.float8_e8m0fnu
    ),
    "experts": jaxfp8.quantize(
        W.reshape(2, 150, 520), channelwise_axes=(0,), tiled_axes={1: 128, 2: 128}
    ),
}


@pytest.mark.parametrize("suffix", ["", ".safetensors"], ids=["folder", "file"])
@pytest.mark.parametrize("q", KINDS.values(), ids=KINDS.keys())
def test_weight_comes_back_as_it_was_saved(tmp_path, q, suffix):
    path = tmp_path / f"model{suffix}"
    checkpoint.save(path, {"layer.weight": q, "layer.bias": jnp.ones(3, jnp.bfloat16)})
    loaded = checkpoint.load(path)
    same(loaded, {"layer.weight": q, "layer.bias": jnp.ones(3, jnp.bfloat16)})
