"""Formats that are not read: each is refused by a true sentence, never read as other numbers."""

import numpy as np
import pytest
from checkpoint.files import codes, compressed, folder, scales

from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

W, INT = codes((64, 128)), codes((64, 128), np.int8)
ROWS = scales((64, 1))
WORDS = np.zeros((64, 32), np.int32)
READ = "load a version of the model in one of them"
METHODS = {
    "AMD Quark": ({"quant_method": "quark", "quant_mode": "eager_mode"}, "AMD Quark"),
    "GPTQ in 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "GPTQ"),
    "AutoRound": ({"quant_method": "auto-round", "bits": 8}, "AutoRound"),
    "HQQ": ({"quant_method": "hqq"}, "HQQ"),
    "EETQ": ({"quant_method": "eetq", "weights": "int8"}, "EETQ"),
    "MLX": ({"group_size": 64, "bits": 8}, "MLX"),
    "SD.Next": ({"quant_method": "sdnq", "weights_dtype": "int8"}, "SDNQ"),
    "Gaudi": ({"quant_method": "inc"}, "'inc'"),
}


@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS.keys())
def test_a_method_that_is_not_read_is_named(tmp_path, case):
    """Its files may have 8 bits, so the remedy is another writer."""
    config, name = case
    tensors = {"a.weight": W, "a.weight_scale": scales(())}
    with pytest.raises(CheckpointError, match=f"{name}.*{READ}"):
        checkpoint.load(folder(tmp_path / "m", tensors, config))


LONE = {
    "HQQ": ({"a.W_q": INT.view(np.uint8), "a.scale": ROWS, "a.zero": ROWS}, r"\(HQQ\)"),
    "EETQ": ({"a.weight": INT, "a.weight_scales": ROWS}, r"\(EETQ\)"),
    "MLX": ({"a.weight": WORDS, "a.scales": ROWS, "a.biases": ROWS}, "MLX"),
    "GPTQ": ({"a.qweight": WORDS, "a.scales": ROWS}, "GPTQ or AWQ.*another program"),
    "Ascend": ({"a.weight": INT, "a.deq_scale": ROWS}, "Ascend"),
    "TransformerEngine": (
        {"a.weight._data": INT.view(np.uint8), "a.weight._scale_inv": scales((1,))},
        "looks like its scale",
    ),
    "TensorRT-LLM": (
        {"a.weight": W, "a.weights_scaling_factor": scales((1,))},
        "'a.weights_scaling_factor' looks like one.*if codes times scale are the weight",
    ),
}


@pytest.mark.parametrize("case", LONE.values(), ids=LONE.keys())
def test_codes_of_other_writers_are_never_numbers(tmp_path, case):
    tensors, message = case
    path = folder(tmp_path / "m", tensors)
    for unscaled in (False, True):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(path, unscaled=unscaled)


CHANGES = [
    "weight_offset",
    "weight_zp",
    "weight_perm",
    "weight_hadamard",
    "weight_col_scale",
    "zero_point",
    "zeros",
    "offset",
    "smooth_scale",
    "outlier_idx",
    "weight_quantizer._amax",
    "weight.outliers",
]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype", [np.int8, W.dtype], ids=["int8", "e4m3"])
def test_an_unknown_tensor_beside_a_weight_is_refused(tmp_path, name, dtype):
    """msModelSlim of Ascend has a `weight_offset` that is a zero point."""
    tensors = {"a.weight": codes((64, 128), dtype), "a.weight_scale": ROWS, f"a.{name}": ROWS}
    with pytest.raises(CheckpointError, match=f"{name}' is .* unknown how that changes 'a.weight'"):
        checkpoint.load(folder(tmp_path / "m", tensors))


def test_an_unknown_tensor_beside_experts_is_refused(tmp_path):
    tensors = {"experts.up": codes((2, 6, 8)), "experts.up_scale": scales((2, 1, 1))}
    tensors |= {"experts.up_bias": scales((2, 6))}
    path = folder(tmp_path / "m", tensors)
    assert set(checkpoint.load(path)) == {"experts.up", "experts.up_bias"}
    tensors |= {"experts.up_offset": scales((2, 1, 1))}
    with pytest.raises(CheckpointError, match=r"unknown how that changes 'experts\.up'"):
        checkpoint.load(folder(tmp_path / "m", tensors))


BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}
IN_FLOATS = {
    "a skip list": BNB | {"llm_int8_skip_modules": ["head"]},
    "no group": compressed("channel", "int", targets=["re:.*mlp.*"]),
}


@pytest.mark.parametrize("config", IN_FLOATS.values(), ids=IN_FLOATS.keys())
def test_bare_codes_of_a_layer_in_floats_are_refused(tmp_path, config):
    path = folder(tmp_path / "m", {"head.weight": INT, "head.mask": INT}, config)
    with pytest.raises(CheckpointError, match=r"'head.weight' is I8.* without a scale.*raw\(name"):
        checkpoint.load(path)
    with checkpoint.open(path) as opened:
        assert opened.raw("head.weight").tobytes() == INT.tobytes()
        assert [row.path for row in opened.summary().in_floats] == ["head.mask"]


HARMLESS = ["bias", "input_scale", "k_scale", "output_scale", "act_scales", "gate_bias", "lora_A"]


@pytest.mark.parametrize("name", HARMLESS)
def test_other_tensors_beside_a_weight_are_read(tmp_path, name):
    tensors = {"a.weight": INT, "a.weight_scale": ROWS, f"a.{name}": scales(())}
    assert set(checkpoint.load(folder(tmp_path / "m", tensors))) == {"a.weight", f"a.{name}"}


SGLANG = {
    "w8a8_int8": (INT, ROWS, "weight_scale", {}),
    "w8a8_fp8": (W, ROWS, "weight_scale", {"is_dynamic": True}),
    "blockwise_int8": (INT, scales((1, 2)), "weight_scale_inv", {"weight_block_size": [64, 64]}),
}


@pytest.mark.parametrize("method", SGLANG)
def test_weights_of_sglang_are_read(tmp_path, method):
    w, scale, name, more = SGLANG[method]
    config = {"quant_method": method, **more}
    path = folder(tmp_path / "m", {"a.weight": w, f"a.{name}": scale}, config)
    q = checkpoint.load(path)["a.weight"]
    np.testing.assert_array_equal(np.asarray(q.qvalue), w)
    np.testing.assert_array_equal(np.asarray(q.scale), scale)
    assert "SGLang" in checkpoint.inspect(path).format
