"""`convert`: the codes of any format as servers read them, and nothing lost when cut short."""

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoint.files import codes, compressed, folder, scales
from checkpoint.gguf_files import blocks, file_bytes, values

import jaxfp8
from jaxfp8 import __main__, checkpoint
from jaxfp8.checkpoint import CheckpointError, _save

R = np.random.default_rng(0)
NUMPY = {"I8": np.int8, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32}


def tensors_of(path):
    """The tensors of a folder with one file, as they lie there."""
    data = (path / "model.safetensors").read_bytes()
    return {
        name: np.frombuffer(bytes(t["data"]), NUMPY.get(t["dtype"], np.uint8)).reshape(
            t["shape"] if t["dtype"] in NUMPY else -1
        )
        for name, t in safetensors.deserialize(data)
    }


def config_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def unpacked(words, shape):
    """Codes of int32 words: the lowest byte first, each less 128."""
    four = [(words >> (8 * i)) & 0xFF for i in range(4)]
    return (np.stack(four, -1).reshape(len(words), -1)[:, : shape[1]] - 128).astype(np.int8)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
E8M0 = np.array([[120, 118], [119, 127]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
SOURCES = {
    "DeepSeek": (
        {"weight": codes((200, 256)), "weight_scale_inv": scales((2, 2))},
        BLOCKS,
        "block",
    ),
    "exponents": ({"weight": codes((256, 256)), "weight_scale_inv": E8M0}, BLOCKS, "block"),
    "ComfyUI": ({"weight": codes((6, 8)), "scale_weight": scales(())}, None, "tensor"),
    "fbgemm": (
        {"weight": codes((6, 8)), "weight_scale": scales((6, 1))},
        {"quant_method": "fbgemm_fp8"},
        "channel",
    ),
    "static": (
        {"weight": codes((6, 8)), "weight_scale": scales(()), "input_scale": scales(())},
        STATIC,
        "tensor",
    ),
}
ACTIVATIONS = {
    "DeepSeek": {"strategy": "group", "group_size": 128, "dynamic": True},
    "exponents": {"strategy": "group", "group_size": 128, "dynamic": True},
    "fbgemm": {"strategy": "token", "dynamic": True},
    "static": {"strategy": "tensor", "dynamic": False},
}


@pytest.mark.parametrize("name", SOURCES)
def test_e4m3_keeps_its_codes_and_values(tmp_path, name):
    tensors, config, strategy = SOURCES[name]
    src = folder(tmp_path / "src", {f"up.{n}": t for n, t in tensors.items()}, config)
    checkpoint.convert(src, tmp_path / "dst")
    (group,) = config_of(tmp_path / "dst")["config_groups"].values()
    assert group["weights"]["strategy"] == strategy and group["format"] == "float-quantized"
    inputs = group["input_activations"]
    assert (inputs is None) == (name not in ACTIVATIONS)
    assert inputs is None or inputs.items() >= ACTIVATIONS[name].items()
    before, after = (checkpoint.load(path) for path in (src, tmp_path / "dst"))
    assert set(before) == set(after)
    a, b = before["up.weight"], after["up.weight"]
    np.testing.assert_array_equal(np.asarray(a.qvalue), np.asarray(b.qvalue))
    np.testing.assert_array_equal(jaxfp8.dequantize(a), jaxfp8.dequantize(b))


@pytest.mark.parametrize("k", [12, 7], ids=["words", "a partial word"])
@pytest.mark.parametrize("zero", [True, False], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("scale", [(10, 1), ()], ids=str)
def test_int8_beside_floats_is_packed(tmp_path, k, zero, scale):
    tensors = {"up.weight": codes((10, k), np.int8), "up.weight_scale": scales(scale)}
    if zero:
        tensors["up.weight_zero_point"] = codes(scale, np.int8, seed=3)
    src = folder(tmp_path / "src", tensors, {"quant_method": "torchao"})
    checkpoint.convert(src, tmp_path / "dst")
    (group,) = config_of(tmp_path / "dst")["config_groups"].values()
    assert group["format"] == "pack-quantized" and group["input_activations"] is None
    assert group["weights"]["strategy"] == "channel" and group["weights"]["symmetric"] is not zero
    got = tensors_of(tmp_path / "dst")
    assert got["up.weight_packed"].shape == (10, -(-k // 4))
    np.testing.assert_array_equal(got["up.weight_shape"], [10, k])
    np.testing.assert_array_equal(unpacked(got["up.weight_packed"], (10, k)), tensors["up.weight"])
    np.testing.assert_array_equal(
        got["up.weight_scale"], np.broadcast_to(tensors["up.weight_scale"], (10, 1))
    )
    if zero:  # packed along N
        points = unpacked(np.ascontiguousarray(got["up.weight_zero_point"].T), (1, 10)).T
        want = np.broadcast_to(tensors["up.weight_zero_point"], (10, 1))
        np.testing.assert_array_equal(points, want)


@pytest.mark.parametrize("dynamic", [True, False])
def test_zero_points_of_inputs_and_the_cache_are_still_said(tmp_path, dynamic):
    tensors = {"up.weight": codes((6, 8), np.int8), "up.weight_scale": scales((6, 1))}
    if not dynamic:
        tensors["up.input_scale"] = scales((1,))
        tensors["up.input_zero_point"] = np.array([-7], np.int8)
    config = compressed("channel", "int")
    (group,) = config["config_groups"].values()
    strategy = "token" if dynamic else "tensor"
    group["input_activations"] = {
        "num_bits": 8,
        "type": "int",
        "symmetric": False,
        "strategy": strategy,
        "dynamic": dynamic,
    }
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    src = folder(tmp_path / "src", tensors, config)
    checkpoint.convert(src, tmp_path / "dst")
    said = config_of(tmp_path / "dst")
    (got,) = said["config_groups"].values()
    assert got["input_activations"].items() >= group["input_activations"].items()
    assert said["kv_cache_scheme"].items() >= config["kv_cache_scheme"].items()
    assert set(tensors_of(tmp_path / "dst")) == set(tensors)


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 4, "dynamic": True},
    ],
    ids=["4 bits", "FP8", "groups"],
)
def test_activations_are_in_the_words_of_the_source(tmp_path, inputs):
    tensors = {"up.weight": codes((6, 8), np.int8), "up.weight_scale": scales((6, 1))}
    config = compressed("channel", "int")
    config["config_groups"]["group_0"]["input_activations"] = inputs
    src = folder(tmp_path / "src", tensors, config)
    checkpoint.convert(src, tmp_path / "dst")
    (group,) = config_of(tmp_path / "dst")["config_groups"].values()
    assert group["input_activations"] == inputs and group["format"] == "int-quantized"


KV = {"k_proj.k_scale": scales(()), "v_proj.v_scale": scales(())}


@pytest.mark.parametrize("weights", ["FP8", None])
def test_the_cache_of_modelopt_is_said_or_refused(tmp_path, weights):
    tensors = {"up.weight": codes((6, 8)), "up.weight_scale": scales(()), **KV}
    if weights is None:
        tensors = {"up.weight": scales((6, 8)), **KV}
    said = {"quant_algo": weights, "kv_cache_quant_algo": "FP8"}
    src = folder(tmp_path / "src", tensors)
    (src / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    checkpoint.convert(src, tmp_path / "dst")
    cache = config_of(tmp_path / "dst")["kv_cache_scheme"]
    assert cache["num_bits"] == 8 and cache["type"] == "float" and cache["symmetric"]
    assert set(checkpoint.load(tmp_path / "dst")) == set(checkpoint.load(src))
    checkpoint.convert(tmp_path / "dst", tmp_path / "again")
    assert config_of(tmp_path / "again")["kv_cache_scheme"] == cache
    said["kv_cache_quant_algo"] = "NVFP4"
    (src / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.raises(CheckpointError, match="'NVFP4', but servers hold caches in FP8; remove"):
        checkpoint.convert(src, tmp_path / "other")


def test_zero_points_past_int8_are_refused(tmp_path):
    tensors = {"up.weight": codes((6, 8), np.int8), "up.weight_scale": scales((6, 1))}
    tensors["up.weight_zero_point"] = np.full((6, 1), 200, np.int32)
    src = folder(tmp_path / "src", tensors, {"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match="zero points past int8, but servers hold int8"):
        checkpoint.convert(src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


def gguf(path, **more):
    w = R.normal(size=(16, 64)).astype(np.float32)
    tensors = {
        "blk.0.ffn_up.weight": blocks(w),
        "token_embd.weight": blocks(w),
        "output_norm.weight": w[0],
        "rope_freqs.weight": np.full(8, 2, np.float32),
        **more,
    }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.rope.freq_base": 1.0,  # all wavelengths are equally short
        "tokenizer.ggml.eos_token_id": 7,
    }
    path.write_bytes(file_bytes(metadata, tensors))
    return path, values(blocks(w))


def test_gguf_becomes_packed_groups_of_32_with_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfp8.checkpoint._gguf_names._llama3", lambda *_: {"rope_type": "llama3"})
    path, want = gguf(tmp_path / "m.gguf")
    report = checkpoint.convert(path, tmp_path / "dst", floats=True)
    rows = {row.path: row.recipe for row in report.changed}
    assert rows["model.layers.0.mlp.up_proj.weight"] == "pack-quantized, group"
    assert "servers hold these in floats" in rows["model.embed_tokens.weight"]
    got = tensors_of(tmp_path / "dst")
    start = "model.layers.0.mlp.up_proj.weight"
    assert not [name for name in got if "rope_freqs" in name]
    scale = np.repeat(got[f"{start}_scale"].astype(np.float64), 32, 1)
    assert got[f"{start}_scale"].dtype == np.float16
    np.testing.assert_array_equal(unpacked(got[f"{start}_packed"], (16, 64)) * scale, want)
    said = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert said["model_type"] == "llama" and said["architectures"] == ["LlamaForCausalLM"]
    assert (said["hidden_size"], said["vocab_size"], said["eos_token_id"]) == (64, 16, 7)
    assert said["tie_word_embeddings"] and said["rope_scaling"] == {"rope_type": "llama3"}
    quantization = said["quantization_config"]
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert quantization["ignore"] == ["model.embed_tokens"]
    table = got["model.embed_tokens.weight"].view(ml_dtypes.bfloat16).reshape(16, 64)
    np.testing.assert_array_equal(table, np.asarray(want, ml_dtypes.bfloat16))


E5M2 = {"up.weight": codes((6, 8), ml_dtypes.float8_e5m2), "up.weight_scale": scales(())}
LEFT = {
    "e5m2": (E5M2, "servers do not hold its codes"),
    "experts": (
        {"experts.up": codes((2, 6, 8)), "experts.up_scale": scales((2, 1, 1))},
        "it is no layer's weight",
    ),
    "a table": (
        {"embed.weight": codes((6, 8)), "embed.weight_scale": scales(())},
        "a table, by 'embed' in its name; servers hold these in floats",
    ),
    "int8 in blocks": (
        {"up.weight": codes((200, 256), np.int8), "up.weight_scale": scales((2, 2))},
        "servers do not hold blocks of int8",
    ),
    "e4m3 in groups": (
        {"up.weight": codes((6, 64)), "up.weight_scale": scales((6, 4))},
        "servers do not hold groups of e4m3",
    ),
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT.keys())
def test_what_servers_cannot_hold_is_refused_or_in_floats(tmp_path, capsys, case):
    tensors, why = case
    config = compressed("block", "int", block_structure=[128, 128]) if "int8" in why else None
    src, dst = folder(tmp_path / "src", tensors, config), tmp_path / "dst"
    with pytest.raises(CheckpointError, match="a server has to hold it; pass `floats=True`"):
        checkpoint.convert(src, dst)
    assert __main__.main(["convert", str(src), str(dst)]) == 1
    told = capsys.readouterr().err
    assert why in told and "pass `floats=True`" not in told and "--floats" in told
    assert not dst.exists()
    assert __main__.main(["convert", str(src), str(dst), "--floats"]) == 0
    (name,) = checkpoint.load(dst)
    got, want = checkpoint.load(dst)[name], checkpoint.load(src)[name]
    np.testing.assert_array_equal(got, jaxfp8.dequantize(want, jnp.bfloat16))


def test_a_weight_in_floats_has_no_input_scale(tmp_path):
    layers = {"up": (codes((6, 8)), np.float32(0.5)), "head": (codes((6, 8)), np.float32(0.25))}
    tensors = {}
    for name, (w, scale) in layers.items():
        tensors |= {f"{name}.weight": w, f"{name}.weight_scale": scales(())}
        tensors[f"{name}.input_scale"] = scale
    src = folder(tmp_path / "src", tensors, STATIC)
    checkpoint.convert(src, tmp_path / "dst", floats=True)
    assert sorted(checkpoint.load(tmp_path / "dst")) == [
        "head.weight",
        "up.input_scale",
        "up.weight",
    ]
    assert config_of(tmp_path / "dst")["ignore"] == ["head"]


def test_other_files_are_copied_and_old_claims_are_not(tmp_path):
    tensors, config, _ = SOURCES["DeepSeek"]
    src = folder(tmp_path / "src", {f"up.{n}": t for n, t in tensors.items()}, config, files=2)
    for name in ("tokenizer.json", "hf_quant_config.json"):
        (src / name).write_text("{}")
    checkpoint.convert(src, tmp_path / "dst")
    assert sorted(os.listdir(tmp_path / "dst")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["model_type"] == "any"


def test_nothing_is_lost_when_a_write_is_cut_short(tmp_path, monkeypatch):
    tensors, config, _ = SOURCES["DeepSeek"]
    src = folder(tmp_path / "src", {f"up.{n}": t for n, t in tensors.items()}, config)
    checkpoint.save(tmp_path / "dst", {"old": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="the path is taken"):
        checkpoint.convert(src, tmp_path / "dst")
    with pytest.raises(CheckpointError, match="the source lies there"):
        checkpoint.convert(src, src, overwrite=True)
    with monkeypatch.context() as patched:

        def full(*_):
            raise OSError(28, "No space left on device")

        patched.setattr(_save._write, "write_at", full)
        with pytest.raises(OSError, match="No space"):
            checkpoint.convert(src, tmp_path / "dst", overwrite=True)
    assert list(checkpoint.load(tmp_path / "dst")) == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
    checkpoint.convert(src, tmp_path / "dst", overwrite=True)
    assert list(checkpoint.load(tmp_path / "dst")) == ["up.weight"]


def test_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'compressed-tensors' is written"):
        checkpoint.convert(tmp_path, tmp_path / "dst", format="gguf")
