"""Writes safetensors files: the header first, then each tensor at its place."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxfp8._value.files import umask
from jaxfp8.checkpoint import _dtypes, _folder, _header
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._header import LENGTH_BYTES, Entry

# Torch readers need it.
METADATA = {"format": "pt"}
_ALIGNMENT = 8


def layout(
    file: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file, and the places of its tensors: wide dtypes first, all aligned.

    Args:
      file: path to store in the entries.
      tensors: name, code of the dtype and shape of each.
      metadata: added to the metadata needed by readers.
    """
    order = {code: place for place, code in enumerate(_dtypes.BY_CODE)}
    ordered = sorted(tensors, key=lambda tensor: order[tensor[1]])
    entries, end = {}, 0
    for name, code, shape in ordered:
        nbytes = int(np.prod(shape, dtype=object)) * _dtypes.BY_CODE[code].itemsize
        entries[name] = Entry(name, file, code, shape, start=end, stop=end + nbytes)
        end += nbytes
    fields = {name: _header.as_json(entry, 0) for name, entry in entries.items()}
    said = {**METADATA, **(metadata or {})}
    said[_header.DIGEST] = _header.digest(fields, said)
    text = json.dumps({_header.METADATA: said, **fields}, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    first = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return first, {
        name: entry._replace(start=entry.start + len(first), stop=entry.stop + len(first))
        for name, entry in entries.items()
    }


def write_at(descriptor: int, start: int, values: np.ndarray | bytes) -> int:
    """Writes all bytes of an array at a place of a file; returns how many."""
    data = values if isinstance(values, bytes) else _bytes(values)
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)
    return len(view)


def _bytes(values: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)


def write_json(path: pathlib.Path, content: Any) -> None:
    """A JSON file, safe on the disk."""
    with path.open("wb") as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: pathlib.Path, files: Mapping[str, Iterable[Entry]]) -> None:
    """The index of a checkpoint of several files."""
    weight_map = {entry.name: file for file, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / _folder.INDEX, content)


def temporary_folder(path: pathlib.Path) -> pathlib.Path:
    """An empty folder next to `path`, to be renamed to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))


def check_free(path: pathlib.Path, overwrite: bool) -> None:
    """Refuses to replace existing files, unless the caller asked for that.

    Raises:
      CheckpointError: there is a file, or a folder with content.
    """
    is_taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if is_taken and not overwrite:
        needs = "a checkpoint is written where nothing is"
        remedy = "name another path, or pass `overwrite=True`"
        raise CheckpointError(path, "", "the path is taken", needs, remedy)


def put_in_place(made: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a finished folder to `path`; an old one is moved aside first and removed last."""
    sync_folder(made)
    made.chmod(0o777 & ~umask())  # a temporary folder is its owner's alone
    old = None
    if path.exists():
        old = temporary_folder(path)
        os.rename(path, old / "replaced")
    os.rename(made, path)
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old)


def sync_folder(path: pathlib.Path) -> None:
    """Flushes the names of files to the disk, not only their bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
