"""What changes the meaning of a weight is read or refused by name, never read as other numbers."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint.files import BNB, E4M3, codes, compressed, folder, modelopt, packed, scales, words

from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

N, K = 150, 200
W, W8 = codes((N, K)), codes((N, K), np.int8)
ROWS, GROUPS = scales((N, 1)), scales((N, 4))
ORDER = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 50)).astype(np.int32)
# Tensors, config, the words of the error.
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
        words(W8) | {"l.weight_packed": packed(W8)[:, :25], "l.weight_scale": ROWS},
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
    "an int8 weight beside a cache alone": (
        {"l.weight": W8, "l.k_scale": scales(())},
        modelopt(None, kv_cache_quant_algo="FP8"),
        "no group of the config",
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


@pytest.mark.parametrize("ending", ["amax", "weight_amax", "weight_quantizer._amax"])
def test_unscaled_takes_no_scale_of_stacked_experts_away(tmp_path, ending):
    path = folder(tmp_path / "m", {"e.up": codes((2, 8, 4)), f"e.up_{ending}": scales(())})
    with pytest.raises(CheckpointError, match=f"'e.up_{ending}' looks like one"):
        checkpoint.load(path, unscaled=True)


def test_bytes_beside_other_scales_are_arrays(tmp_path):
    tensors = {"attn.mask": codes((4, 4), np.uint8), "attn.k_scale": scales(1)}
    tensors |= {"norm.scale": scales(4), "norm.weight": scales(4), "logit_scale": scales(())}
    assert set(checkpoint.load(folder(tmp_path / "m", tensors))) == set(tensors)
