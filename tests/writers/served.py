"""Writes the weights of folders as compressed-tensors decompresses them, so as servers do.

    python tests/writers/served.py FOLDER...

It needs compressed-tensors. Each folder gets `served/model.safetensors`, float32 weights by name.
"""

import json
import pathlib
import sys

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_name
from safetensors.torch import load_file, save_file


def scheme_of(module, config):
    found = [
        group
        for group in config.config_groups.values()
        if any(target == "Linear" or match_name(module, target) for target in group.targets)
    ]
    assert len(found) == 1, f"{module} is in {len(found)} groups"
    return found[0]


def served(folder):
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    tensors, made = load_file(folder / "model.safetensors"), {}
    for name in tensors:
        module = name.rpartition(".")[0]
        if not name.endswith(".weight_scale"):
            continue
        assert not any(match_name(module, pattern) for pattern in config.ignore), module
        part = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{module}.w")}
        if part["weight_scale"].dtype != torch.uint8:  # the product is in the scale's dtype
            part["weight_scale"] = part["weight_scale"].to(torch.float32)
        scheme = scheme_of(module, config)
        form = getattr(scheme.format or config.format, "value", scheme.format or config.format)
        codec = BaseCompressor.get_value_from_registry(form)
        made[f"{module}.weight"] = codec.decompress(part, scheme)["weight"].to(torch.float32)
    (folder / "served").mkdir()
    path = folder / "served" / "model.safetensors"
    save_file({n: w.contiguous() for n, w in made.items()}, path)


for argument in sys.argv[1:]:
    served(pathlib.Path(argument))
