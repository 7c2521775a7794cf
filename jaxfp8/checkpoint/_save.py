"""Writes a checkpoint for vLLM and transformers."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value import dtypes
from jaxfp8._value.checks import is_array
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.progress import progress
from jaxfp8._value.qarray import QArray, check_qarray
from jaxfp8._value.tables import size
from jaxfp8._value.transposed import TransposedArray
from jaxfp8.checkpoint import _compressed, _dtypes, _folder, _names, _write

_SAVE = "jaxfp8.checkpoint.save"
FORMATS = ("compressed-tensors",)
# The file size of Hugging Face's tools.
SHARD_BYTES = 5_000_000_000


def save(
    path: str | os.PathLike[str],
    tree: Mapping[str, Any],
    *,
    format: str = "compressed-tensors",
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    recipe: Recipe | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes arrays and `QArray`s as safetensors, with the configuration for servers.

    All is written under a temporary name and renamed once it is safe on the disk: an interrupted
    process leaves the old files in place. Arrays come to the host one at a time.

    Args:
      path: the folder to make; with the suffix `.safetensors`, a single file with its configuration
        in its metadata.
      tree: arrays and `QArray`s by name, of torch's orientation [N, K]; names of nested mappings
        are joined with dots. A weight "layer.weight" is stored with "layer.weight_scale" and with
        "layer.weight_zero_point", if it has one.
      format: "compressed-tensors".
      config: the model's config.json, as a mapping, a file or a folder with it; a
        `quantization_config` is put into it.
      recipe: the treatment of activations in a server; None leaves them in floats.
      shard_bytes: size limit of a file, before another begins.
      overwrite: whether to replace an existing `path`.

    Raises:
      ValueError: the format cannot describe a weight, or the names clash.
      TypeError: a leaf is no array.
      CheckpointError: the path is taken, or `config` cannot be read.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> w = jaxfp8.quantize(jnp.ones((8, 4)), channelwise_axes=(0,))
      >>> save(folder, {"layer": {"weight": w, "bias": jnp.zeros(8)}}, recipe=jaxfp8.FP8_DYNAMIC)
      >>> sorted(jaxfp8.checkpoint.load(folder))
      ['layer.bias', 'layer.weight']
    """
    if format not in FORMATS:
        needs = f"{' or '.join(map(repr, FORMATS))} is written"
        raise ValueError(message(_SAVE, "`format`", f"is {format!r}", needs, "leave it out"))
    place = pathlib.Path(path)
    leaves = dict(_leaves(tree))
    tensors, quantization = _tensors(leaves), _config(leaves, recipe)
    _write.check_free(place, overwrite)
    if place.suffix == ".safetensors":
        _save_file(place, tensors, quantization)
    else:
        _save_folder(place, tensors, quantization, read_config(config), shard_bytes)


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """The content of config.json, from any of its forms."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    path = pathlib.Path(config)
    return _folder.read_json(path / _folder.CONFIG if path.is_dir() else path)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a server may take this for the weight of a layer in 8 bits."""
    return _names.last(name) == "weight" and len(shape) == 2


def stored(name: str, q: QArray) -> dict[str, Any]:
    """The tensors of a weight by name."""
    parts = {name: q.qvalue, f"{name}_scale": q.scale}
    if q.zero_point is not None:
        parts[f"{name}_zero_point"] = q.zero_point
    return parts


def code_of(name: str, dtype: np.dtype) -> str:
    """The safetensors code of a dtype; exponents are stored as bytes.

    Raises:
      TypeError: safetensors has no code for it.
    """
    if dtype == dtypes.E8M0:
        return "U8"
    if dtype not in _dtypes.CODES:
        needs = f"safetensors holds {', '.join(d.name for d in _dtypes.CODES)}"
        raise TypeError(message(_SAVE, f"`{name}`", f"has dtype {dtype}", needs, "convert it"))
    return _dtypes.CODES[dtype]


def on_host(array: Any) -> np.ndarray:
    """The values of an array as they are stored."""
    values = np.asarray(jax.device_get(array))
    return values.view(np.uint8) if values.dtype == dtypes.E8M0 else values


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, leaf in tree.items():
        path = f"{prefix}{name}"
        if isinstance(leaf, Mapping):
            yield from _leaves(leaf, f"{path}.")
            continue
        if isinstance(leaf, TransposedArray):
            leaf = leaf.contiguous()
        if isinstance(leaf, PreparedArray):
            needs, remedy = "files hold arrays as they were before", "save `unprepare()` of it"
            raise TypeError(message(_SAVE, f"`{path}`", f"is {leaf!r}", needs, remedy))
        if isinstance(leaf, QArray):
            check_qarray(leaf, _SAVE, path)
        elif not is_array(leaf):
            needs, remedy = "an array or a QArray is needed", "leave it out, or convert it"
            got = f"is of type {type(leaf).__name__}"
            raise TypeError(message(_SAVE, f"`{path}`", got, needs, remedy))
        yield path, leaf


