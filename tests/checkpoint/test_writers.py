"""Files as each program writes them: the values are those of a float64 dequantization."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.files import (
    BNB,
    E4M3,
    codes,
    compressed,
    folder,
    modelopt,
    packed,
    scales,
    spread,
    words,
)

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

N, K = 150, 200
W, W8 = codes((N, K)), codes((N, K), np.int8)
ROWS, BLOCKS = scales((N, 1)), scales((2, 2))
GROUPS = scales((N, 4))
E8M0 = np.random.default_rng(2).integers(110, 130, (2, 2)).astype(np.uint8)
POWERS = 2.0 ** (E8M0.astype(np.float64) - 127)
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def pack_config(**weights):
    return compressed("group", "int", form="pack-quantized", group_size=50, **weights)


ZEROS = np.random.default_rng(3).integers(-50, 50, (N, 4)).astype(np.int8)
# name: tensors, config, the scale of each value, the zero point of each value
WRITTEN = {
    "llm-compressor, packed": (
        words(W8, **{"l.weight_scale": GROUPS}),
        pack_config(),
        spread(GROUPS, (N, K), (1, 50)),
        0,
    ),
    "llm-compressor, packed with zero points": (
        words(W8, **{"l.weight_scale": GROUPS, "l.weight_zero_point": packed(ZEROS, 0)}),
        pack_config(symmetric=False),
        spread(GROUPS, (N, K), (1, 50)),
        np.repeat(ZEROS, 50, 1),
    ),
    "llm-compressor, packed, no config, columns that fill no word": (
        {
            "l.weight_packed": packed(W8[:, :50]),
            "l.weight_shape": np.asarray([N, 50]),
            "l.weight_scale": ROWS,
        },
        None,
        ROWS,
        0,
    ),
    "llm-compressor, order of groups in order": (
        {
            "l.weight": W8,
            "l.weight_scale": GROUPS,
            "l.weight_g_idx": np.repeat(np.arange(4, dtype=np.int32), 50),
        },
        compressed("group", "int", group_size=50, actorder="group"),
        spread(GROUPS, (N, K), (1, 50)),
        0,
    ),
    "ModelOpt FP8_PB_WO": (
        {"l.weight": W, "l.weight_scale": BLOCKS.reshape(2, 1, 2, 1)},
        modelopt("fp8_pb_wo"),
        spread(BLOCKS, (N, K), (128, 128)),
        0,
    ),
    "ModelOpt W8A16": ({"l.weight": W8, "l.weight_scale": ROWS[:, 0]}, modelopt("W8A16"), ROWS, 0),
    "ModelOpt W8A8": (
        {"l.weight": W8, "l.weight_scale": ROWS[:, 0], "l.input_scale": ROWS[0, 0]},
        modelopt("W8A8_SQ_PER_CHANNEL"),
        ROWS,
        0,
    ),
    "DeepSeek V4": (
        {"l.weight": W, "l.scale": E8M0.view(ml_dtypes.float8_e8m0fnu)},
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        spread(POWERS, (N, K), (128, 128)),
        0,
    ),
    "bitsandbytes": (
        {"l.weight": W8, "l.SCB": ROWS[:, 0], "l.weight_format": np.uint8(0)},
        BNB,
        (ROWS / np.float32(127)).astype(np.float32),
        0,
    ),
    "bitsandbytes without a config": (
        {"l.weight": W8, "l.SCB": ROWS[:, 0], "l.weight_format": np.uint8(0)},
        None,
        (ROWS / np.float32(127)).astype(np.float32),
        0,
    ),
    "optimum-quanto int8": ({"l.weight._data": W8, "l.weight._scale": ROWS}, None, ROWS, 0),
    "optimum-quanto FP8": (
        {"l.weight._data": W, "l.weight._scale": ROWS, "l.output_scale": np.float32(1)},
        {"quant_method": "quanto", "weights": "float8", "activations": None},
        ROWS,
        0,
    ),
    "optimum-quanto by diffusers": (
        {"l.weight._data": W8, "l.weight._scale": ROWS},
        {"quant_method": "quanto", "weights_dtype": "int8", "modules_to_not_convert": ["out"]},
        ROWS,
        0,
    ),
    "torchao, old names": (
        {"l.weight:qdata": W8, "l.weight:scale": ROWS, "l.weight:zero_point": 0 * W8[:, :1]},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
        ROWS,
        0,
    ),
    "Mistral's HF form": (
        {"l.weight": W, "l.weight_scale_inv": ROWS[0, 0], "l.activation_scale": ROWS[1, 0]},
        STATIC | {"weight_block_size": None, "dequantize": False},
        ROWS[0, 0],
        0,
    ),
    "ComfyUI, e5m2": (
        {"l.weight": codes((N, K), ml_dtypes.float8_e5m2), "l.scale_weight": ROWS[0, 0]},
        None,
        ROWS[0, 0],
        0,
    ),
    "ComfyUI, int8 rows": (
        {
            "l.weight": W8,
            "l.weight_scale": ROWS,
            "l.comfy_quant": np.frombuffer(b'{"format": "int8_tensorwise"}', np.uint8),
        },
        None,
        ROWS,
        0,
    ),
    "ComfyUI by musubi-tuner, groups": (
        {"l.weight": W, "l.scale_weight": GROUPS[..., None], "scaled_fp8": codes(0)},
        None,
        spread(GROUPS, (N, K), (1, 50)),
        0,
    ),
    "fp8, rows": (
        {"l.weight": W, "l.weight_scale": ROWS[:, 0]},
        {"quant_method": "fp8"},
        ROWS,
        0,
    ),
}


def exact(stored, scale, zero=0):
    wide = (np.asarray(stored).astype(np.float64) - zero) * np.asarray(scale).astype(np.float64)
    return wide.astype(np.float32)


def stored_of(tensors):
    """The codes of a case, as int8 or FP8."""
    if "l.weight_packed" in tensors:
        return W8[:, : int(tensors["l.weight_shape"][1])]
    return next(
        tensors[n] for n in ("l.weight", "l.weight._data", "l.weight:qdata") if n in tensors
    )


@pytest.mark.parametrize("case", WRITTEN.values(), ids=WRITTEN.keys())
def test_a_writers_file_has_the_values_that_it_means(tmp_path, case):
    tensors, config, scale, zero = case
    q = checkpoint.load(folder(tmp_path / "m", tensors, config))["l.weight"]
    assert isinstance(q, jaxfp8.QArray) and (q.zero_point is None) == (np.ndim(zero) == 0)
    got = jaxfp8.dequantize(q, jnp.float32)
    np.testing.assert_array_equal(got, exact(stored_of(tensors), scale, zero))


@pytest.mark.parametrize(
    "name", ["bitsandbytes", "optimum-quanto", "torchao", "DeepSeek", "ComfyUI", "llm-compressor"]
)
def test_inspect_names_the_writer(tmp_path, name):
    for case, (tensors, config, *_) in WRITTEN.items():
        if case.startswith(name) and "no config" not in case:
            found = checkpoint.inspect(folder(tmp_path / case.replace(" ", "_"), tensors, config))
            assert name in found.format or "compressed-tensors" in found.format


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (3, N), (3, N, 1)], ids=str)
@pytest.mark.parametrize("config", [None, {"quant_method": "fp8"}], ids=["tensors", "fp8"])
def test_experts_have_scales_of_any_form(tmp_path, shape, config):
    w, s = codes((3, N, K)), scales(shape)
    path = folder(tmp_path / "m", {"moe.up.weight": w, "moe.up.weight_scale": s}, config)
    q = checkpoint.load(path)["moe.up.weight"]
    wide = exact(w, s.reshape(*shape, *(1,) * (3 - len(shape))))
    np.testing.assert_array_equal(jaxfp8.dequantize(q), wide)


def test_the_scale_of_stacked_experts_may_say_weight(tmp_path):
    w, s, beside = codes((3, N, K)), scales(()), {"moe.up_input_scale": scales(())}
    tensors = {"moe.up": w, "moe.up_weight_scale": s, "moe.in_weight": w, "moe.in_weight_scale": s}
    path = folder(tmp_path / "m", tensors | beside, modelopt("FP8"))
    loaded = checkpoint.load(path)
    assert set(loaded) == {"moe.up", "moe.in_weight", *beside}
    for name in ("moe.up", "moe.in_weight"):
        np.testing.assert_array_equal(jaxfp8.dequantize(loaded[name]), exact(w, s))


def test_a_class_says_which_layers_a_group_is_for(tmp_path):
    groups = {
        "table": {"targets": ["Embedding"], "weights": {"type": "int", "strategy": "channel"}},
        "layers": {"targets": ["Linear"], "weights": {"type": "float", "strategy": "tensor"}},
        "cache": {"targets": ["LlamaAttention"], "weights": None},
    }
    for group in groups.values():
        group["weights"] = group["weights"] and group["weights"] | {"num_bits": 8}
    tensors = {
        "embed_tokens.weight": W8,
        "embed_tokens.weight_scale": ROWS,
        "up.weight": W,
        "up.weight_scale": scales(1),
        "attn.k_scale": scales(1),
    }
    for number, order in enumerate(([0, 1, 2], [2, 1, 0])):
        named = {name: groups[name] for name in np.asarray(list(groups))[order]}
        config = {"quant_method": "compressed-tensors", "config_groups": named}
        path = folder(
            tmp_path / str(number), tensors, config | {"quantization_status": "compressed"}
        )
        loaded = checkpoint.load(path)
        np.testing.assert_array_equal(
            jaxfp8.dequantize(loaded["embed_tokens.weight"]), exact(W8, ROWS)
        )
        assert loaded["up.weight"].scale.shape == ()
        notes = {row.path: row.note for row in checkpoint.inspect(path).rows}
        assert notes["attn.k_scale"] == "a scale of attention or its cache"


MIXED = {
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["head*"],
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W8A16"}},
    }
}


def test_layers_of_modelopt_have_algorithms_of_their_own(tmp_path):
    tensors = {"a.weight": W, "a.weight_scale": scales(()), "b.weight": W8, "b.weight_scale": ROWS}
    path = folder(tmp_path / "m", tensors | {"gate.weight": scales((3, 4))})
    (path / "hf_quant_config.json").write_text(json.dumps(MIXED))
    loaded = checkpoint.load(path)
    assert loaded["a.weight"].scale.shape == () and loaded["b.weight"].dtype == jnp.float32
    np.testing.assert_array_equal(jaxfp8.dequantize(loaded["b.weight"]), exact(W8, ROWS))
    assert "MIXED_PRECISION of FP8, W8A16" in checkpoint.inspect(path).format


def test_a_cache_in_8_bits_leaves_weights_in_floats(tmp_path):
    path = folder(tmp_path / "m", {"q.weight": scales((3, 4)), "k.k_scale": scales(())})
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    assert set(checkpoint.load(path)) == {"q.weight", "k.k_scale"}


def test_problems_that_are_alike_print_as_one(tmp_path):
    tensors = {f"layers.{number}.weight": W for number in range(5)}
    found = checkpoint.inspect(folder(tmp_path / "m", tensors))
    assert len(found.problems) == 5 and str(found).count("would not load: ") == 1
    assert "(4 more alike)" in str(found)


@pytest.mark.parametrize("params", [{"qscheme_act": "TENSOR"}, {"qscheme_act": None}], ids=str)
def test_params_of_mistral_are_read_beside_its_own_files(tmp_path, params):
    said = {"dim": 8, "quantization": {"qformat_weight": "fp8_e4m3", **params}}
    tensors = {"wq.weight": W, "wq.qscale_weight": scales(()), "wq.qscale_act": scales(())}
    path = folder(tmp_path / "m", tensors, {"quant_method": "gptq"})
    (path / "model.safetensors").rename(path / "consolidated.safetensors")
    (path / "params.json").write_text(json.dumps(said))
    assert "Mistral" in checkpoint.inspect(path).format
    assert set(checkpoint.load(path)) == {"wq.weight", "wq.input_scale"}


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "consolidated"])
def test_an_index_may_have_any_name(tmp_path, stem):
    path = folder(tmp_path / "m", {"a": scales(3), "b": scales(4)}, files=2)
    usual = path / "model.safetensors.index.json"
    other = usual.rename(path / f"{stem}.safetensors.index.json")
    assert set(checkpoint.load(path)) == set(checkpoint.load(other)) == {"a", "b"}
    (path / "model.fp16.safetensors.index.json").write_text(other.read_text())
    with pytest.raises(CheckpointError, match="one index says") as refused:
        checkpoint.load(path)
    named = refused.value.remedy.removeprefix("name one of them, such as ")
    assert set(checkpoint.load(named)) == {"a", "b"}


CAST = {"l.weight": W, "l.bias": codes(N), "norm.scale": codes(4)}


def test_a_model_cast_to_fp8_is_read_as_it_is_when_asked_for(tmp_path):
    path = folder(tmp_path / "m", CAST)
    with pytest.raises(CheckpointError, match="unscaled=True"):
        checkpoint.load(path)
    loaded = checkpoint.load(path, unscaled=True, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(jaxfp8.dequantize(loaded["l.weight"]), W.astype(np.float32))
    assert loaded["l.weight"].qvalue.dtype == E4M3 and loaded["l.bias"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["norm.scale"], CAST["norm.scale"].astype(np.float32))
    assert checkpoint.load(path, unscaled=True)["l.bias"].dtype == E4M3


def test_raw_reads_what_load_refuses(tmp_path):
    with checkpoint.open(folder(tmp_path / "m", CAST)) as opened:
        assert opened.raw("l.weight").tobytes() == W.tobytes() and opened.summary().problems
        with pytest.raises(CheckpointError, match="without a scale"):
            opened["norm.scale"]
        with pytest.raises(CheckpointError, match="without a scale"):
            len(opened)


def test_unscaled_takes_no_scale_away(tmp_path):
    tensors = {"a.weight": W, "a.weight_scale": ROWS, "b.weight": W, "b.weight_amax": ROWS}
    with pytest.raises(CheckpointError, match=r"'b.weight_amax' looks like one"):
        checkpoint.load(folder(tmp_path / "m", tensors), unscaled=True)


def test_a_slice_of_packed_codes_is_that_of_the_codes(tmp_path):
    tensors = words(W8, **{"l.weight_scale": ROWS})
    with checkpoint.open(folder(tmp_path / "m", tensors)) as opened:
        part = opened._items["l.weight"].value
        for index in (slice(0, 200), slice(3, 9), slice(4, 8), slice(199, 200), slice(7, 7)):
            file = opened._folder.files[part.entry.file]
            got = checkpoint._decode.values(file, part, (slice(2, 5), index))
            np.testing.assert_array_equal(got, W8[2:5, index])


def test_a_mark_of_comfyui_has_to_fit_its_tensor(tmp_path):
    said = np.frombuffer(json.dumps({"format": "float8_e5m2"}).encode(), np.uint8)
    tensors = {"l.weight": W, "l.weight_scale": scales(()), "l.comfy_quant": said}
    with pytest.raises(CheckpointError, match="float8_e5m2"):
        checkpoint.load(folder(tmp_path / "m", tensors))
