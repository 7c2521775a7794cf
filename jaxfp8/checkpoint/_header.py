"""The header of a safetensors file: parsed strictly, before any of the data is touched.

A file is a little-endian length, a JSON header of that many bytes, and the data. The header maps
each name to a dtype, a shape and a range of the data; the ranges follow each other without gaps.
The header is parsed here, because the `safetensors` package reads a whole tensor at a time, knows
no FP8 in numpy or JAX, and does not name the wrong tensor. It makes the same checks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import re
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxfp8.checkpoint import _dtypes
from jaxfp8.checkpoint._errors import CheckpointError, refuse

LENGTH_BYTES = 8
# The limit of the `safetensors` package. A length past it counts as damaged.
MOST_BYTES = 100_000_000
METADATA = "__metadata__"
# Metadata of files written here: a digest of the header with each name, dtype and shape.
DIGEST = "jaxfp8.header"
# The form identifies it too, so damage to its name does not hide damage to a tensor.
_DIGEST_FORM = "sha256:"
# Metadata of files written here: names of 8-bit arrays that are no weights, as JSON.
ARRAYS = "jaxfp8.arrays"
_FETCH = "fetch the file again"
_OTHER = "fetch the file again, or name one that is safetensors"
_FIELDS = {"dtype", "shape", "data_offsets"}
# The package's spelling: metadata of plain texts, then tensors in the order of their data.
# `json.dumps` writes the same with a blank after each comma and colon.
_TEXT, _INTEGER = r'"([^"\\]*)"', r"(?:0|[1-9][0-9]{0,17})"
_PAIR = re.compile(f"{_TEXT}: ?{_TEXT}")
_HEAD = re.compile(rf'\{{(?:"{METADATA}": ?\{{({_PAIR.pattern}(?:, ?{_PAIR.pattern})*)?\}}, ?)?')
_FORM = re.compile(rf'"dtype": ?{_TEXT}, ?"shape": ?\[((?:{_INTEGER}(?:, ?{_INTEGER})*)?)\]')
_TENSOR = r'"([^"]*)":{0}\{{([^]]*\]),{0}"data_offsets":{0}\[([^]]*)\]\}}(?:,{0}|\}}\Z)'
_TENSORS = {blank: re.compile(_TENSOR.format(blank)) for blank in ("", " ")}
# Signs of a match outside its groups, and blanks. Behind the last tensor is a brace and no blank.
_OF_A_TENSOR, _BLANKS = len('"":{,"data_offsets":[]},'), 4
_FIRST_PRINTABLE = 0x20
_INTEGERS = {int}


class Entry(NamedTuple):
    """One tensor of a file. A header has 100,000 of them, so they are tuples.

    Attributes:
      name: its name.
      file: path of its file.
      code: its dtype as safetensors spells it, such as "F8_E4M3".
      shape: its shape.
      start, stop: the range of its bytes in the file.
    """

    name: str
    file: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start

    def __str__(self) -> str:
        return _form(self.code, self.shape)


@functools.lru_cache(maxsize=1 << 12)
def _form(code: str, shape: tuple[int, ...]) -> str:
    return f"{code}[{','.join(map(str, shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """All tensors of a file, in the order of their data, and its metadata."""

    file: str
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def header_length(file: str, first: bytes, size: int) -> int:
    """Length of the header from the first bytes of a file of `size` bytes.

    Raises:
      CheckpointError: the file cannot hold a header of that length.
    """
    if len(first) < LENGTH_BYTES:
        refuse(file, "", f"the file has {size} bytes", "a header's length takes 8", _FETCH)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MOST_BYTES:
        needs = f"the header of a safetensors file has at most {MOST_BYTES}"
        refuse(file, "", f"the first 8 bytes announce a header of {length} bytes", needs, _OTHER)
    if LENGTH_BYTES + length > size:
        got = f"the header is said to have {length} bytes"
        refuse(file, "", got, f"the file has {size}", _FETCH)
    return length


def parse(file: str, text: bytes, size: int) -> Header:
    """The header of a file of `size` bytes from the bytes behind its length.

    Raises:
      CheckpointError: it is not well formed, or its tensors do not fill the data exactly.
    """
    begin = LENGTH_BYTES + len(text)
    metadata, entries = _quick(file, text, size) or _parsed(file, text, size)
    _check_filled(file, entries, begin, size)
    _check_digest(file, entries, metadata, begin)
    return Header(file=file, entries=tuple(entries), metadata=metadata)


def digest(tensors: dict[str, dict[str, Any]], metadata: dict[str, str]) -> str:
    """SHA-256 of a header's tensors and metadata, less the digest itself."""
    rest = {key: value for key, value in metadata.items() if key != DIGEST}
    text = json.dumps([tensors, rest], sort_keys=True, separators=(",", ":"))
    return _DIGEST_FORM + hashlib.sha256(text.encode()).hexdigest()


