"""The names of a weight's tensors: one table for the spellings of all writers."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

# What a tensor is to its weight.
CODES, SCALE, ZERO_POINT, INPUT_SCALE = "codes", "scale", "zero point", "input scale"
OUTPUT_SCALE = "output scale"
SHAPE, ORDER, LAYOUT, SMOOTHING = "shape", "order of groups", "layout", "smoothing"
PART_OF_FEWER_BITS, MARK, INPUT_ZERO_POINT = "part of fewer bits", "mark", "input zero point"


# Roles of tensors that no weight needs, and what each is.
OF_ACTIVATIONS = {
    INPUT_SCALE: "a static scale of activations",
    INPUT_ZERO_POINT: "a static zero point of activations",
    OUTPUT_SCALE: "a static scale of an output",
}


class Kind(NamedTuple):
    """The meaning of the last part of a tensor's name.

    Attributes:
      role: what the tensor is to its weight.
      weight: the last part of the weight's name; None if the weight is named as the module.
      writer: the program that spells it so; "" for several.
      certain: whether the name has this meaning alone. A tensor of an uncertain name counts if the
        weight is in 8 bits and has no other tensor of this role; else it is an array of its own.
      decode: the reader of its values, as `_decode` names it.
    """

    role: str
    weight: str | None
    writer: str = ""
    certain: bool = True
    decode: str = ""


# Modules of ModelOpt, beside "experts.up_proj": "experts.up_proj_weight_quantizer._amax".
OF_QUANTIZER = "_weight_quantizer"

# Beside "layer.weight"; optimum-quanto writes "layer.weight._data" for it.
_WHOLE: dict[str, Kind] = {
    "weight_scale": Kind(SCALE, "weight"),
    "weight_scale_inv": Kind(SCALE, "weight", "DeepSeek"),
    "scale": Kind(SCALE, "weight", "DeepSeek", False),
    "scale_weight": Kind(SCALE, "weight", "ComfyUI"),
    "qscale_weight": Kind(SCALE, "weight", "Mistral"),
    "SCB": Kind(SCALE, "weight", "bitsandbytes", True, "over 127"),
    "weight_zero_point": Kind(ZERO_POINT, "weight"),
    "weight_packed": Kind(CODES, "weight", "compressed-tensors", True, "packed"),
    "weight_shape": Kind(SHAPE, "weight", "compressed-tensors"),
    "weight_g_idx": Kind(ORDER, "weight", "compressed-tensors"),
    "weight_format": Kind(LAYOUT, "weight", "bitsandbytes"),
    "pre_quant_scale": Kind(SMOOTHING, "weight", "ModelOpt"),
    "input_scale": Kind(INPUT_SCALE, "weight", "", False),
    "activation_scale": Kind(INPUT_SCALE, "weight", "", False),
    "scale_input": Kind(INPUT_SCALE, "weight", "ComfyUI", False),
    "qscale_act": Kind(INPUT_SCALE, "weight", "Mistral", False),
    "output_scale": Kind(OUTPUT_SCALE, "weight", "", False),
    "input_zero_point": Kind(INPUT_ZERO_POINT, "weight", "", False),
    "weight_scale_2": Kind(PART_OF_FEWER_BITS, "weight", "ModelOpt"),
    "weight_global_scale": Kind(PART_OF_FEWER_BITS, "weight", "compressed-tensors"),
    "weight_blocks": Kind(PART_OF_FEWER_BITS, "weight"),
    "bitmask": Kind(PART_OF_FEWER_BITS, "weight", "compressed-tensors"),
    "qweight": Kind(PART_OF_FEWER_BITS, "weight", "GPTQ or AWQ"),
    "qzeros": Kind(PART_OF_FEWER_BITS, "weight", "GPTQ or AWQ"),
    "_data": Kind(CODES, None, "optimum-quanto"),
    "_scale": Kind(SCALE, None, "optimum-quanto"),
    "_shift": Kind(PART_OF_FEWER_BITS, None, "optimum-quanto"),
    "scaled_fp8": Kind(MARK, "scaled_fp8", "ComfyUI"),
    "comfy_quant": Kind(MARK, "comfy_quant", "ComfyUI"),
}
# Behind or around the name of a weight, as in "experts.up_proj_scale". torchao writes
# "layer._weight_qdata" for "layer.weight". The first pattern counts.
_AROUND: tuple[tuple[str, Kind], ...] = (
    (r"_(.+?)_qdata", Kind(CODES, "", "torchao")),
    (r"_(.+?)_act_quant_scale", Kind(INPUT_SCALE, "", "torchao", False)),
    (r"_(.+?)_act_quant_zero_point", Kind(INPUT_ZERO_POINT, "", "torchao", False)),
    (r"_(.+?)_act_pre_scale", Kind(SMOOTHING, "", "torchao")),
    (r"_(.+?)_scale", Kind(SCALE, "", "torchao")),
    (r"_(.+?)_zero_point", Kind(ZERO_POINT, "", "torchao")),
    (r"(.+)_input_scale", Kind(INPUT_SCALE, "", "", False)),
    (r"(.+)_activation_scale", Kind(INPUT_SCALE, "", "", False)),
    (r"(.+)_scale_inv", Kind(SCALE, "", "DeepSeek", False)),
    (r"(.+)_scale", Kind(SCALE, "", "", False)),
    (r"(.+)_zero_point", Kind(ZERO_POINT, "", "", False)),
    (r"(.+)_packed", Kind(CODES, "", "compressed-tensors", True, "packed")),
    (r"(.+)_shape", Kind(SHAPE, "", "compressed-tensors", False)),
    (r"(.+)_g_idx", Kind(ORDER, "", "compressed-tensors", False)),
    (r"(.+):qdata", Kind(CODES, "", "torchao")),
    (r"(.+):scale", Kind(SCALE, "", "torchao", False)),
    (r"(.+):zero_point", Kind(ZERO_POINT, "", "torchao", False)),
)
# Mistral names the module for these, as in "attention.kv_fake_quantizer.qscale_act".
_OF_CACHE = re.compile(
    r"(.+[._])?((q|k|v|kv|qk|kv_cache|prob|prob_output)_scale|(q|k|v|kv)_fake_quantizer\.qscale_act)"
)
_TABLE = re.compile(r".*embed.*|wte|wpe")
# Words in the names of scales, zero points and tables, of formats known here or not.
_SCALE_WORD = re.compile(
    r"s|[wsqd]?(scb?|scl|scales?|scaling|factors?|absmax|amax|q?zeros?|zp|offsets?|shifts?|quant|"
    r"codebooks?|lut|idx|perm|biases|step|state)"
)
# Names of tensors that change a weight, whatever its scale. Those of inputs do not.
_CHANGE = re.compile(
    r"weights?_.+|(?!input|act|output).*(scal|scl|zero|zp|offset|shift|idx|perm|outlier|amax).*"
    r"|.*(smooth|hadamard).*"
)
# Who writes such a part, for formats that are not read.
_SIGNS = {
    "absmax": "bitsandbytes, 4 bits",
    "quant_map": "bitsandbytes, 4 bits",
    "biases": "MLX",
    "scales": "MLX or GPTQ",
    "weight_scales": "EETQ",
    "weights_scaling_factor": "TensorRT-LLM",
    "deq_scale": "msModelSlim of Ascend",
}
_PARTING = re.compile(r"[._:]+")


@functools.lru_cache(maxsize=1 << 14)
def kind(last: str) -> Kind:
    """The meaning of the last part of a name."""
    if last in _WHOLE:
        return _WHOLE[last]
    for pattern, found in _AROUND:
        if match := re.fullmatch(pattern, last):
            return found._replace(weight=match[1])
    return Kind(CODES, last)


def joined(module: str, last: str) -> str:
    """The name of a part of a module; the module may be ""."""
    return f"{module}.{last}" if module else last


def module_of(name: str) -> str:
    """The module of a tensor."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


