"""Bytes read and written by each instruction of a compiled program, from its text.

Operands and results count once each. Results without a reader, such as scratch memory, do not
count. An update in place counts its new values twice.
"""

from __future__ import annotations

import math
import re

_NESTED = r"(?:[^()]|\([^()]*\))*"  # text with pairs of parentheses, one inside another at most
# Name, type, operation, operands, and the number of the element that it takes.
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?([\w.\-]+) = (\({_NESTED}\)|\S+) ([\w\-]+)\(({_NESTED})\)(?:, index=(\d+))?",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_IN_PLACE = "dynamic-update-slice"


def moved(text: str) -> dict[str, int]:
    """Bytes by the name of an instruction."""
    program = [one.groups() for one in _INSTRUCTION.finditer(text)]
    sizes = {name: _sizes(kind) for name, kind, *_ in program}
    read = {(_NAME.findall(given)[0], int(i)) for *_, given, i in program if i is not None}
    nbytes = {}
    for name, _, operation, operands, _ in program:
        given = [sum(sizes[one]) for one in _NAME.findall(operands) if one in sizes]
        own = sizes[name]
        kept = [s for i, s in enumerate(own) if len(own) == 1 or (name, i) in read]
        new = 2 * sum(size for size in given if size not in kept)
        is_in_place = _IN_PLACE in f"{name} {operation}"
        nbytes[name] = new if is_in_place else sum(given) + sum(kept)
    return nbytes


def _sizes(kind: str) -> list[int]:
    """Bytes of the arrays of a type."""
    shapes = [(bits, filter(None, shape.split(","))) for bits, shape in _ARRAY.findall(kind)]
    return [math.prod(map(int, shape)) * max(int(bits or 8) // 8, 1) for bits, shape in shapes]
