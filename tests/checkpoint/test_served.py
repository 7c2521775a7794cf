"""`save` and `convert` beside compressed-tensors, vLLM's reader: it sees the same numbers.

It needs that package in an environment of its own, build/writers, and is skipped without it.
"""

import pathlib
import subprocess

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.files import codes, folder, scales
from checkpoint.gguf_files import blocks, file_bytes

import jaxfp8
from jaxfp8 import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ROOT / "build" / "writers" / "bin" / "python"
R = np.random.default_rng(0)
SHAPES = [(256, 256), (64, 256), (256, 64), (64, 64), (300, 200)]


def floats(*shape):
    return jnp.asarray(R.normal(size=shape), jnp.float32)


def exponents(*shape):
    return R.integers(110, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def saved():
    """Trees and recipes by name."""
    recipes = [jaxfp8.FP8_BLOCK, jaxfp8.FP8_DYNAMIC, jaxfp8.INT8_DYNAMIC, jaxfp8.INT8_ASYMMETRIC]
    recipes += [jaxfp8.FP8_W8A16, jaxfp8.INT8_W8A16]
    for recipe in recipes:
        weights = [recipe.quantize_weight(floats(*s), contracting=(1,)) for s in SHAPES]
        yield recipe.name, {f"{i}.weight": w for i, w in enumerate(weights)}, recipe
    mx = jaxfp8.QArray(jnp.asarray(codes((6, 64))), jnp.asarray(exponents(6, 2)))
    yield "MXFP8", {"a.weight": mx}, None
    tensor, channel = (
        jaxfp8.quantize(floats(6, 8)),
        jaxfp8.quantize(floats(6, 8), channelwise_axes=(0,)),
    )
    clash = {"a.weight": tensor, "b.a.weight": channel, "b.weight": floats(4, 4)}
    yield "names within names", clash, None
    groups = jaxfp8.quantize(floats(6, 64), jnp.int8, channelwise_axes=(0,), tiled_axes={1: 32})
    yield "groups", {"a.weight": groups}, None
    zero = jaxfp8.quantize(floats(7, 10), jnp.int8, channelwise_axes=(0,), zero_point=True)
    yield "zero points beside floats", {"a.weight": zero}, None


def sources(place):
    """Folders and files to convert, by name."""
    blocked = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {"a.weight": codes((256, 256)), "a.weight_scale_inv": exponents(2, 2)}
    yield "exponents of blocks", folder(place / "e8m0", tensors, blocked)
    for k in (12, 7):
        tensors = {"a.weight": codes((10, k), np.int8), "a.weight_scale": scales((10, 1))}
        tensors["a.weight_zero_point"] = codes((10, 1), np.int8, seed=3)
        yield f"packed {k}", folder(place / f"int8_{k}", tensors, {"quant_method": "torchao"})
    data = {"blk.0.ffn_up.weight": blocks(np.asarray(floats(16, 96)))}
    (place / "m.gguf").write_bytes(file_bytes({"general.architecture": "llama"}, data))
    yield "GGUF", place / "m.gguf"


@pytest.mark.skipif(not PYTHON.exists(), reason="needs compressed-tensors in build/writers")
def test_servers_see_the_same_numbers(tmp_path):
    wanted = {}
    for name, tree, recipe in saved():
        checkpoint.save(tmp_path / name, tree, recipe=recipe)
        wanted[name] = tree
    checkpoint.save(tmp_path / "floats", {"a.weight": floats(301, 50)})
    checkpoint.quantize(tmp_path / "floats", tmp_path / "quantized", jaxfp8.INT8_W8A16)
    wanted["quantized"] = checkpoint.load(tmp_path / "quantized")
    for name, source in sources(tmp_path):
        checkpoint.convert(source, tmp_path / name)
        wanted[name] = checkpoint.load(source)
    command = [PYTHON, ROOT / "tests" / "writers" / "served.py", *(tmp_path / n for n in wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, tree in wanted.items():
        seen = checkpoint.load(tmp_path / name / "served")
        held = {n: q for n, q in tree.items() if isinstance(q, jaxfp8.QArray)}
        assert set(seen) == set(held)
        for weight, q in held.items():
            np.testing.assert_array_equal(seen[weight], jaxfp8.dequantize(q, jnp.float32))
