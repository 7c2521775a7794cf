"""Bytes of a compiled program, from its text: moved by each instruction, and sent by collectives.

Operands and results count once each. Results without a reader, such as scratch memory, do not
count. An update in place counts its new values twice.
"""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

_NESTED = r"(?:[^()]|\([^()]*\))*"  # text with pairs of parentheses, one inside another at most
# Name, type, operation, operands, and the number of the element that it takes.
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?([\w.\-]+) = (\({_NESTED}\)|\S+) ([\w\-]+)\(({_NESTED})\)(?:, index=(\d+))?",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_FLOAT = re.compile(r"\bb?f(?:16|32|64)(?=\[)")
# The start of a computation, and the computations that an instruction runs.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_RUNS = re.compile(r"(?:body|to_apply|calls|branch_computations)=\{?((?:(?:, )?%[\w.\-]+)+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Bytes sent by a collective, as factors of its operand and of its result: the difference for those
# that gather or scatter. An all-reduce is a reduce-scatter and an all-gather.
_SHARES = {
    "all-gather": (-1, 1),
    "reduce-scatter": (1, -1),
    "all-reduce": (1, 1),
    "all-to-all": (1, 0),
    "collective-permute": (1, 0),
    "collective-broadcast": (1, 0),
}
# These hold their operands in their results, too.
_WITH_OPERANDS = ("all-gather-start", "reduce-scatter-start")
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


class Sent(NamedTuple):
    """A collective: its kind, and the bytes that each device sends."""

    kind: str
    bytes: int


def sent(text: str, float_bytes: int | None = None) -> list[Sent]:
    """The collectives of a program, each as often as it runs.

    A loop without a known number of turns counts once.

    Args:
      text: the compiled program.
      float_bytes: bytes of every float wider than 8 bits; by default those of its type.
    """
    text = text if float_bytes is None else _FLOAT.sub(f"f{8 * float_bytes}", text)
    sizes = {one[1]: _sizes(one[2]) for one in _INSTRUCTION.finditer(text)}
    runs: collections.Counter[str] = collections.Counter()
    found: list[Sent] = []
    for name, lines in reversed(_computations(text)):  # callers stand behind what they call
        count = runs[name] if name in runs else int(lines[0].startswith("ENTRY"))
        for line in lines:
            turns = _TRIPS.search(line)
            for called in _NAME.findall(" ".join(_RUNS.findall(line))):
                runs[called] += count * int(turns[1] if turns else 1)
            if (one := _INSTRUCTION.match(line)) and one[3].removesuffix("-start") in _SHARES:
                found += [_collective(one[2], one[3], one[4], sizes)] * count
    return found


def _computations(text: str) -> list[tuple[str, list[str]]]:
    """The computations of a program: names and lines."""
    named: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            named.append((start[1], []))
        if named:
            named[-1][1].append(line)
    return named


def _collective(kind: str, operation: str, operands: str, sizes: dict[str, list[int]]) -> Sent:
    """The bytes of a collective."""
    name = operation.removesuffix("-start")
    own = [sum(sizes.get(one, [])) for one in _NAME.findall(operands)]
    result = _sizes(kind)[len(own) if operation in _WITH_OPERANDS else 0 :]
    of_operand, of_result = _SHARES[name]
    return Sent(name, of_operand * sum(own) + of_result * sum(result))
