"""The files of a checkpoint, and the configuration next to them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from jaxfp8.checkpoint import _collector, _dtypes, _foreign, _gguf, _markers
from jaxfp8.checkpoint._errors import CheckpointError, from_json
from jaxfp8.checkpoint._file import File
from jaxfp8.checkpoint._header import ARRAYS, Entry

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Diffusers and Mistral name it otherwise: "consolidated.safetensors.index.json".
_INDICES = "*.safetensors.index*.json"
CONFIG = "config.json"
# Mistral's own configuration, beside files with its own names.
_PARAMS = "params.json"
_MISTRALS = "consolidated"
# ModelOpt writes this file if config.json has no quantization_config.
MODELOPT_CONFIG = "hf_quant_config.json"
QUANTIZATION = "quantization_config"
# Old models have the second one.
QUANTIZATIONS = (QUANTIZATION, "compression_config")
# Bytes to read at once in the search for a value other than 0. Few tensors of other numbers begin
# with this many zeros.
_LOOK_BYTES = 1 << 16
_MOST_BYTES = 1 << 22


class Folder:
    """The open files of a checkpoint; `close` it, or use it as a context.

    Attributes:
      path: the opened file or folder.
      files: the open files, by path.
      entries: all tensors by name, in the order of the files and of their data.
      quantization: the checkpoint's configuration of 8-bit weights; None without one.
      metadata: metadata of all files.
      arrays: names of 8-bit arrays that are no weights, as their writer says.
      writer: the program that marks show; "" without marks.
      is_part: whether it is one of several files of a model, by its name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        place = pathlib.Path(path)
        with _collector.paused(), contextlib.ExitStack() as stack:
            paths, index, names = _paths(place)
            self.files = _gguf.opened([str(p) for p in paths], stack.enter_context)
            self.entries = _entries(self.files)
            self.writer = _markers.check(self.files, self.entries)
            if index is not None:
                _check_index(index, names, self.entries)
            self.metadata: dict[str, str] = {}
            for file in self.files.values():
                self.metadata |= file.header.metadata
            self.arrays = _arrays(self.files)
            self.is_part = place.is_file() and index is None and "-of-" in place.name
            self._place = place if place.is_dir() else place.parent
            mistrals = bool(paths) and paths[0].name.startswith(_MISTRALS)
            said = _gguf.quantization_of(self.files)
            self.quantization = said or _quantization(
                self._place, self.metadata, self.path, mistrals
            )
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close all files."""
        self._stack.close()

    def config(self) -> dict[str, Any]:
        """The model's config.json, or what the metadata of a GGUF file say of it; {} without one.

        Raises:
          CheckpointError: it cannot be read.
        """
        said = _gguf.config_of(self.files, self.entries)
        if said is None and (self._place / CONFIG).is_file():
            said = read_json(self._place / CONFIG)
        return said or {}

    @property
    def is_gguf(self) -> bool:
        """Whether the files are GGUF."""
        return _gguf.quantization_of(self.files) is not None

    def is_zero(self, entry: Entry) -> bool:
        """Whether all values of a tensor are 0; it stops reading soon after another value."""
        file = self.files[entry.file]
        return entry.code in _dtypes.BY_CODE and not any(
            part.any() for part in file.chunks(entry, _LOOK_BYTES)
        )

    def values(self, entry: Entry) -> np.ndarray:
        """The values of a small tensor of integers.

        Raises:
          CheckpointError: it holds something else.
        """
        if entry.code not in ("I32", "I64") or entry.nbytes > _MOST_BYTES:
            needs = "a short list of integers is needed"
            raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, "fetch it again")
        return self.files[entry.file].read(entry)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        got = f"the file cannot be read ({str(error)[:80]})"
        raise CheckpointError(path, "", got, "JSON is needed", "fetch it again") from error
    if not isinstance(content, dict):
        got = f"the file holds a {type(content).__name__}"
        raise CheckpointError(path, "", got, "a JSON object is needed", "fetch it again")
    return content


def _paths(
    place: pathlib.Path,
) -> tuple[list[pathlib.Path], pathlib.Path | None, dict[str, str]]:
    """The files of a checkpoint, the index if there is one, and the file of each tensor in it."""
    try:
        return _paths_of(place)
    except OSError as error:
        got = f"the path cannot be read ({error.strerror or error})"
        needs, remedy = "its files are needed", "check the path and its rights"
        raise CheckpointError(place, "", got, needs, remedy) from error


def _paths_of(
    place: pathlib.Path,
) -> tuple[list[pathlib.Path], pathlib.Path | None, dict[str, str]]:
    if place.is_file() and not place.match(_INDICES):
        return _gguf.parts_of(place), None, {}
    if not place.is_dir() and not place.is_file():
        needs = "a safetensors or GGUF file, or a folder of them, is needed"
        what = "that is no regular file" if place.exists() else "there is no such path"
        raise CheckpointError(place, "", what, needs, "check the path")
    path = _index_of(place)
    if path is not None:
        index = _index(path)
        return [_member(path, name) for name in sorted(set(index.values()))], path, index
    files = sorted(place.glob("*.safetensors"))
    if place / SINGLE in files and not any("-of-" in path.name for path in files):
        files = [place / SINGLE]  # as transformers does: others are Mistral's copy, or adapters
    if len(files) > 1:
        some = ", ".join(path.name for path in files[:4])
        needs = f"several files need an index, such as {INDEX}"
        remedy = "fetch the index too, or name one file"
        raise CheckpointError(place, "", f"the folder has {some}", needs, remedy)
    files = files or _gguf.files_in(place)
    if not files:
        raise _foreign.without(place)
    return files, None, {}


def _index_of(place: pathlib.Path) -> pathlib.Path | None:
    """The index of a folder, or the one named itself."""
    if place.is_file() or (place / INDEX).exists():
        return place if place.is_file() else place / INDEX
    indices = sorted(place.glob(_INDICES))
    if len(indices) > 1:
        some = ", ".join(path.name for path in indices[:4])
        needs = "one index says which files are the model"
        remedy = f"name one of them, such as {indices[0]}"
        raise CheckpointError(place, "", f"the folder has {some}", needs, remedy)
    return indices[0] if indices else None


def _index(path: pathlib.Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or set(map(type, index.values())) != {str}:
        needs = "weight_map, a file for each tensor, is needed"
        raise CheckpointError(path, "", "the index has no weight_map", needs, "fetch it again")
    return index


def _member(index: pathlib.Path, name: str) -> pathlib.Path:
    """A file named by an index. It must lie in the index's folder."""
    if name in ("", ".", "..") or pathlib.PurePath(name).name != name:
        needs = "the files lie beside it"
        raise CheckpointError(index, "", f"the index names {name!r}", needs, "rename it")
    if not (index.parent / name).is_file():
        needs = "the file is not there"
        raise CheckpointError(index, "", f"the index names {name!r}", needs, "fetch it too")
    return index.parent / name


