"""The header of a GGUF file: parsed strictly, before any of the data is touched.

A file is a magic number, a version, two counts, metadata as typed values by key, a record for each
tensor, and the data. Sizes are little-endian. A record has a name, sizes with the innermost axis
first, a type and an offset. Each tensor begins at a multiple of the alignment, and the tensors
follow each other without other gaps: llama.cpp reads no other files.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxfp8.checkpoint._errors import CheckpointError, refuse

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32
_FETCH = "fetch the file again"
# A vocabulary of 256 k tokens takes some 12 MB. A header past this limit counts as damaged.
_MOST_BYTES = 1 << 28
_MOST_ALIGNMENT = 1 << 16
# Limits of ggml: bytes of a tensor's name, and axes.
_MOST_NAME, _MOST_AXES = 63, 4
_MOST_KEY = (1 << 16) - 1
# Read at once; most headers without a vocabulary fit.
_STEP = 1 << 20
# Longer arrays are vocabularies. Nothing here reads them.
_MOST_KEPT = 1024
# The least bytes of a metadata value with its key, and of a tensor's record.
_LEAST_VALUE, _LEAST_RECORD = 8 + 4 + 1, 8 + 4 + 4 + 8

_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
# By ggml's number: name, values of a block, bytes of a block.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor.

    Attributes:
      name: its name in the file.
      kind: ggml's name of its type.
      shape: its sizes, outermost first.
      start, stop: the range of its bytes in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


Metadata = dict[str, Any]


def parse(
    file: str, read: Callable[[int, int], bytes], size: int
) -> tuple[Metadata, tuple[Tensor, ...]]:
    """Metadata and tensors of a file of `size` bytes.

    Args:
      file: its path.
      read: gives so many bytes from a place of the file, or fewer at its end.
      size: bytes of the file.

    Returns:
      Metadata by key, without long arrays, and the tensors in the order of their data.

    Raises:
      CheckpointError: it is not well formed, or its tensors do not fill the data.
    """
    source = _Source(file, read, size)
    source.take(len(MAGIC), "the magic number")
    version = source.number("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        what = f"{swapped}, big-endian" if swapped in _VERSIONS else str(version)
        remedy = "convert the model with a newer llama.cpp, on a little-endian machine"
        refuse(file, "", f"the GGUF version is {what}", "2 or 3 is read", remedy)
    tensors, values = source.number("Q", "the counts"), source.number("Q", "the counts")
    source.check_count(tensors, _LEAST_RECORD, "tensors")
    source.check_count(values, _LEAST_VALUE, "metadata values")
    metadata = _metadata(source, values)
    alignment = _alignment(file, metadata)
    records = [_record(source) for _ in range(tensors)]
    return metadata, _placed(file, records, _padded(source.at, alignment), alignment, size)


class _Source:
    """The bytes of a header in order. Each request is compared with the size of the file."""

    def __init__(self, file: str, read: Callable[[int, int], bytes], size: int) -> None:
        self.file, self.at = file, 0
        self._read, self._size = read, size
        self._part, self._begin = b"", 0

    def take(self, count: int, what: str) -> bytes:
        """The next bytes."""
        stop = self.at + count
        self._check(stop, what)
        if stop > self._begin + len(self._part):
            self._begin, self._part = self.at, self._read(self.at, max(count, _STEP))
        found = self._part[self.at - self._begin : stop - self._begin]
        if len(found) < count:
            self._short(stop, what, self._begin + len(self._part))
        self.at = stop
        return found

    def skip(self, count: int, what: str) -> None:
        """Leave out the next bytes."""
        self._check(self.at + count, what)
        self.at += count

    def skip_strings(self, count: int, what: str) -> None:
        """Leave out so many strings; a vocabulary has some 100,000."""
        while count:
            self.skip(self.number("Q", what), what)
            count -= 1
            at, last = self.at - self._begin, len(self._part) - _LENGTH.size
            while count and at <= last:
                at += _LENGTH.size + _LENGTH.unpack_from(self._part, at)[0]
                count -= 1
            self.skip(self._begin + at - self.at, what)

    def number(self, code: str, what: str) -> Any:
        """The next number, by its code in `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, most: int, what: str) -> str:
        """The next string, of at most so many bytes."""
        length = self.number("Q", what)
        if length > most:
            refuse(self.file, "", f"{what} has {length} bytes", f"at most {most} fit", _FETCH)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"{what} is no UTF-8"
            raise CheckpointError(self.file, "", got, "text is needed", _FETCH) from error

    def check_count(self, count: int, least: int, what: str) -> None:
        """Refuses a count of things of at least so many bytes each, if the file is too short."""
        if count * least > self._size - self.at:
            needs = f"the file has {self._size} bytes, too few for them"
            refuse(self.file, "", f"the header announces {count} {what}", needs, _FETCH)

    def _check(self, stop: int, what: str) -> None:
        if stop > self._size:
            self._short(stop, what, self._size)
        if stop > _MOST_BYTES:
            needs = f"a header has at most {_MOST_BYTES} bytes"
            refuse(self.file, "", f"{what} ends at byte {stop}", needs, _FETCH)

    def _short(self, stop: int, what: str, end: int) -> NoReturn:
        needs = f"the file ends at byte {end}"
        refuse(self.file, "", f"{what} ends at byte {stop}", needs, _FETCH)


def _metadata(source: _Source, count: int) -> Metadata:
    found: Metadata = {}
    for _ in range(count):
        key = source.text(_MOST_KEY, "a key of the metadata")
        if key in found:
            text = f"the metadata has {key[:80]!r} twice"
            refuse(source.file, "", text, "a key is there once", _FETCH)
        found[key] = _value(source, source.number("I", "a type"), f"the value of {key[:80]!r}")
    return found


def _value(source: _Source, kind: int, what: str) -> Any:
    """A value of the metadata; None for an array of strings, and for a long one."""
    if kind in _NUMBERS:
        return source.number(_NUMBERS[kind], what)
    if kind == _STRING:
        return source.take(source.number("Q", what), what).decode("utf-8", "replace")
    if kind != _ARRAY:
        refuse(source.file, "", f"{what} has type {kind}", "types 0 to 12 are known", _FETCH)
    inner, count = source.number("I", what), source.number("Q", what)
    if inner == _STRING:
        source.check_count(count, _LENGTH.size, "strings")
        source.skip_strings(count, what)
        return None
    if inner not in _NUMBERS:
        needs = "numbers and strings are read"
        refuse(source.file, "", f"{what} is an array of type {inner}", needs, _FETCH)
    code = f"{count}{_NUMBERS[inner]}" if count <= _MOST_KEPT else ""
    if not code:
        source.skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"), what)
        return None
    return list(struct.unpack(f"<{code}", source.take(struct.calcsize(f"<{code}"), what)))


def _alignment(file: str, metadata: Metadata) -> int:
    found = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
    if type(found) is int and 0 < found <= _MOST_ALIGNMENT and not found & (found - 1):
        return found
    needs = f"a power of 2 of at most {_MOST_ALIGNMENT} is needed"
    refuse(file, "", f"{_ALIGNMENT_KEY} is {str(found)[:40]}", needs, _FETCH)


def _record(source: _Source) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name = source.text(_MOST_NAME, "the name of a tensor")
    axes = source.number("I", f"the record of {name!r}")
    if axes > _MOST_AXES:
        refuse(source.file, name, f"has {axes} axes", f"at most {_MOST_AXES} are read", _FETCH)
    sizes = [source.number("Q", f"the record of {name!r}") for _ in range(axes)]
    kind, offset = source.number("I", "a type"), source.number("Q", "an offset")
    return name, tuple(reversed(sizes)), kind, offset


def _placed(
    file: str,
    records: list[tuple[str, tuple[int, ...], int, int]],
    begin: int,
    alignment: int,
    size: int,
) -> tuple[Tensor, ...]:
    """The tensors, with the ranges of their bytes; they follow each other up to the end."""
    tensors: dict[str, Tensor] = {}
    end, before = begin, "the header"
    for name, shape, number, offset in sorted(records, key=lambda record: record[3]):
        if name in tensors:
            refuse(file, name, "is there twice", "a name stands for one", _FETCH)
        start = begin + offset
        if start != _padded(end, alignment):
            needs = f"{before} ends at byte {end}, and tensors follow at multiples of {alignment}"
            refuse(file, name, f"begins at byte {start}", needs, _FETCH)
        kind, nbytes = _bytes(file, name, shape, number)
        end, before = start + nbytes, repr(name)
        if end > size:
            needs = f"the file has {size}"
            refuse(file, name, f"ends at byte {end}", needs, f"it was cut short: {_FETCH}")
        tensors[name] = Tensor(name=name, kind=kind, shape=shape, start=start, stop=end)
    if size > _padded(end, alignment):
        needs = f"{before}, after which nothing follows, ends at byte {end}"
        refuse(file, "", f"the file has {size} bytes", needs, _FETCH)
    return tuple(tensors.values())


def _bytes(file: str, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
    """The type of a tensor, and its bytes."""
    if number not in TYPES:
        needs = "its size is unknown"
        remedy = "update jaxfp8, or fetch the model's Q8_0 file"
        refuse(file, name, f"has ggml's type {number}", needs, remedy)
    kind, block, nbytes = TYPES[number]
    inner = shape[-1] if shape else 1
    if inner % block:
        needs = f"{kind} has blocks of {block} along the last axis"
        refuse(file, name, f"has shape {list(shape)}", needs, _FETCH)
    return kind, math.prod(shape) // block * nbytes


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
