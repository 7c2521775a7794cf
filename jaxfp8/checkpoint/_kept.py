"""The weights left in floats by `quantize` by default: tables, norms, routers, gates, heads.

Names tell most of them. The shapes tell others: a router has a row for each expert beside it, and a
head outside the layers has a row for each token of the table.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _names

# By kind: patterns of a whole part of a name between dots, anywhere in it.
_PARTS = {
    "a table": r".*embe?d.*|(.*_)?embs?(_.*)?|wte|wpe|relative_attention_bias",
    "a norm": r".*norm.*|ln(_.*|\d*)|.*_ln",
    "a router or a gate": r"gate|(.*_)?routers?|.*_gate|.*_gate_inp(_.*)?",
    "a head": r"(.*_)?heads?|head_.*|cls|(.*_)?classifier|score|qa_outputs|(.*_)?logits",
}
# Names of these outside the layers alone.
_OUTSIDE = {"a table": r"shared", "a head": r"output|output_layer|decoder"}
_LAYER = re.compile(r"(.*\.)?\d+\..*")
_EXPERTS = re.compile(r"(?:(.*?)\.)?experts(?:\.(\d+))?(\..*)?")


def reasons(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """By name of a weight [N, K], why it stays; others are not in it.

    Args:
      shapes: of all tensors of a model.
    """
    modules = {
        _names.module_of(name): shape
        for name, shape in shapes.items()
        if _names.last(name) == "weight" and len(shape) == 2
    }
    kept = {module: _by_name(module) for module in modules}
    tokens = {modules[m][0] for m, why in kept.items() if why.startswith("a table")}
    experts = _experts(shapes)
    for module, shape in modules.items():
        kept[module] = kept[module] or _by_shape(module, shape, tokens, experts)
    return {_names.joined(module, "weight"): why for module, why in kept.items() if why}


def _by_name(module: str) -> str:
    parts = module.split(".")
    last = parts[-1] if not _LAYER.fullmatch(module) else ""
    for kind, pattern in _PARTS.items():
        found = next((part for part in parts if re.fullmatch(pattern, part)), None)
        if found is None and re.fullmatch(_OUTSIDE.get(kind, ""), last) and last:
            found = last
        if found is not None:
            return f"{kind}, by {found!r} in its name"
    return ""


def _by_shape(module: str, shape: Shape, tokens: set[int], experts: Mapping[str, set[int]]) -> str:
    parent = _names.module_of(module)
    if shape[0] == 1:
        return "a gate: it has one row"
    if shape[0] in experts.get(parent, ()) and not _EXPERTS.fullmatch(module):
        return f"a router: it has a row for each of the {shape[0]} experts beside it"
    if shape[0] in tokens and not _LAYER.fullmatch(module):
        return f"a head: it has a row for each of the {shape[0]} tokens"
    return ""


def _experts(shapes: Mapping[str, Shape]) -> dict[str, set[int]]:
    """By the module around experts, how many there are."""
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    counts: dict[str, set[int]] = collections.defaultdict(set)
    for name, shape in shapes.items():
        found = _EXPERTS.fullmatch(name)
        if found and found[2]:
            numbers[found[1] or ""].add(int(found[2]))
        elif found and len(shape) == 3:
            counts[found[1] or ""].add(shape[0])
    for parent, seen in numbers.items():
        counts[parent].add(len(seen))
    return counts
