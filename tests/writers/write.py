"""Writes a small file by each program, and beside it the weights as that program decompresses them.

    python tests/writers/write.py FOLDER

It runs in the environment of requirements.txt. Each case has a folder of its own with the
checkpoint in `model` and float32 weights by name in `expected.safetensors`.
"""

import json
import pathlib
import sys
import traceback

import torch
from safetensors.torch import save_file

SHAPES = {"up_proj": (192, 320), "down_proj": (320, 192)}


def weights(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=draw) / s[1] ** 0.5 for n, s in SHAPES.items()}
    return {name: w.to(dtype) for name, w in made.items()}


def linears(dtype=torch.float32):
    model = torch.nn.ModuleDict({n: torch.nn.Linear(s[1], s[0]) for n, s in SHAPES.items()})
    with torch.no_grad():
        for name, w in weights().items():
            model[name].weight.copy_(w)
    return model.to(dtype)


class Case:
    """The folder of a case."""

    def __init__(self, root, name):
        self.place = root / name.replace(" ", "_")
        self.model = self.place / "model"
        self.model.mkdir(parents=True)

    def save(self, tensors, expected, config=None, metadata=None):
        file = self.model / "model.safetensors"
        save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata)
        if config is not None:
            text = json.dumps({"quantization_config": config})
            (self.model / "config.json").write_text(text)
        self.expect(expected)

    def expect(self, expected):
        wide = {n: w.detach().to(torch.float32).contiguous() for n, w in expected.items()}
        save_file(wide, self.place / "expected.safetensors")


# compressed-tensors, the format of llm-compressor and vLLM

GROUPS = {"strategy": "group", "group_size": 64}
COMPRESSED = {
    "packed": ("pack-quantized", {"type": "int", **GROUPS}),
    "packed zero points": ("pack-quantized", {"type": "int", "symmetric": False, **GROUPS}),
    "packed channel": (
        "pack-quantized",
        {"type": "int", "symmetric": False, "strategy": "channel"},
    ),
    "int": ("int-quantized", {"type": "int", "strategy": "channel"}),
    "int zero points": (
        "int-quantized",
        {"type": "int", "symmetric": False, "strategy": "channel"},
    ),
    "float": ("float-quantized", {"type": "float", "strategy": "channel"}),
    "float tensor": ("float-quantized", {"type": "float", "strategy": "tensor"}),
    "float block": (
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}


def compressed_tensors(case, form, args):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=8, **args), format=form
    )
    compressor = BaseCompressor.load_from_registry(form)
    tensors, expected = {}, {}
    for name, w in weights().items():
        low, high = extremes(w, scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(dict(state), scheme)
        if scheme.weights.symmetric:
            packed.pop("weight_zero_point", None)
        tensors |= {f"{name}.{part}": t for part, t in packed.items()}
        wide = compressor.decompress(dict(packed), scheme)["weight"]
        expected[f"{name}.weight"] = wide
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed"
    )
    case.save(tensors, expected, json.loads(config.model_dump_json()))


def extremes(w, args):
    """The least and the largest value for each scale."""
    n, k = w.shape
    if args.strategy == "tensor":
        return w.min().reshape(1), w.max().reshape(1)
    rows, depth = args.block_structure or (1, args.group_size or k)
    pad = torch.nn.functional.pad(w, (0, -k % depth, 0, -n % rows))
    tiles = pad.reshape(pad.shape[0] // rows, rows, pad.shape[1] // depth, depth)
    return tiles.amin((1, 3)), tiles.amax((1, 3))


# torchao


def torchao(case, config, saved):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    model = linears(torch.bfloat16)
    quantize_(model, config)
    state = {n: p.data if hasattr(p, "data") else p for n, p in model.state_dict().items()}
    expected = {n: t.dequantize() for n, t in state.items() if hasattr(t, "qdata")}
    tensors, metadata = flatten_tensor_state_dict(state)
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": saved}}}
    case.save(tensors, expected, said, metadata)


def torchao_cases():
    from torchao import quantization as q

    return {
        "int8 weight only": q.Int8WeightOnlyConfig(),
        "int8 dynamic": q.Int8DynamicActivationInt8WeightConfig(),
        "float8 weight only": q.Float8WeightOnlyConfig(),
        "float8 row": q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerRow()),
        "float8 tensor": q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerTensor()),
        "intx groups": q.IntxWeightOnlyConfig(torch.int8, q.PerGroup(64)),
    }


# optimum-quanto, bitsandbytes


def quanto(case, kind):
    import optimum.quanto as q

    model = linears()
    q.quantize(model, weights=kind)
    q.freeze(model)
    expected = {f"{n}.weight": m.weight.dequantize() for n, m in model.items()}
    case.save(model.state_dict(), expected)


def bitsandbytes(case):
    import bitsandbytes as bnb

    made = {}
    expected = {}
    for name, w in weights(torch.float16).items():
        layer = bnb.nn.Linear8bitLt(*reversed(w.shape), bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(w, requires_grad=False, has_fp16_weights=False)
        layer = layer.to("cpu")
        if layer.weight.dtype != torch.int8:
            codes, scb, _ = bnb.functional.int8_vectorwise_quant(w)
            layer.weight.data, layer.weight.SCB = codes, scb
        made |= {f"{name}.{part}": t for part, t in layer.state_dict().items()}
        wide = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        expected[f"{name}.weight"] = wide
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    case.save(made, expected, said)


# ModelOpt, by a model of transformers

MODELOPT = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8 channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8 blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8 weight only": "INT8_WEIGHT_ONLY_CFG",
    "int8": "INT8_DEFAULT_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "smoothed": "INT8_SMOOTHQUANT_CFG",
}


def modelopt(case, name):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.arange(32).reshape(1, 32)
    mtq.quantize(model, getattr(mtq, name), lambda m: m(tokens))
    expected = {}
    for path, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled and not path.endswith("lm_head"):
            expected[f"{path}.weight"] = quantizer(module.weight.float())
    case.expect(expected)
    export_hf_checkpoint(model, export_dir=case.model)


def main(root):
    jobs = {f"compressed {n}": (compressed_tensors, *a) for n, a in COMPRESSED.items()}
    jobs |= {f"torchao {n}": (torchao, c, type(c).__name__) for n, c in torchao_cases().items()}
    jobs |= {f"quanto {kind}": (quanto, kind) for kind in ("qint8", "qfloat8")}
    jobs["bitsandbytes"] = (bitsandbytes,)
    jobs |= {f"modelopt {n}": (modelopt, c) for n, c in MODELOPT.items()}
    failed = []
    for name, (job, *args) in jobs.items():
        try:
            job(Case(root, name), *args)
            print("wrote", name, flush=True)
        except (RuntimeError, AssertionError, NotImplementedError):  # it needs a GPU
            traceback.print_exc()
            failed.append(name)
    print("not written:", ", ".join(failed) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