def canonical(name: str) -> str:
    """One name for the static scale of a layer's activations in all formats."""
    module, found = module_of(name), kind(last(name))
    if found.role != INPUT_SCALE or found.weight != "weight" or is_for_cache(name):
        return name
    return joined(module, "input_scale")


@functools.lru_cache(maxsize=1 << 14)
def _is_table(last: str) -> bool:
    return _TABLE.fullmatch(last) is not None


def is_table(module: str) -> bool:
    """Whether a module is named as a table of embeddings."""
    return _is_table(last(module))


def is_for_cache(name: str) -> bool:
    """Whether a tensor is a scale of attention or of its cache."""
    return _OF_CACHE.fullmatch(name) is not None


def looks_like_scale_of(name: str, other: str) -> bool:
    """Whether `other` looks like a scale, or another part, of the tensor `name`.

    The formats are unknown. Bare codes beside such a tensor are not numbers of a model.
    """
    own, ending = last(name), last(other)
    if is_for_cache(other) or kind(ending).role in OF_ACTIVATIONS:
        return False
    if other.startswith((f"{name}.", f"{name}{OF_QUANTIZER}.")):
        return True
    words = _PARTING.split(ending.lower().strip("._:"))
    rest = [word for word in words if not _SCALE_WORD.fullmatch(word)]
    if module_of(other) != module_of(name) or len(rest) == len(words):
        return False
    if "weight" in last(module_of(name)):  # of "weight._data"
        return True
    start = "_".join(rest).removesuffix("_weight")  # of "up_proj", "up_proj_weight_amax"
    return "weight" in own or own.lower().strip("_").startswith(start)


@functools.lru_cache(maxsize=1 << 14)
def may_change(ending: str) -> bool:
    """Whether a tensor of this last name and of unknown meaning may change a weight beside it."""
    is_known = kind(ending).role in OF_ACTIVATIONS or _OF_CACHE.fullmatch(ending) is not None
    return not is_known and _CHANGE.fullmatch(ending) is not None


def sign(name: str, scale: str) -> str:
    """The writer of codes and a scale of an unread format; "" if it may be any."""
    if name.endswith("_blocks"):
        return "MXFP4, as gpt-oss has it"
    if last(name) == "W_q":
        return "HQQ"
    return _SIGNS.get(last(scale), "")


def spellings(weight: str) -> str:
    """The usual names of a weight's scale, for an error."""
    names = [f"{weight}_scale", f"{weight}_scale_inv"]
    if last(weight) == "weight":
        module = weight.removesuffix("weight")
        names += [f"{module}scale_weight", f"{module}SCB"]
    return " or ".join(map(repr, names))