def _entries(files: dict[str, File]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files.values():
        for entry in file.header.entries:
            other = entries.setdefault(entry.name, entry)
            if other is not entry:
                needs, remedy = f"{other.file} has it too", "remove one of the files"
                if other.file == file.path:  # experts of a GGUF file, stacked and apart
                    needs, remedy = "a name stands for one", "fetch the file again"
                raise CheckpointError(file.path, entry.name, "is there twice", needs, remedy)
    return entries


def _arrays(files: dict[str, File]) -> frozenset[str]:
    texts = {path: file.header.metadata.get(ARRAYS, "[]") for path, file in files.items()}
    return frozenset(name for path, text in texts.items() for name in _names_in(path, text))


def _names_in(path: str, text: str) -> list[str]:
    names = from_json(text)
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    text = f"the metadata's {ARRAYS} is no list of names"
    raise CheckpointError(path, "", text, "one is needed", "write the file again")


def _check_index(path: pathlib.Path, index: dict[str, str], entries: dict[str, Entry]) -> None:
    file_of = {file: pathlib.Path(file).name for file in {entry.file for entry in entries.values()}}
    held = [file_of[entry.file] for entry in entries.values()]
    if len(index) == len(held) and list(map(index.get, entries)) == held:
        return
    for name, said in index.items():
        at = file_of[entries[name].file] if name in entries else None
        if at != said:
            needs = "no file has it" if at is None else f"{at} has it"
            raise CheckpointError(path, name, f"is said to be in {said}", needs, "fetch all again")
    name = next(name for name in entries if name not in index)
    needs, remedy = "the index does not name it", "fetch the index again"
    raise CheckpointError(entries[name].file, name, "is there", needs, remedy)


def _quantization(
    folder: pathlib.Path, metadata: dict[str, str], path: str, mistrals: bool
) -> dict[str, Any] | None:
    """The configuration of 8-bit weights, from a file of its program or the metadata."""
    config = folder / CONFIG
    if (folder / _PARAMS).is_file() and (mistrals or not config.is_file()):
        return _of_params(read_json(folder / _PARAMS))
    if config.is_file():
        said = read_json(config)
        # Models of several parts have it in the text part.
        parts = [said, *(part for part in said.values() if isinstance(part, dict))]
        for part in parts:
            for key in QUANTIZATIONS:
                if isinstance(part.get(key), dict):
                    return part[key]
    if (folder / MODELOPT_CONFIG).is_file():
        return {"quant_method": "modelopt", **read_json(folder / MODELOPT_CONFIG)}
    if QUANTIZATION in metadata:
        config = from_json(metadata[QUANTIZATION])
        if isinstance(config, dict):
            return config
        remedy = "write the file again"
        text = f"the metadata's {QUANTIZATION} is no JSON object"
        raise CheckpointError(path, "", text, "one is needed", remedy)
    return None


def _of_params(params: dict[str, Any]) -> dict[str, Any] | None:
    said = params.get("quantization") or params.get(QUANTIZATION)
    return said if isinstance(said, dict) else None