def _json(file: str, text: bytes) -> dict[str, Any]:
    if text[:1] != b"{":
        refuse(file, "", "the header does not begin with '{'", "a JSON object is needed", _OTHER)
    try:
        whole = text.decode("utf-8")
        content = json.loads(whole, parse_constant=_no_constant)
        if not _has_all_texts(content, whole):
            content = json.loads(whole, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        got = f"the header cannot be read ({str(error)[:80]})"
        raise CheckpointError(file, "", got, "JSON is needed", _FETCH) from error
    return content


def _has_all_texts(content: dict[str, Any], text: str) -> bool:
    """Whether every text of a header is in the parsed object: then no name was there twice.

    A quick sufficient test, for headers without escapes: an entry has five texts.
    """
    metadata = content.get(METADATA)
    count = 5 * len(content)
    if isinstance(metadata, dict):
        count += 1 + 2 * len(metadata) - 5
    return "\\" not in text and text.count('"') == 2 * count


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _metadata(file: str, metadata: Any) -> dict[str, str]:
    if isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()):
        return metadata
    got = f"the header's {METADATA} is not a map of texts"
    refuse(file, "", got, "each value is a string", _FETCH)


def _parsed(file: str, text: bytes, size: int) -> tuple[dict[str, str], list[Entry]]:
    """Metadata and tensors, by JSON."""
    content, begin = _json(file, text), LENGTH_BYTES + len(text)
    metadata = _metadata(file, content.pop(METADATA, {}))
    entries = [_entry(file, name, fields, begin, size) for name, fields in content.items()]
    return metadata, sorted(entries, key=operator.attrgetter("start", "stop"))


def _quick(file: str, text: bytes, size: int) -> tuple[dict[str, str], list[Entry]] | None:
    """Metadata and tensors in the order of the safetensors package and in its spelling or Python's.

    None for others, and if anything is wrong: JSON then names the fault. It is three times as
    fast as JSON for 100,000 tensors. The matches must cover the whole text.
    """
    is_plain = text.isascii() and b"\\" not in text
    if not is_plain or np.frombuffer(text, np.uint8).min(initial=255) < _FIRST_PRINTABLE:
        return None
    begin, whole = LENGTH_BYTES + len(text), text.decode().rstrip(" ")
    blank = " " if '": [' in whole else ""
    head = _HEAD.match(whole)
    matches = _TENSORS[blank].findall(whole, head.end()) if head else []
    if not head or not matches:
        return None
    names, texts, ranges = columns = list(zip(*matches, strict=True))
    length = head.end() + sum(sum(map(len, column)) for column in columns) - len(blank)
    length += (_OF_A_TENSOR + _BLANKS * len(blank)) * len(names)
    forms = [*map(_quick_form, texts)]
    if length != len(whole) or not all(forms):
        return None
    codes, shapes, sizes = zip(*forms, strict=True)
    places = [*itertools.accumulate(sizes, initial=begin)]
    offsets = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    pairs = _PAIR.findall(head[1] or "")
    is_sound = (
        list(map(f"%d,{blank}%d".__mod__, offsets)) == list(ranges)
        and places[-1] <= size
        and whole[-1] == "}"
        and len({METADATA, *names}) > len(names)
        and len(dict(pairs)) == len(pairs)
    )
    made = zip(names, itertools.repeat(file), codes, shapes, places, places[1:], strict=False)
    entries = map(tuple.__new__, itertools.repeat(Entry), made)  # twice as fast as `_make`
    return (dict(pairs), list(entries)) if is_sound else None


