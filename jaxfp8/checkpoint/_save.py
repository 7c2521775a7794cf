"""Writes a checkpoint for vLLM and transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value import dtypes
from jaxfp8._value.checks import is_array
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.progress import progress
from jaxfp8._value.qarray import QArray, check_qarray
from jaxfp8._value.spec import Shape
from jaxfp8._value.tables import size
from jaxfp8._value.transposed import TransposedArray
from jaxfp8.checkpoint import _compressed, _folder, _header, _names, _write
from jaxfp8.checkpoint._compressed import Held
from jaxfp8.checkpoint._stored import Stored, code_of, on_host, stored
from jaxfp8.checkpoint._weight import EIGHT_BIT

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
        "layer.weight_zero_point", if it has one. Beside float activations, int8 by row or by group
        is "layer.weight_packed", four codes in an int32: servers take no other form.
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
    check_format(_SAVE, format)
    place = pathlib.Path(path)
    leaves = dict(_leaves(tree))
    held = forms({n: x for n, x in leaves.items() if isinstance(x, QArray)}, recipe)
    tensors = _tensors(leaves, held)
    static = [name for name in leaves if _names.last(name) == "input_scale"]
    said = quantization({name: x.shape for name, x in leaves.items()}, held, recipe, static)
    _write.check_free(place, overwrite)
    if place.suffix == ".safetensors":
        _save_file(place, tensors, said)
    else:
        save_folder(place, tensors, said, _read_config(config), shard_bytes)


def check_format(operation: str, format: str) -> None:
    """Refuses a format that is not written.

    Raises:
      ValueError: it is not.
    """
    if format not in FORMATS:
        needs = f"{' or '.join(map(repr, FORMATS))} is written"
        raise ValueError(message(operation, "`format`", f"is {format!r}", needs, "leave it out"))


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """The content of config.json, from any of its forms."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    path = pathlib.Path(config)
    return _folder.read_json(path / _folder.CONFIG if path.is_dir() else path)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a server may take this for the weight of a layer in 8 bits."""
    return _names.last(name) == "weight" and len(shape) == 2


def wide_modules(shapes: Mapping[str, Shape], forms: Container[str]) -> list[str]:
    """The modules of layers in floats: a server may take them for layers in 8 bits."""
    return [
        _names.module_of(name)
        for name, shape in shapes.items()
        if name not in forms and is_linear(name, shape)
    ]


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


def _tensors(leaves: Mapping[str, Any], forms: Mapping[str, Held]) -> dict[str, Stored]:
    """Every tensor of the files by its name."""
    tensors: dict[str, Stored] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, QArray):
            parts = stored(name, _even(leaf), forms[name])
        else:
            code = code_of(name, np.dtype(leaf.dtype))
            parts = {name: Stored(leaf, code, tuple(leaf.shape), is_array=True)}
        for part, array in parts.items():
            if part in tensors:
                needs, remedy = "a name stands for one", "rename it"
                raise ValueError(message(_SAVE, f"`{part}`", "is there twice", needs, remedy))
            tensors[part] = array
    return tensors


def _even(q: QArray) -> QArray:
    """The weight, with as many zero points as scales."""
    zero = q.zero_point
    if zero is None or zero.shape == q.scale.shape:
        return q
    shape = np.broadcast_shapes(zero.shape, q.scale.shape)
    scale, zero = (jnp.broadcast_to(leaf, shape) for leaf in (q.scale, zero))
    return dataclasses.replace(q, scale=scale, zero_point=zero)


def forms(weights: Mapping[str, QArray], recipe: Recipe | None) -> dict[str, Held]:
    """The form of each weight in a file: int8 beside activations in floats is packed."""
    found = _compressed.forms(weights, _block_of(recipe))
    if _activation_of(recipe) is not None:
        return found
    return {name: _packed(name, weights[name], form) for name, form in found.items()}


def _packed(name: str, q: QArray, form: Held) -> Held:
    """The form of a weight beside activations in floats: int8 codes by row or by group in words."""
    zero = q.zero_point
    is_packed = (
        is_linear(name, q.shape)
        and form.dtype == dtypes.EIGHT_BIT_INTS[0]
        and form.strategy in ("channel", "group")
        and (zero is None or zero.dtype == form.dtype)
        and 0 not in q.shape
    )
    return dataclasses.replace(form, packed=is_packed)


def _block_of(recipe: Recipe | None) -> tuple[int, int] | None:
    """The sizes of a recipe's blocks of [N, K]; None without blocks."""
    granularity = None if recipe is None or recipe.weight is None else recipe.weight.granularity
    depth, rows = granularity if isinstance(granularity, tuple) else (None, None)
    return (rows, depth) if rows and depth else None


