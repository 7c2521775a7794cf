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
      certain: whether it can mean nothing else. Else the tensor is an array of its own, unless the
        weight is in 8 bits and has no other of its role.
      decode: the reader of its values, as `_decode` names it.
    """

    role: str
    weight: str | None
    writer: str = ""
    certain: bool = True
    decode: str = ""


# Beside "layer.weight".
_BESIDE_WEIGHT: dict[str, tuple[str, str, bool, str]] = {
    "weight_scale": (SCALE, "", True, ""),
    "weight_scale_inv": (SCALE, "DeepSeek", True, ""),
    "scale": (SCALE, "DeepSeek", False, ""),
    "scale_weight": (SCALE, "ComfyUI", True, ""),
    "qscale_weight": (SCALE, "Mistral", True, ""),
    "SCB": (SCALE, "bitsandbytes", True, "over 127"),
    "weight_zero_point": (ZERO_POINT, "", True, ""),
    "weight_packed": (CODES, "compressed-tensors", True, "packed"),
    "weight_shape": (SHAPE, "compressed-tensors", True, ""),
    "weight_g_idx": (ORDER, "compressed-tensors", True, ""),
    "weight_format": (LAYOUT, "bitsandbytes", True, ""),
    "pre_quant_scale": (SMOOTHING, "ModelOpt", True, ""),
    "input_scale": (INPUT_SCALE, "", False, ""),
    "activation_scale": (INPUT_SCALE, "", False, ""),
    "scale_input": (INPUT_SCALE, "ComfyUI", False, ""),
    "qscale_act": (INPUT_SCALE, "Mistral", False, ""),
    "output_scale": (OUTPUT_SCALE, "", False, ""),
    "input_zero_point": (INPUT_ZERO_POINT, "", False, ""),
    "weight_scale_2": (PART_OF_FEWER_BITS, "ModelOpt", True, ""),
    "weight_global_scale": (PART_OF_FEWER_BITS, "compressed-tensors", True, ""),
    "weight_blocks": (PART_OF_FEWER_BITS, "", True, ""),
    "bitmask": (PART_OF_FEWER_BITS, "compressed-tensors", True, ""),
    "qweight": (PART_OF_FEWER_BITS, "GPTQ or AWQ", True, ""),
    "qzeros": (PART_OF_FEWER_BITS, "GPTQ or AWQ", True, ""),
}
# Beside "experts.up_proj", by the ending behind the name of the weight. The first one counts.
_ENDINGS: tuple[tuple[str, str, str, str], ...] = (
    ("_input_scale", INPUT_SCALE, "", ""),
    ("_activation_scale", INPUT_SCALE, "", ""),
    ("_scale_inv", SCALE, "DeepSeek", ""),
    ("_scale", SCALE, "", ""),
    ("_zero_point", ZERO_POINT, "", ""),
    ("_packed", CODES, "compressed-tensors", "packed"),
    ("_shape", SHAPE, "compressed-tensors", ""),
    ("_g_idx", ORDER, "compressed-tensors", ""),
    (":qdata", CODES, "torchao", ""),
    (":scale", SCALE, "torchao", ""),
    (":zero_point", ZERO_POINT, "torchao", ""),
)
# torchao writes "layer._weight_qdata" for "layer.weight".
_TORCHAO = re.compile(
    r"_(.+?)_(qdata|scale|zero_point|act_quant_scale|act_quant_zero_point|act_pre_scale)"
)
_TORCHAO_ROLES = {
    "qdata": CODES,
    "scale": SCALE,
    "zero_point": ZERO_POINT,
    "act_quant_scale": INPUT_SCALE,
    "act_quant_zero_point": INPUT_ZERO_POINT,
    "act_pre_scale": SMOOTHING,
}
# optimum-quanto writes "layer.weight._data" for "layer.weight".
_QUANTO = {"_data": CODES, "_scale": SCALE, "_shift": PART_OF_FEWER_BITS}
_MARKS = ("scaled_fp8", "comfy_quant")
_OF_CACHE = re.compile(r"(.+_)?(q|k|v|kv|qk|kv_cache|prob|prob_output)_scale")
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
    if last in _BESIDE_WEIGHT:
        role, writer, certain, decode = _BESIDE_WEIGHT[last]
        return Kind(role, "weight", writer, certain, decode)
    if last in _QUANTO:
        return Kind(_QUANTO[last], None, "optimum-quanto")
    if last in _MARKS:
        return Kind(MARK, last, "ComfyUI")
    if match := _TORCHAO.fullmatch(last):
        role = _TORCHAO_ROLES[match[2]]
        return Kind(role, match[1], "torchao", role not in OF_ACTIVATIONS)
    for ending, role, writer, decode in _ENDINGS:
        if last.endswith(ending) and last != ending:
            return Kind(role, last.removesuffix(ending), writer, role == CODES, decode)
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
    """One name for a static scale of activations in all formats."""
    module, found = module_of(name), kind(last(name))
    if found.role != INPUT_SCALE or found.weight != "weight":
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
    return _OF_CACHE.fullmatch(last(name)) is not None


def looks_like_scale_of(name: str, other: str) -> bool:
    """Whether `other` looks like a scale, or another part, of the tensor `name`.

    The formats are unknown. Bare codes beside such a tensor are not numbers of a model.
    """
    own, ending = last(name), last(other)
    if is_for_cache(other) or kind(ending).role in OF_ACTIVATIONS:
        return False
    if other.startswith(f"{name}."):
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
