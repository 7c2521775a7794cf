"""Loading onto a GPU: the bytes of the file, and no more."""

import jax
import numpy as np
import pytest
from checkpoint.files import codes, folder, scales

import jaxfp8
from jaxfp8 import checkpoint

pytestmark = pytest.mark.gpu


def test_device_holds_the_bytes_of_the_file(tmp_path):
    tensors = {}
    for layer in range(8):
        tensors[f"{layer}.weight"] = codes((4096, 4096), seed=layer)
        tensors[f"{layer}.weight_scale_inv"] = scales((32, 32))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = folder(tmp_path / "m", tensors, config)
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    loaded = checkpoint.load(path)
    held = device.memory_stats()["bytes_in_use"] - before
    assert held <= 1.02 * (path / "model.safetensors").stat().st_size
    for layer in range(8):
        got = np.asarray(loaded[f"{layer}.weight"].qvalue)
        assert got.tobytes() == tensors[f"{layer}.weight"].tobytes()


def test_product_of_a_loaded_weight_is_that_of_a_made_one(tmp_path):
    w = jax.random.normal(jax.random.key(0), (512, 256))
    x = jax.random.normal(jax.random.key(1), (16, 256), "bfloat16")
    q = jaxfp8.quantize(w, channelwise_axes=(0,))
    checkpoint.save(tmp_path / "m", {"up.weight": q})
    loaded = checkpoint.load(tmp_path / "m")["up.weight"]
    product = jax.jit(lambda w: jaxfp8.einsum("mk,nk->mn", x, w))
    np.testing.assert_array_equal(product(loaded), product(q))