def quantization(
    shapes: Mapping[str, Shape],
    held: Mapping[str, Held],
    recipe: Recipe | None,
    static: Iterable[str] = (),
) -> dict[str, Any] | None:
    """The quantization_config; None without anything in 8 bits.

    Args:
      shapes: of all arrays.
      held: the forms of those in 8 bits.
      recipe: the treatment of activations in a server.
      static: names of static scales of activations.
    """
    inputs = dict.fromkeys(held, _activation_of(recipe))
    wide = wide_modules(shapes, held)
    return _compressed.config(held, wide, inputs, static) if held else None


def _activation_of(recipe: Recipe | None) -> Quantization | None:
    """The form of activations in a server; the arithmetic of a device is no property of a file."""
    return None if recipe is None or recipe.compute is not None else recipe.activation


def save_folder(
    place: pathlib.Path,
    tensors: dict[str, Stored],
    quantization: dict[str, Any] | None,
    config: dict[str, Any],
    shard_bytes: int,
    add: Callable[[pathlib.Path], None] = lambda made: None,
) -> None:
    """Writes a folder under a temporary name, and renames it.

    Args:
      place: its path.
      tensors: by name, in the order in which they are asked for.
      quantization, config: what config.json says of weights, and of the rest.
      shard_bytes: size limit of a file.
      add: called with the finished folder before it is renamed, to put other files into it.
    """
    made = _write.temporary_folder(place)
    try:
        shards = _shards(tensors, shard_bytes)
        count, files = len(shards), {}
        with progress("saving", sum(tensor.nbytes for tensor in tensors.values()), size) as done:
            for number, names in enumerate(shards, 1):
                file = (
                    _folder.SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
                )
                part = {name: tensors[name] for name in names}
                files[file] = _write_file(made / file, part, {}, done)
        if count > 1:
            _write.write_index(made, files)
        if quantization is not None:
            config = {**config, _folder.QUANTIZATION: quantization}
        if config:
            _write.write_json(made / _folder.CONFIG, config)
        add(made)
        _write.put_in_place(made, place)
    finally:
        _remove(made)


def _save_file(
    place: pathlib.Path, tensors: dict[str, Stored], quantization: dict[str, Any] | None
) -> None:
    said = {_folder.QUANTIZATION: json.dumps(quantization)} if quantization else {}
    made = _write.temporary_folder(place)
    try:
        with progress("saving", sum(tensor.nbytes for tensor in tensors.values()), size) as done:
            _write_file(made / place.name, tensors, said, done)
        os.replace(made / place.name, place)
        _write.sync_folder(place.parent)
    finally:
        _remove(made)


def _write_file(
    path: pathlib.Path, tensors: dict[str, Stored], metadata: dict[str, str], done: Any
) -> list[Any]:
    kinds = [(name, tensor.code, tensor.shape) for name, tensor in tensors.items()]
    arrays = [n for n, t in tensors.items() if t.is_array and t.code in EIGHT_BIT]
    said = metadata | ({_header.ARRAYS: json.dumps(arrays)} if arrays else {})
    first, entries = _write.layout(str(path), kinds, said)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write.write_at(descriptor, 0, first)
        for name, tensor in tensors.items():
            done(_write.write_at(descriptor, entries[name].start, on_host(tensor.array)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return list(entries.values())


def _shards(tensors: dict[str, Stored], most: int) -> list[list[str]]:
    """The names in each file; a tensor above the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder that was not renamed."""
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
