"""Reading: what comes back is what the file has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.files import codes, file_bytes, folder, scales

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

W = np.random.default_rng(0).normal(size=(300, 520)).astype(np.float32)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


KINDS = {
    "tensor": lambda: jaxfp8.quantize(W, scale=jnp.float32(0.01)),
    "channel": lambda: jaxfp8.quantize(W, channelwise_axes=(0,)),
    "channel in bfloat16": lambda: jaxfp8.quantize(
        W, channelwise_axes=(0,), scale_dtype=jnp.bfloat16
    ),
    "partial blocks": lambda: jaxfp8.quantize(W, tiled_axes={0: 128, 1: 128}),
    "groups": lambda: jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), tiled_axes={1: 40}),
    "int8": lambda: jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,)),
    "zero points": lambda: jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), zero_point=True),
    "mx": lambda: jaxfp8.quantize(
        W, channelwise_axes=(0,), tiled_axes={1: 32}, scale_dtype=jnp.float8_e8m0fnu
    ),
    "experts": lambda: jaxfp8.quantize(
        W.reshape(2, 150, 520), channelwise_axes=(0,), tiled_axes={1: 128, 2: 128}
    ),
}


@pytest.mark.parametrize("suffix", ["", ".safetensors"], ids=["folder", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_comes_back_as_it_was_saved(tmp_path, kind, suffix):
    q = KINDS[kind]()
    path = tmp_path / f"model{suffix}"
    checkpoint.save(path, {"layer.weight": q, "layer.bias": jnp.ones(3, jnp.bfloat16)})
    loaded = checkpoint.load(path)
    same(loaded, {"layer.weight": q, "layer.bias": jnp.ones(3, jnp.bfloat16)})


@pytest.mark.parametrize("other", ["consolidated", "adapter_model"])
def test_beside_other_files_model_is_the_model(tmp_path, other):
    path = folder(tmp_path / "m", {"a": scales(3)})
    (path / f"{other}.safetensors").write_bytes(file_bytes({"b": scales(4)}))
    assert list(checkpoint.load(path)) == ["a"]


def test_a_file_without_the_scales_in_another_names_the_folder(tmp_path):
    """To take its codes for values would be wrong."""
    tensors = {"a.weight": codes((6, 8)), "a.weight_scale": scales(())}
    path = folder(tmp_path / "m", tensors, files=2)
    with pytest.raises(CheckpointError, match="name the folder instead") as caught:
        checkpoint.load(path / "model-00001-of-00002.safetensors")
    assert "unscaled" not in str(caught.value)
    assert list(checkpoint.load(path)) == ["a.weight"]
