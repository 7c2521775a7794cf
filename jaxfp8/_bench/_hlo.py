"""Bytes read and written by each instruction of a compiled program, from its text.

Operands and results count once each. Results without a reader, such as scratch memory, do not
count. An update in place counts its new values twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_IN_PLACE = "dynamic-update-slice"


class _Instruction(NamedTuple):
    name: str
    arrays: tuple[int, ...]  # bytes of each array of the result
    opcode: str
    operands: tuple[str, ...]
    attributes: str


def moved(text: str) -> dict[str, int]:
    """Bytes by the name of an instruction."""
    program = {one.name: one for one in _instructions(text)}
    read = {
        (one.operands[0], int(index[1]))
        for one in program.values()
        if one.opcode == "get-tuple-element" and (index := _INDEX.search(one.attributes))
    }
    return {name: _moved(one, program, read) for name, one in program.items()}


def _moved(one: _Instruction, program: dict[str, _Instruction], read: set[tuple[str, int]]) -> int:
    results = [
        size
        for index, size in enumerate(one.arrays)
        if len(one.arrays) == 1 or (one.name, index) in read
    ]
    operands = [sum(program[name].arrays) for name in one.operands if name in program]
    if _IN_PLACE in one.name or one.opcode == _IN_PLACE:
        return 2 * sum(size for size in operands if size not in results)
    return sum(operands) + sum(results)


def _instructions(text: str) -> Iterator[_Instruction]:
    for line in text.splitlines():
        if not (head := _LINE.match(line)):
            continue
        kind, rest = _split(line[head.end() :])
        opcode, parenthesis, rest = rest.partition("(")
        if not parenthesis:
            continue
        operands, attributes = _split(parenthesis + rest)
        yield _Instruction(
            name=head[1],
            arrays=tuple(_sizes(kind)),
            opcode=opcode.strip(),
            operands=tuple(_NAME.findall(operands)),
            attributes=attributes,
        )


def _split(text: str) -> tuple[str, str]:
    """The content of the leading parentheses of a text, or its first word; and the rest."""
    if not text.startswith("("):
        first, _, rest = text.partition(" ")
        return first, rest
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _sizes(kind: str) -> Sequence[int]:
    """Bytes of the arrays of a type."""
    return [
        math.prod(map(int, filter(None, shape.split(",")))) * max(int(bits or 8) // 8, 1)
        for _, bits, shape in _ARRAY.findall(kind)
    ]
