"""One GGUF file of llama.cpp: its tensors under Hugging Face's names, codes and scales apart.

Q8_0 has blocks of 32 values: a float16 scale, then 32 int8 codes. A tensor [N, K] is read as codes
[N, K] and scales [N, K / 32], some rows at a time.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfp8.checkpoint import _dtypes, _gguf_header, _gguf_names
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._file import PART_BYTES, File, Index, aligned, bounds_of
from jaxfp8.checkpoint._gguf_header import Tensor
from jaxfp8.checkpoint._header import Entry, Header

# A block of Q8_0. Codes are moved 32 at a time: 20x faster than one by one.
_VALUES = 32
_BLOCK = np.dtype([("scale", "<f2"), ("codes", f"V{_VALUES}")])
_MOST_EXPERTS = 4096
_PART_OF_SEVERAL = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_COUNT_OF_PARTS, _NUMBER_OF_PART = "split.count", "split.no"


class GgufEntry(Entry):
    """A tensor of a GGUF file, or the codes or the scales of one in Q8_0.

    Attributes:
      part: "codes" or "scales" of Q8_0; "" for the whole.
      heads: how many heads of attention have alternating rows; 0 for rows in order.
    """

    part: str
    heads: int

    def __new__(cls, *, part: str = "", heads: int = 0, **fields: Any) -> GgufEntry:
        """An entry with the fields of `Entry`."""
        made = super().__new__(cls, **fields)
        made.part, made.heads = part, heads
        return made

    @property
    def nbytes(self) -> int:
        """Bytes in the file: of both parts of a block, each counts its own."""
        nbytes = self.stop - self.start
        scales = nbytes // _BLOCK.itemsize * _BLOCK["scale"].itemsize
        return {"codes": nbytes - scales, "scales": scales}.get(self.part, nbytes)

    def __str__(self) -> str:
        code = "Q8_0" if self.part == "codes" else self.code
        return f"{code}[{','.join(map(str, self.shape))}]"


class GgufFile(File):
    """An open file; `close` it, or use it as a context.

    Attributes:
      path: its path.
      header: its tensors.
      metadata: its metadata. The first of several files has it.
    """

    def __init__(self, path: str, metadata: Mapping[str, Any] | None = None) -> None:
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.metadata.pop(_NUMBER_OF_PART, None)
        # The last scales that were split off with their codes, by place and rows.
        self._scales: dict[tuple[int, tuple[int, int]], np.ndarray] = {}
        super().__init__(path)

    def _read_header(self) -> Header:
        def read(start: int, count: int) -> bytes:
            return os.pread(self._descriptor, count, start)

        size = os.fstat(self._descriptor).st_size
        metadata, tensors = _gguf_header.parse(self.path, read, size)
        self.metadata |= metadata
        kinds = {tensor.name: tensor.kind for tensor in tensors}
        _gguf_names.check(self.path, self.metadata, kinds)
        entries = [entry for tensor in tensors for entry in self._entries(tensor)]
        texts = {key: v for key, v in metadata.items() if isinstance(v, str)}
        return Header(file=self.path, entries=tuple(entries), metadata=texts)

    def _entries(self, tensor: Tensor) -> Iterator[GgufEntry]:
        """The entries of a tensor: one by expert, and of Q8_0 its codes and its scales."""
        shape, heads = tensor.shape, 0
        experts = min(shape[0], _MOST_EXPERTS + 1) if shape else 0
        names = _gguf_names.names_of(tensor.name, self.metadata, experts)
        if not 1 <= len(names) <= _MOST_EXPERTS:
            got = f"has {shape[0] if shape else 0} experts"
            needs = f"1 to {_MOST_EXPERTS} are read"
            raise CheckpointError(self.path, tensor.name, got, needs, "fetch the file again")
        if "_exps." in tensor.name and names != [tensor.name]:
            shape = shape[1:]
        else:
            rows = shape[0] if shape else 0
            heads = _gguf_names.alternating_heads(self.path, tensor.name, rows, self.metadata)
        if len(shape) == 1 and names[0].endswith("shared_expert_gate.weight"):
            shape = (1, *shape)
        step = (tensor.stop - tensor.start) // len(names)
        for number, name in enumerate(names):
            start = tensor.start + number * step
            place: Any = {"file": self.path, "start": start, "stop": start + step, "heads": heads}
            if tensor.kind == "Q8_0" and len(shape) > 1:
                scales = (*shape[:-1], shape[-1] // _VALUES)
                yield GgufEntry(name=name, code="I8", shape=shape, part="codes", **place)
                yield GgufEntry(
                    name=f"{name}_scale", code="F16", shape=scales, part="scales", **place
                )
            else:
                is_plain = tensor.kind in _dtypes.BY_CODE
                code = tensor.kind if is_plain else f"{_dtypes.GGML}{tensor.kind}"
                yield GgufEntry(name=name, code=code, shape=shape, **place)

    def read(self, entry: Entry, index: Index = ()) -> np.ndarray:
        """As `File.read`; codes and scales of Q8_0 are split in one pass over the blocks."""
        if not isinstance(entry, GgufEntry) or not (entry.part or entry.heads):
            return super().read(entry, index)
        bounds = bounds_of(entry.shape, index)
        out = aligned([stop - start for start, stop in bounds], _dtypes.BY_CODE[entry.code])
        if len(bounds) > 2:
            for place, number in enumerate(range(*bounds[0])):
                out[place] = self.read(_one_of(entry, number), index[1:])
        elif out.size and entry.part:
            self._read_blocks(entry, bounds, out)
        elif out.size:
            cut = tuple(slice(*bound) for bound in bounds[1:])
            for rows, raw in self._rows(entry, bounds[0]):
                out[rows] = raw.view(out.dtype).reshape(-1, *entry.shape[1:])[:, *cut]
        return out

    def _read_blocks(
        self, entry: GgufEntry, bounds: list[tuple[int, int]], out: np.ndarray
    ) -> None:
        """Codes or scales; those of whole rows leave their scales for the next call."""
        rows, columns = bounds if len(bounds) == 2 else ((0, 1), bounds[0])
        key, flat = (entry.start, rows), out.reshape(rows[1] - rows[0], -1)
        is_whole = columns == (0, entry.shape[-1])
        kept = self._scales.pop(key, None) if entry.part == "scales" else None
        if kept is not None:
            flat[:] = kept[:, slice(*columns)]
            return
        scales = None
        if entry.part == "codes" and is_whole:
            scales = np.empty((len(flat), entry.shape[-1] // _VALUES), np.float16)
        for place, raw in self._rows(entry, rows):
            blocks = raw.view(_BLOCK)
            if scales is not None:
                scales[place] = blocks["scale"]
            if entry.part == "codes":
                codes = np.ascontiguousarray(blocks["codes"]).view(np.int8)
                flat[place] = codes.reshape(len(raw), -1)[:, slice(*columns)]
            else:
                flat[place] = blocks["scale"][:, slice(*columns)]
        if scales is not None:
            kept_of = {k: v for k, v in self._scales.items() if k[0] == entry.start}
            self._scales = {**kept_of, key: scales}

    def _rows(self, entry: GgufEntry, rows: tuple[int, int]) -> Iterator[tuple[slice, np.ndarray]]:
        """Bytes of rows in the order of Hugging Face, some at a time, and where they go."""
        count = entry.shape[0] if len(entry.shape) > 1 or entry.heads else 1
        width = (entry.stop - entry.start) // count
        head = count // entry.heads if entry.heads else 1
        first, last = rows[0] // head * head, -(-rows[1] // head) * head
        step = max(PART_BYTES // width // head, 1) * head
        room = np.empty((min(step, last - first), width), np.uint8)
        for at in range(first, last, step):
            raw = room[: last - at]
            self._read_into(entry, entry.start + at * width, raw.reshape(-1))
            if entry.heads:
                pairs = raw.reshape(-1, head // 2, 2, width)
                raw = pairs.swapaxes(1, 2).reshape(raw.shape)
            low, high = max(rows[0] - at, 0), min(rows[1] - at, len(raw))
            yield slice(at + low - rows[0], at + high - rows[0]), raw[low:high]


def _one_of(entry: GgufEntry, number: int) -> GgufEntry:
    """One matrix of a stack."""
    step = (entry.stop - entry.start) // entry.shape[0]
    start = entry.start + number * step
    fields = {**entry._asdict(), "shape": entry.shape[1:], "start": start, "stop": start + step}
    return GgufEntry(**fields, part=entry.part, heads=entry.heads)


def opened(paths: Sequence[str], enter: Any) -> dict[str, File]:
    """Open files by path, safetensors or GGUF.

    Args:
      paths: the files of a model, in order.
      enter: called with each, to have it closed.

    Raises:
      CheckpointError: a file is of neither kind, or parts of a GGUF model are missing or have each
        other's names.
    """
    files: dict[str, File] = {}
    first: GgufFile | None = None
    for path in paths:
        if is_gguf(path):
            files[path] = enter(GgufFile(path, first.metadata if first else None))
            first = first or files[path]  # type: ignore[assignment]
        else:
            files[path] = enter(File(path))
    if first and (count := first.metadata.get(_COUNT_OF_PARTS) or 1) != len(files):
        got = f"the model is said to be in {count} files"
        needs = f"{len(files)} are here"
        raise CheckpointError(first.path, "", got, needs, "fetch all files of it")
    for number, file in enumerate(files.values()):
        _check_number(file, number)
    return files


def _check_number(file: File, number: int) -> None:
    """Refuses a part under the name of another: the first one tells the order of rows."""
    said = file.metadata.get(_NUMBER_OF_PART, number) if isinstance(file, GgufFile) else number
    if said != number:
        got, needs = f"it is part {said} of its model, from 0", f"part {number} has that name"
        raise CheckpointError(file.path, "", got, needs, "give each part its own name again")


def is_gguf(path: str) -> bool:
    """Whether a file begins as GGUF does; an unreadable one does not."""
    try:
        with pathlib.Path(path).open("rb") as file:
            return file.read(len(_gguf_header.MAGIC)) == _gguf_header.MAGIC
    except OSError:
        return False


def parts_of(path: pathlib.Path) -> list[pathlib.Path]:
    """All files of the model that a file belongs to.

    Raises:
      CheckpointError: one is missing.
    """
    found = _PART_OF_SEVERAL.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    parts = [path.parent / f"{found[1]}-{n:05}-of-{found[3]}.gguf" for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        text = f"the file is one of {count}"
        raise CheckpointError(path, "", text, f"{missing[0]} is not there", "fetch it too")
    return parts


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The GGUF files of a folder with one model in them; [] if there are none.

    Raises:
      CheckpointError: they are several models.
    """
    found = sorted(folder.glob("*.gguf"))
    if found and set(parts := parts_of(found[0])) != set(found):
        some = ", ".join(path.name for path in found[:4])
        needs = "one model is read at a time"
        raise CheckpointError(folder, "", f"the folder has {some}", needs, "name one file")
    return parts if found else []


