"""The names of a weight's tensors, and the patterns in lists of skipped modules."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container, Iterable

# Spellings of the last part of a name next to "layer.weight".
_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "qscale_weight")
_ZERO_POINTS = ("weight_zero_point",)
_INPUT_SCALES = ("input_scale", "scale_input", "qscale_act", "activation_scale")
# torchao writes "layer._weight_qdata" for "layer.weight".
_TORCHAO = re.compile(r"(.*\.)?_([^.]+)_(qdata|scale|zero_point)")
# Marks of how to read a checkpoint, not parts of a model.
_MARKERS = ("scaled_fp8", "comfy_quant")
# Parts of formats of fewer bits; a file with one is refused, by these names.
_PACKED = ("weight_packed", "qweight", "weight_scale_2", "weight_blocks", "bitmask")


def module_of(name: str) -> str:
    """The module of a tensor."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


def weight_name(name: str) -> str:
    """The name of a weight, from the name of its codes."""
    match = _TORCHAO.fullmatch(name)
    return f"{match[1] or ''}{match[2]}" if match and match[3] == "qdata" else name


def scales(weight: str) -> list[str]:
    """The possible names of the scale of a weight."""
    return _parts(weight, _SCALES, ("_scale", "_scale_inv"), "scale")


def zero_points(weight: str) -> list[str]:
    """The possible names of the zero point of a weight."""
    return _parts(weight, _ZERO_POINTS, ("_zero_point",), "zero_point")


def input_scales(weight: str) -> list[str]:
    """The possible names of the static scale of a layer's input."""
    module = module_of(weight)
    if last(weight) == "weight":
        return [_join(module, part) for part in _INPUT_SCALES]
    return [f"{weight}_{part}" for part in _INPUT_SCALES]


def canonical(name: str) -> str:
    """One name for a static scale of activations in all formats."""
    return _join(module_of(name), "input_scale") if last(name) in _INPUT_SCALES else name


def is_for_a_weight(name: str) -> bool:
    """Whether the name can only mean the scale or zero point of a weight."""
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
    """The names present in `there`."""
    return [name for name in names if name in there]


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of a skip list, or a target, names a module.

    `re:` begins a regular expression, a star makes a pattern of the shell; anything else names a
    module, all modules below it, or the last parts of its name.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return bool(pattern) and f".{pattern}." in f".{module}."