def _tensors(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor of the files by its name."""
    tensors: dict[str, Any] = {}
    for name, leaf in leaves.items():
        parts = stored(name, _oriented(leaf)) if isinstance(leaf, QArray) else {name: leaf}
        for part, array in parts.items():
            if part in tensors:
                needs, remedy = "a name stands for one", "rename it"
                raise ValueError(message(_SAVE, f"`{part}`", "is there twice", needs, remedy))
            code_of(part, np.dtype(array.dtype))
            tensors[part] = array
    return tensors


def _oriented(q: QArray) -> QArray:
    """The weight, with a scale per tensor of shape [1] whatever its number of axes."""
    if q.scale.size == 1 and (q.zero_point is None or q.zero_point.size == 1):
        zero = None if q.zero_point is None else q.zero_point.reshape(1)
        return QArray(q.qvalue, q.scale.reshape(1), zero)
    return q


def _config(leaves: Mapping[str, Any], recipe: Recipe | None) -> dict[str, Any] | None:
    weights = {n: _compressed.held(n, q) for n, q in leaves.items() if isinstance(q, QArray)}
    if not weights:
        return None
    wide = [
        _names.module_of(name)
        for name, leaf in leaves.items()
        if not isinstance(leaf, QArray) and is_linear(name, leaf.shape)
    ]
    static = [name for name in leaves if _names.last(name) == "input_scale"]
    return _compressed.config(weights, wide, activation_of(recipe), static)


def activation_of(recipe: Recipe | None) -> Quantization | None:
    """The form of activations in a server; the arithmetic of a device is no property of a file."""
    return None if recipe is None or recipe.compute is not None else recipe.activation


def _save_folder(
    place: pathlib.Path,
    tensors: dict[str, Any],
    quantization: dict[str, Any] | None,
    config: dict[str, Any],
    shard_bytes: int,
) -> None:
    made = _write.temporary_folder(place)
    try:
        shards = _shards(tensors, shard_bytes)
        count, files = len(shards), {}
        with progress("saving", sum(map(_nbytes, tensors.values())), size) as done:
            for number, names in enumerate(shards, 1):
                file = (
                    "model.safetensors"
                    if count == 1
                    else f"model-{number:05}-of-{count:05}.safetensors"
                )
                part = {name: tensors[name] for name in names}
                files[file] = _write_file(made / file, part, {}, done)
        if count > 1:
            _write.write_index(made, files)
        if quantization is not None:
            config = {**config, _folder.QUANTIZATION: quantization}
        if config:
            _write.write_json(made / _folder.CONFIG, config)
        _write.put_in_place(made, place)
    finally:
        _remove(made)


def _save_file(
    place: pathlib.Path, tensors: dict[str, Any], quantization: dict[str, Any] | None
) -> None:
    said = {_folder.QUANTIZATION: json.dumps(quantization)} if quantization else {}
    place.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        with progress("saving", sum(map(_nbytes, tensors.values())), size) as done:
            _write_file(made / place.name, tensors, said, done)
        os.replace(made / place.name, place)
        _write.sync_folder(place.parent)
    finally:
        _remove(made)


def _write_file(
    path: pathlib.Path, tensors: dict[str, Any], metadata: dict[str, str], done: Any
) -> list[Any]:
    kinds = [(n, code_of(n, np.dtype(a.dtype)), tuple(a.shape)) for n, a in tensors.items()]
    first, entries = _write.layout(str(path), kinds, metadata)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write.write_at(descriptor, 0, first)
        for name, entry in entries.items():
            done(_write.write_at(descriptor, entry.start, on_host(tensors[name])))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return list(entries.values())


def _shards(tensors: dict[str, Any], most: int) -> list[list[str]]:
    """The names in each file; a tensor above the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in tensors.items():
        nbytes = _nbytes(array)
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _nbytes(array: Any) -> int:
    return int(np.prod(array.shape, dtype=object)) * np.dtype(array.dtype).itemsize


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder that was not renamed."""
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