def _first(files: Mapping[str, File]) -> GgufFile | None:
    """The file with the metadata of a model; None for other files."""
    first = next(iter(files.values()), None)
    return first if isinstance(first, GgufFile) else None


def quantization_of(files: Mapping[str, File]) -> dict[str, Any] | None:
    """What `_formats` reads as the configuration of GGUF files; None for other files."""
    first = _first(files)
    if first is None:
        return None
    family = _gguf_names.family(first.metadata)
    own = f"{first.metadata.get(_gguf_names.ARCHITECTURE)}, with the names and rows of the file"
    return {"quant_method": "gguf", "family": family or own}


def config_of(files: Mapping[str, File], entries: Mapping[str, Entry]) -> dict[str, Any] | None:
    """What config.json of Hugging Face says of such files; None for other files.

    Args:
      files: by path.
      entries: all their tensors by name.

    Raises:
      CheckpointError: the metadata has no words in config.json.
    """
    first = _first(files)
    if first is None:
        return None
    factors, entry = None, entries.get(_gguf_names.ROPE_FACTORS)
    if entry is not None:
        factors = files[entry.file].read(entry).astype(np.float64).reshape(-1)
    shapes = {name: entry.shape for name, entry in entries.items()}
    return _gguf_names.config_of(first.path, first.metadata, shapes, factors)
