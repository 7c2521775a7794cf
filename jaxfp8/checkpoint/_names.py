"""How tensors that belong to a weight are named, and how lists of modules name what they skip."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container, Iterable

# Of a weight "layer.weight": the other spellings of what stands for each part.
_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "qscale_weight")
_ZERO_POINTS = ("weight_zero_point",)
_INPUT_SCALES = ("input_scale", "scale_input", "qscale_act", "activation_scale")
# torchao writes "layer._weight_qdata" for "layer.weight".
_TORCHAO = re.compile(r"(.*\.)?_([^.]+)_(qdata|scale|zero_point)")
# What says how to read a checkpoint, and is no part of a model.
_MARKERS = ("scaled_fp8", "comfy_quant")
# Parts of formats of fewer bits; a file that has them is refused by their names.
_PACKED = ("weight_packed", "qweight", "weight_scale_2", "weight_blocks", "bitmask")


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


def weight_name(name: str) -> str:
    """The name of a weight from that of its codes."""
    match = _TORCHAO.fullmatch(name)
    return f"{match[1] or ''}{match[2]}" if match and match[3] == "qdata" else name


def scales(weight: str) -> list[str]:
    """The names that the scale of a weight may have."""
    return _parts(weight, _SCALES, ("_scale", "_scale_inv"), "scale")


def zero_points(weight: str) -> list[str]:
    """The names that the zero point of a weight may have."""
    return _parts(weight, _ZERO_POINTS, ("_zero_point",), "zero_point")


def input_scales(weight: str) -> list[str]:
    """The names that the static scale of a layer's input may have."""
    module = module_of(weight)
    if last(weight) == "weight":
        return [_join(module, part) for part in _INPUT_SCALES]
    return [f"{weight}_{part}" for part in _INPUT_SCALES]


def canonical(name: str) -> str:
    """One name for a static scale of activations, whatever the format calls it."""
    return _join(module_of(name), "input_scale") if last(name) in _INPUT_SCALES else name


def is_for_a_weight(name: str) -> bool:
    """Whether this can be nothing else than the scale or zero point of a weight."""
    torchao = _TORCHAO.fullmatch(name)
    is_torchao = torchao is not None and torchao[3] != "qdata"
    return last(name) in (*_SCALES, *_ZERO_POINTS) or is_torchao


def is_marker(name: str) -> bool:
    """Whether a tensor only says how to read others."""
    return last(name) in _MARKERS


def is_packed(name: str) -> bool:
    """Whether a tensor belongs to a format of fewer than 8 bits."""
    return last(name) in _PACKED


def _parts(weight: str, kinds: tuple[str, ...], endings: tuple[str, ...], part: str) -> list[str]:
    module, name = module_of(weight), last(weight)
    of_weight = [_join(module, kind) for kind in kinds] if name == "weight" else []
    own = [weight + ending for ending in endings]
    return list(dict.fromkeys([*of_weight, *own, _join(module, f"_{name}_{part}")]))


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def first(names: Iterable[str], there: Container[str]) -> list[str]:
    """Those of the names that are there."""
    return [name for name in names if name in there]


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of a skip list, or a target, names a module.

    `re:` begins a regular expression, a star makes a pattern of the shell; anything else names a
    module, all that is below it, or the last parts of its name.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return bool(pattern) and f".{pattern}." in f".{module}."