@functools.lru_cache(maxsize=1 << 12)
def _quick_form(text: str) -> tuple[str, tuple[int, ...], int] | tuple[()]:
    """Dtype, shape and bytes of a tensor; () for unknown ones, and for a part of a byte."""
    form = _FORM.fullmatch(text)
    wide = _dtypes.bits(form[1]) if form else None
    if form is None or wide is None:
        return ()
    shape = tuple(map(int, filter(None, form[2].split(","))))
    nbytes, rest = divmod(math.prod(shape) * wide, 8)
    return () if rest else (form[1], shape, nbytes)


def _entry(file: str, name: str, fields: Any, begin: int, size: int) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        got = sorted(fields) if isinstance(fields, dict) else fields
        needs = "dtype, shape and data_offsets are needed"
        refuse(file, name, f"is described by {str(got)[:80]}", needs, _FETCH)
    code, shape = fields["dtype"], fields["shape"]
    wide = _dtypes.bits(code) if isinstance(code, str) else None
    if wide is None:
        known = ", ".join([*_dtypes.BY_CODE, *_dtypes.BITS_OF_PACKED])
        needs = f"what that means is unknown (known: {known})"
        refuse(file, name, f"has dtype {str(code)[:40]!r}", needs, "update jaxfp8, or convert it")
    if not _are_sizes(shape):
        needs = "a list of sizes is needed"
        refuse(file, name, f"has shape {str(shape)[:80]}", needs, _FETCH)
    offsets = fields["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        needs = "where they begin and end is needed"
        refuse(file, name, f"has data_offsets {str(offsets)[:80]}", needs, _FETCH)
    start, stop = begin + offsets[0], begin + offsets[1]
    if stop > size:
        needs = f"the file has {size}"
        refuse(file, name, f"ends at byte {stop}", needs, "the file was cut short: " + _FETCH)
    if (stop - start) * 8 != math.prod(shape) * wide:
        needs = f"{code}{shape} takes {math.prod(shape) * wide / 8:g}"
        refuse(file, name, f"has {stop - start} bytes", needs, _FETCH)
    return Entry(name=name, file=file, code=code, shape=tuple(shape), start=start, stop=stop)


def _are_sizes(values: Any) -> bool:
    """Whether this is a list of non-negative integers; True and False do not count."""
    if not isinstance(values, list):
        return False
    kinds = set(map(type, values))  # a header has 100,000 of these lists, of two values
    return not kinds or (kinds == _INTEGERS and min(values) >= 0)


def _check_filled(file: str, entries: list[Entry], begin: int, size: int) -> None:
    """The tensors have to cover the data: no overlap, no gap, nothing behind the last."""
    end, before = begin, None
    for entry in entries:
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap behind"
            needs = f"{_named(before)} ends at byte {end}"
            refuse(file, entry.name, f"begins at byte {entry.start} and {what} it", needs, _FETCH)
        end, before = entry.stop, entry
    if end != size:
        got = f"the file has {size} bytes"
        refuse(file, "", got, f"{_named(before)}, the last tensor, ends at byte {end}", _FETCH)


def _named(entry: Entry | None) -> str:
    return "the header" if entry is None else repr(entry.name)


def _check_digest(file: str, entries: list[Entry], metadata: dict[str, str], begin: int) -> None:
    """Compares the header with its digest, if the file has one; only files written here do."""
    if DIGEST not in metadata and not any(v.startswith(_DIGEST_FORM) for v in metadata.values()):
        return
    tensors = {entry.name: as_json(entry, begin) for entry in entries}
    if digest(tensors, metadata) != metadata.get(DIGEST):
        got = "the header was changed after the file was written"
        refuse(file, "", got, f"it has to match its {DIGEST}", _FETCH)


def as_json(entry: Entry, begin: int) -> dict[str, Any]:
    """The fields of a tensor as the header has them; data begins at byte `begin`."""
    offsets = [entry.start - begin, entry.stop - begin]
    return {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": offsets}
