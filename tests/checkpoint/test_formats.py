"""Each format that people publish: the values are those of a float64 dequantization."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint import files
from checkpoint.files import E4M3, codes, compressed, folder, scales, spread

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

N, K = 300, 200
BLOCKS = (3, 2)
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
E8M0 = np.random.default_rng(2).integers(110, 130, (N, 7)).astype(np.uint8)


def by(**tensors):
    """Tensors of a module, dots written as two underscores."""
    return {f"layer.{name}": array for name, array in tensors.items()}


W, W8 = codes((N, K)), codes((N, K), np.int8)
TENSOR, CHANNEL, BLOCK = scales(()), scales((N, 1)), scales(BLOCKS)
# name: tensors, config, the scale for each value, the zero point for each value
FORMATS = {
    "compressed-tensors tensor": (
        by(weight=W, weight_scale=TENSOR.reshape(1)),
        compressed("tensor"),
        TENSOR,
        0,
    ),
    "compressed-tensors channel": (
        by(weight=W, weight_scale=CHANNEL.astype(ml_dtypes.bfloat16)),
        compressed("channel"),
        CHANNEL.astype(ml_dtypes.bfloat16),
        0,
    ),
    "compressed-tensors block": (
        by(weight=W, weight_scale=BLOCK),
        compressed("block", block_structure=[128, 128]),
        spread(BLOCK, (N, K), (128, 128)),
        0,
    ),
    "compressed-tensors int8": (
        by(weight=W8, weight_scale=CHANNEL),
        compressed("channel", "int"),
        CHANNEL,
        0,
    ),
    "compressed-tensors int8 zero points": (
        by(
            weight=W8,
            weight_scale=CHANNEL,
            weight_zero_point=np.arange(N, dtype=np.int64).reshape(N, 1).astype(np.int8),
        ),
        compressed("channel", "int", symmetric=False),
        CHANNEL,
        np.arange(N).reshape(N, 1).astype(np.int8),
    ),
    "compressed-tensors mx": (
        by(weight=W, weight_scale=E8M0),
        compressed("group", form="mxfp8-quantized", group_size=32),
        spread(2.0 ** (E8M0.astype(np.float64) - 127), (N, K), (1, 32)),
        0,
    ),
    "DeepSeek": (
        by(weight=W, weight_scale_inv=BLOCK),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        spread(BLOCK, (N, K), (128, 128)),
        0,
    ),
    "fp8 tensor": (
        by(weight=W, weight_scale=TENSOR, input_scale=TENSOR),
        {"quant_method": "fp8", "activation_scheme": "static"},
        TENSOR,
        0,
    ),
    "ModelOpt tensor": (
        by(weight=W, weight_scale=TENSOR, input_scale=TENSOR),
        MODELOPT | {"quant_algo": "FP8"},
        TENSOR,
        0,
    ),
    "ModelOpt channel": (
        by(weight=W, weight_scale=CHANNEL[:, 0]),
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        CHANNEL,
        0,
    ),
    "ModelOpt block": (
        by(weight=W, weight_scale=BLOCK),
        MODELOPT | {"quant_algo": "fp8_pb_wo"},
        spread(BLOCK, (N, K), (128, 128)),
        0,
    ),
    "ModelOpt mx": (
        by(weight=W, weight_scale=E8M0),
        MODELOPT | {"quant_algo": "MXFP8"},
        spread(2.0 ** (E8M0.astype(np.float64) - 127), (N, K), (1, 32)),
        0,
    ),
    "fbgemm": (
        by(weight=W, weight_scale=CHANNEL),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        CHANNEL,
        0,
    ),
    "torchao": (by(_weight_qdata=W, _weight_scale=CHANNEL), None, CHANNEL, 0),
    "ComfyUI": (
        by(weight=W, scale_weight=TENSOR, scale_input=TENSOR) | {"scaled_fp8": np.zeros(0, E4M3)},
        None,
        TENSOR,
        0,
    ),
    "bytes of MX without a config": (
        by(weight=W, weight_scale=E8M0),
        None,
        spread(2.0 ** (E8M0.astype(np.float64) - 127), (N, K), (1, 32)),
        0,
    ),
    "e8m0 in blocks": (
        by(weight=W, weight_scale_inv=E8M0[:3, :2].view(ml_dtypes.float8_e8m0fnu)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        spread(2.0 ** (E8M0[:3, :2].astype(np.float64) - 127), (N, K), (128, 128)),
        0,
    ),
}


@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS.keys())
def test_values_are_exact(tmp_path, case):
    tensors, config, scale, zero = case
    q = checkpoint.load(folder(tmp_path / "m", tensors, config))["layer.weight"]
    stored = tensors.get("layer.weight", tensors.get("layer._weight_qdata"))
    exact = (stored.astype(np.float64) - zero) * np.asarray(scale).astype(np.float64)
    got = jaxfp8.dequantize(q, jnp.float32)
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("spelling", ["input_scale", "scale_input", "qscale_act"])
def test_static_scale_of_activations_has_one_name(tmp_path, spelling):
    tensors = by(weight=W, weight_scale=TENSOR, **{spelling: TENSOR})
    loaded = checkpoint.load(folder(tmp_path / "m", tensors))
    assert float(loaded["layer.input_scale"]) == float(TENSOR)


def test_experts_have_blocks_of_their_own(tmp_path):
    w, s = codes((2, N, K)), scales((2, *BLOCKS))
    tensors = {"experts.gate_up_proj": w, "experts.gate_up_proj_scale_inv": s}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    q = checkpoint.load(folder(tmp_path / "m", tensors, config))["experts.gate_up_proj"]
    exact = w.astype(np.float64) * spread(s, w.shape, (1, 128, 128))
    np.testing.assert_array_equal(jaxfp8.dequantize(q), exact.astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 48, 64)], ids=["square", "not square"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_of_fbgemm_have_a_scale_for_each_of_the_last_axis(tmp_path, shape, name):
    """transformers shapes the scale of down_proj as [E, N, 1] beside [E, K, N]."""
    w, s = codes(shape), scales((shape[0], shape[-1]))
    stored = s[:, None, :] if name == "gate_up_proj" else s[:, :, None]
    tensors = {f"experts.{name}": w, f"experts.{name}_scale": stored}
    q = checkpoint.load(folder(tmp_path / "m", tensors, {"quant_method": "fbgemm_fp8"}))
    exact = w.astype(np.float64) * s[:, None, :].astype(np.float64)
    np.testing.assert_array_equal(jaxfp8.dequantize(q[f"experts.{name}"]), exact.astype(np.float32))


def test_experts_have_static_scales_of_their_own(tmp_path):
    tensors = {
        "experts.up_proj": codes((2, N, K)),
        "experts.up_proj_scale": scales((2, 1, 1)),
        "experts.up_proj_input_scale": scales((2,)),
    }
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    loaded = checkpoint.load(folder(tmp_path / "m", tensors, config))
    assert set(loaded) == {"experts.up_proj", "experts.up_proj_input_scale"}
    assert loaded["experts.up_proj"].tile_sizes == (1, N, K)


def test_groups_of_a_config_are_for_their_targets(tmp_path):
    config = compressed("tensor")
    group = config["config_groups"]["group_0"]
    channel = group | {
        "targets": ["re:.*down$"],
        "weights": group["weights"] | {"strategy": "channel"},
    }
    config["config_groups"]["group_1"] = channel
    tensors = {
        "up.weight": W,
        "up.weight_scale": TENSOR,
        "down.weight": W,
        "down.weight_scale": CHANNEL,
    }
    loaded = checkpoint.load(folder(tmp_path / "m", tensors, config))
    assert loaded["up.weight"].scale.shape == () and loaded["down.weight"].scale.shape == (N, 1)


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("entry", ["lm_head", "re:lm.*", "lm_*", "model.lm_head"])
def test_skip_list_is_said_in_the_summary(tmp_path, key, entry):
    config = {"quant_method": "fp8", key: [entry]}
    path = folder(tmp_path / "m", {"model.lm_head.weight": scales((4, 4))}, config)
    row = checkpoint.inspect(path).rows[0]
    matched = entry in ("lm_head", "model.lm_head")
    assert (repr(entry) in row.note) == matched and not row.scale


FP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
# name: tensors, config, what the error says
BROKEN = {
    "no scale": (by(weight=W), None, "without a scale"),
    "int8 without the scale that the config says": (
        by(weight=W8),
        compressed("channel", "int"),
        "without a scale",
    ),
    "scale of no weight": (by(weight_scale=TENSOR), None, "no 8-bit weight uses it"),
    "scale of a wide weight": (
        by(weight=scales((4, 4)), weight_scale=TENSOR),
        None,
        r"'layer.weight' is F32\[4,4\]",
    ),
    "two scales": (by(weight=W, weight_scale=TENSOR, scale_weight=TENSOR), None, "one is needed"),
    "shape": (by(weight=W, weight_scale=scales((7, 3))), None, "is a scale of shape"),
    "granularity of the config": (
        by(weight=W, weight_scale=CHANNEL),
        compressed("block", block_structure=[128, 128]),
        r"in granularity block\[128, 128\] needs \[3, 2\]",
    ),
    "kind of the config": (
        by(weight=W8, weight_scale=CHANNEL),
        compressed("channel"),
        "the config says float",
    ),
    "a skipped layer in 8 bits": (
        {"lm_head.weight": W, "lm_head.weight_scale": TENSOR},
        compressed("tensor"),
        "leaves it in floats",
    ),
    "fnuz": (
        by(weight=codes((4, 4), ml_dtypes.float8_e4m3fnuz), weight_scale=TENSOR),
        None,
        "has dtype float8_e4m3fnuz",
    ),
    "dtype of a scale": (
        by(weight=W, weight_scale=np.ones((N, 1), np.int32)),
        None,
        "is a scale of dtype I32",
    ),
    "NaN in a scale": (by(weight=W, weight_scale=np.float32(np.nan)), None, "not finite"),
    "no zero point": (
        by(weight=W8, weight_scale=CHANNEL),
        compressed("channel", "int", symmetric=False),
        "has no zero point",
    ),
    "no static scale": (
        by(weight=W, weight_scale=TENSOR),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "has no input scale",
    ),
    "4 bits": (by(weight_packed=W8), FP4, "nvfp4-pack-quantized"),
    "packed tensors": (by(weight_packed=W8), None, "packed format"),
    "another method": (by(weight=W), {"quant_method": "gptq"}, "quant_method 'gptq'"),
    "4-bit group": (by(weight=W), compressed("group", "int", num_bits=4), "4-bit int"),
    "float64": (by(weight=np.ones(3)), None, "JAX has float32"),
    "large int64": (by(weight=np.asarray([1 << 40])), None, "numbers past int32"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_what_does_not_fit_is_refused(tmp_path, case):
    tensors, config, text = case
    path = folder(tmp_path / "m", tensors, config)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path)


def test_error_names_tensor_file_and_remedy(tmp_path):
    path = folder(tmp_path / "m", by(weight=W))
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(path)
    error = raised.value
    assert (error.tensor, error.file) == ("layer.weight", str(path / "model.safetensors"))
    assert "'layer.weight_scale'" in error.needs and "raw" in error.remedy


def test_raw_reads_what_has_no_meaning(tmp_path):
    path = folder(tmp_path / "m", by(weight=codes((2, 2), np.int8), bias=scales(2)))
    with checkpoint.open(path) as opened:
        np.testing.assert_array_equal(opened.raw("layer.weight"), codes((2, 2), np.int8))


def test_inspect_lists_every_problem(tmp_path):
    tensors = {"a.weight": W, "b.weight": W, "b.weight_scale": scales((7, 3)), "c.weight": CHANNEL}
    found = checkpoint.inspect(folder(tmp_path / "m", tensors))
    assert len(found.problems) == 2 and [row.path for row in found.in_floats] == ["c.weight"]
    assert [row.path for row in found.unread] == ["a.weight", "b.weight", "b.weight_scale"]


def test_inspect_reads_no_data(tmp_path):
    path = folder(tmp_path / "m", by(weight=W, weight_scale=np.full((N, 1), np.nan, np.float32)))
    assert not checkpoint.inspect(path).problems


ZEROS = {
    "torchao": by(
        _weight_qdata=W8, _weight_scale=CHANNEL, _weight_zero_point=np.zeros((N, 1), np.int8)
    ),
    "int32": by(weight=W8, weight_scale=CHANNEL, weight_zero_point=np.zeros((N, 1), np.int32)),
    "int64": by(weight=W8, weight_scale=CHANNEL, weight_zero_point=np.zeros(1, np.int64)),
    "uint8": by(
        weight=W8.view(np.uint8), weight_scale=BLOCK, weight_zero_point=np.zeros(BLOCKS, np.uint8)
    ),
    "FP8": by(weight=W, weight_scale=CHANNEL, weight_zero_point=np.zeros((N, 1), E4M3)),
}


@pytest.mark.parametrize("tensors", ZEROS.values(), ids=ZEROS.keys())
def test_zero_points_that_are_all_0_are_left_out(tmp_path, tensors):
    path = folder(tmp_path / "m", tensors)
    q = checkpoint.load(path)["layer.weight"]
    assert q.zero_point is None
    assert "zero point" not in checkpoint.inspect(path).rows[0].scale
    with checkpoint.open(path) as opened:
        assert opened.shape("layer.weight").zero_point is None
        assert jax.tree.structure(opened["layer.weight"]) == jax.tree.structure(q)


def test_one_zero_point_that_is_not_0_keeps_them_all(tmp_path):
    zero = np.zeros((70000, 1), np.int8)  # more than is looked at first
    zero[-1] = 1
    tensors = by(
        weight=codes((70000, 1), np.int8), weight_scale=scales((70000, 1)), weight_zero_point=zero
    )
    q = checkpoint.load(folder(tmp_path / "m", tensors))["layer.weight"]
    np.testing.assert_array_equal(q.zero_point, zero)


def test_index_has_to_name_what_the_files_have(tmp_path):
    tensors = {"a": scales(3), "b": scales(4)}
    path = folder(tmp_path / "m", tensors, files=2)
    assert set(checkpoint.load(path)) == {"a", "b"}
    (path / "model-00002-of-00002.safetensors").write_bytes(files.file_bytes({"c": scales(4)}))
    with pytest.raises(CheckpointError, match="is said to be in"):
        checkpoint.load(path)


def test_index_that_names_nothing_is_refused(tmp_path):
    path = folder(tmp_path / "m", {"a": scales(3), "b": scales(4)}, files=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="a file for each tensor, is needed"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", ".."])
def test_index_cannot_name_files_elsewhere(tmp_path, name):
    path = folder(tmp_path / "m", {"a": scales(3), "b": scales(4)}, files=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="the files lie beside it"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "said",
    [{"format": "nvfp4"}, {"format": "int8_tensorwise", "convrot": True}, {}],
    ids=["nvfp4", "rotated", "nothing"],
)
@pytest.mark.parametrize("place", ["tensor", "metadata"])
def test_layout_that_a_mark_names_has_to_be_known(tmp_path, said, place):
    tensors = by(weight=W, weight_scale=TENSOR)
    metadata = None
    if place == "tensor":
        tensors["layer.comfy_quant"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    else:
        metadata = {"_quantization_metadata": json.dumps({"layers": {"layer": said}})}
    (tmp_path / "m.safetensors").write_bytes(files.file_bytes(tensors, metadata))
    with pytest.raises(CheckpointError, match="float8_e4m3fn, float8_e5m2"):
        checkpoint.load(tmp_path / "m.safetensors")


def test_marks_of_known_layouts_are_no_arrays(tmp_path):
    said = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    mark = np.frombuffer(json.dumps(said).encode(), np.uint8)
    tensors = by(weight=W, weight_scale=TENSOR, comfy_quant=mark)
    assert list(checkpoint.load(folder(tmp_path / "m", tensors))) == ["layer.weight"]


@pytest.mark.parametrize(
    ("kind", "known"), [("Float8Tensor", True), ("torch.Tensor", True), ("Int4Tensor", False)]
)
def test_classes_of_torchao_have_to_be_known(tmp_path, kind, known):
    tensors = by(_weight_qdata=W, _weight_scale=CHANNEL)
    metadata = {"layer.weight": json.dumps({"_type": kind, "_data": {}}), "tensor_names": "[]"}
    (tmp_path / "m.safetensors").write_bytes(files.file_bytes(tensors, metadata))
    if known:
        assert list(checkpoint.load(tmp_path / "m.safetensors")) == ["layer.weight"]
        return
    with pytest.raises(CheckpointError, match="is a Int4Tensor of torchao"):
        checkpoint.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "exclude_modules": ["head*"]}},
        ),
        ("config.json", {"text_config": {"quantization_config": MODELOPT | {"quant_algo": "FP8"}}}),
        ("config.json", {"compression_config": compressed("tensor")}),
    ],
    ids=["ModelOpt's file", "a part of the config", "the old name"],
)
def test_configuration_is_found(tmp_path, file, content):
    path = folder(tmp_path / "m", by(weight=W, weight_scale=TENSOR))
    (path / file).write_text(json.dumps(content))
    assert checkpoint.inspect(path).format != "by its tensors"


def test_list_of_modelopt_is_one_of_patterns(tmp_path):
    path = folder(tmp_path / "m", {"head.0.weight": scales((4, 4))})
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["head*"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(content))
    assert "'exclude_modules' has 'head*'" in checkpoint.inspect(path).rows[0].note


def test_several_files_need_an_index(tmp_path):
    path = folder(tmp_path / "m", {"a": scales(3), "b": scales(4)}, files=2)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="several files need an index"):
        checkpoint.load(path)


def test_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such path"):
        checkpoint.load(tmp_path / "nothing")
