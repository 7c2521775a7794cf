"""Files as each program writes them: the values are those of a float64 dequantisation."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.files import E4M3, codes, compressed, folder, scales, spread

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

N, K = 150, 200
W, W8 = codes((N, K)), codes((N, K), np.int8)
ROWS, BLOCKS = scales((N, 1)), scales((2, 2))
GROUPS = scales((N, 4))
E8M0 = np.random.default_rng(2).integers(110, 130, (2, 2)).astype(np.uint8)
POWERS = 2.0 ** (E8M0.astype(np.float64) - 127)
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["head"]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def packed(q, axis=-1):
    """Four codes to a word along an axis, lowest byte first, code + 128."""
    q = np.swapaxes(np.asarray(q, np.int64) + 128, axis, -1)
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, -q.shape[-1] % 4)])
    words = (q.reshape(*q.shape[:-1], -1, 4) << np.arange(0, 32, 8)).sum(-1)
    return np.swapaxes(words.astype(np.uint32).view(np.int32), axis, -1).copy()


def words(q=W8, **others):
    shape = np.asarray(q.shape, np.int64)
    return {"l.weight_packed": packed(q), "l.weight_shape": shape, **others}


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def pack_config(**weights):
    return compressed("group", "int", form="pack-quantized", group_size=50, **weights)


ZEROS = np.random.default_rng(3).integers(-50, 50, (N, 4)).astype(np.int8)
# name: tensors, config, the scale of each value, the zero point of each value
WRITTEN = {
    "llm-compressor, packed": (
        words(**{"l.weight_scale": GROUPS}),
        pack_config(),
        spread(GROUPS, (N, K), (1, 50)),
        0,
    ),
    "llm-compressor, packed with zero points": (
        words(**{"l.weight_scale": GROUPS, "l.weight_zero_point": packed(ZEROS, 0)}),
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


# What changes the meaning of a weight: tensors, config, the words of the error.
ORDER = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 50)).astype(np.int32)
REFUSED = {
    "order of groups": (
        {"l.weight": W8, "l.weight_scale": GROUPS, "l.weight_g_idx": ORDER},
        compressed("group", "int", group_size=50),
        "'l.weight_g_idx' puts columns that are no neighbours",
    ),
    "no order of groups": (
        {"l.weight": W8, "l.weight_scale": GROUPS},
        compressed("group", "int", group_size=50, actorder="group"),
        "has no weight_g_idx",
    ),
    "smoothed inputs": (
        {"l.weight": W8, "l.weight_scale": ROWS, "l.pre_quant_scale": scales(K)},
        modelopt("W8A8_SQ_PER_CHANNEL"),
        "smooths the input of 'l.weight'",
    ),
    "smoothed inputs of torchao": (
        {"l._weight_qdata": W8, "l._weight_scale": ROWS, "l._weight_act_pre_scale": scales(K)},
        None,
        "smooths the input of 'l.weight'",
    ),
    "a key of the config": (
        {"l.weight": W, "l.weight_scale": ROWS},
        {"quant_method": "fp8", "rotation": "hadamard"},
        "rotation = 'hadamard'",
    ),
    "a key of a group": (
        {"l.weight": W, "l.weight_scale": ROWS},
        compressed("channel", levels=[1, 2]),
        "weights of group_0",
    ),
    "a transform": (
        {"l.weight": W, "l.weight_scale": ROWS},
        compressed("channel") | {"transform_config": {"R1": {}}},
        "transform_config",
    ),
    "4 bits of bitsandbytes": ({"l.weight": W8}, BNB | {"load_in_4bit": True}, "load_in_4bit"),
    "4 bits in words": (
        words() | {"l.weight_packed": packed(W8)[:, :25], "l.weight_scale": ROWS},
        None,
        "about 4 bits",
    ),
    "words without a shape": (
        {"l.weight_packed": packed(W8), "l.weight_scale": ROWS},
        None,
        "its shape is needed",
    ),
    "a layer of ModelOpt in 4 bits": (
        {"l.weight": W, "l.weight_scale": ROWS},
        modelopt("MIXED_PRECISION", quantized_layers={"l": {"quant_algo": "NVFP4"}}),
        "quant_algo of 'l' is NVFP4",
    ),
    "a kernel's order of bitsandbytes": (
        {"l.weight": W8, "l.SCB": ROWS[:, 0], "l.weight_format": np.uint8(2)},
        BNB,
        "codes lie in the order of a kernel",
    ),
    "pairs of FP4": (
        {"l.weight": W8, "l.scale": np.full((N, 13), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "pairs of FP4",
    ),
    "4 bits of optimum-quanto": (
        {"l.weight._data": W8.view(np.uint8), "l.weight._scale": ROWS, "l.weight._shift": ROWS},
        None,
        "packed format of optimum-quanto",
    ),
    "bytes that may be FP8": (
        {"l.weight": W.view(np.uint8), "l.weight_scale": ROWS},
        None,
        "bytes may be FP8",
    ),
    "GPTQ": (
        {"l.qweight": packed(W8), "l.qzeros": packed(W8), "l.scales": ROWS},
        None,
        "packed format of GPTQ",
    ),
    "MLX": ({"l.weight": packed(W8), "l.scales": GROUPS, "l.biases": GROUPS}, None, "MLX"),
    "a method that is not read": ({"l.weight": W}, {"quant_method": "quark"}, "AMD Quark"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_changes_the_meaning_of_a_weight_is_refused_by_name(tmp_path, case):
    tensors, config, words = case
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(folder(tmp_path / "m", tensors, config))


SCALES_OF_NO_FORM = {
    "a row beside a square": ((48, 48), (1, 48)),
    "thirds as columns": ((96, 48), (1, 3)),
    "thirds": ((96, 48), (3,)),
    "thirds as rows": ((96, 48), (3, 1)),
    "another length": ((96, 48), (48,)),
}


@pytest.mark.parametrize("case", SCALES_OF_NO_FORM.values(), ids=SCALES_OF_NO_FORM.keys())
@pytest.mark.parametrize("config", [None, {"quant_method": "fp8"}], ids=["tensors", "fp8"])
def test_a_scale_of_a_form_that_its_method_lacks_is_refused(tmp_path, case, config):
    shape, scale = case
    tensors = {"l.weight": codes(shape), "l.weight_scale": scales(scale)}
    with pytest.raises(CheckpointError, match="is a scale of shape"):
        checkpoint.load(folder(tmp_path / "m", tensors, config))


@pytest.mark.parametrize(
    "other",
    ["absmax", "scale", "scales", "weight_absmax", "wscale", "weight.absmax", "zeros", "w_scale"],
)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, E4M3], ids=lambda d: np.dtype(d).name)
def test_codes_beside_what_looks_like_their_scale_are_no_array(tmp_path, other, dtype):
    if other == "scale" and dtype is E4M3:
        return  # DeepSeek's spelling
    path = folder(tmp_path / "m", {"l.weight": codes((8, 4), dtype), f"l.{other}": scales(8)})
    with pytest.raises(CheckpointError, match=f"l.{other}"):
        checkpoint.load(path)


def test_bytes_beside_other_scales_are_arrays(tmp_path):
    tensors = {"attn.mask": codes((4, 4), np.uint8), "attn.k_scale": scales(1)}
    tensors |= {"norm.scale": scales(4), "norm.weight": scales(4), "logit_scale": scales(())}
    assert set(checkpoint.load(folder(tmp_path / "m", tensors))) == set(tensors)


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
    tensors = words(**{"l.weight_scale": ROWS})
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
