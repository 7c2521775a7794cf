"""From any readable format to that of servers. Codes stay codes; one weight at a time.

Servers hold e4m3 with a scale by tensor, row or block, MXFP8, and int8 with a scale by row or by
group of a row. Beside floats they want int8 packed: four codes, each plus 128, in an int32.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes import recipes
from jaxfp8._value import dtypes
from jaxfp8._value.changes import Change, Changes
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import (
    _compressed,
    _dtypes,
    _folder,
    _gguf_names,
    _kept,
    _names,
    _quantize,
    _save,
    _write,
)
from jaxfp8.checkpoint._compressed import Held, Inputs
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._grain import FP8
from jaxfp8.checkpoint._load import Checkpoint
from jaxfp8.checkpoint._stored import Lazy, Stored, stored

_OPERATION = "jaxfp8.checkpoint.convert"
_FLOAT = _dtypes.BY_CODE["BF16"]
_QUANTIZE = "quantize the model's float version with `jaxfp8.checkpoint.quantize`"
_FLAG = "pass `floats=True` to write it in bfloat16"
_DYNAMIC = {"float": recipes.FP8_DYNAMIC, "int": recipes.INT8_DYNAMIC}


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "compressed-tensors",
    floats: bool = False,
    unscaled: bool = False,
    overwrite: bool = False,
    shard_bytes: int = _save.SHARD_BYTES,
) -> Changes:
    """Writes a checkpoint of any readable format in the form of vLLM and transformers.

    Codes are never widened: e4m3 keeps its bytes, and int8 beside float activations is packed.
    Scales keep their values; exponents outside MXFP8 become float32. The treatment of activations
    is the source's. config.json and other files are copied; of a GGUF file, config.json is made
    from its metadata. The folder is written under a temporary name and renamed once it is safe on
    the disk.

    Args:
      src: as for `load`.
      dst: the folder to make.
      format: "compressed-tensors".
      floats: whether to write in bfloat16 the 8-bit weights without a place in servers: e5m2 and
        uint8, stacked experts, tables, heads, routers. By default they are refused.
      unscaled: as for `load`: FP8 weights without a scale get the scale 1, and FP8 vectors are
        written in bfloat16, of the same values.
      overwrite: whether to replace an existing `dst`.
      shard_bytes: size limit of a file, before another begins.

    Returns:
      The form of each weight; print it.

    Raises:
      CheckpointError: the source does not load, servers cannot hold one of its weights, or `dst` is
        taken or has the source in it.
      ValueError: `format` is another one.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp()
      >>> w = jaxfp8.quantize(jnp.ones((8, 64)), jnp.int8, tiled_axes={0: 1, 1: 32})
      >>> jaxfp8.checkpoint.save(folder + "/int8", {"up.weight": w})
      >>> convert(folder + "/int8", folder + "/served").changed[0].recipe
      'pack-quantized, group'
    """
    _save.check_format(_OPERATION, format)
    source, place = pathlib.Path(src), pathlib.Path(dst)
    _quantize.check_apart(source, place)
    _write.check_free(place, overwrite)
    cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

    def add(made: pathlib.Path) -> None:
        _quantize.copy_others(source, made)

    with Checkpoint(src, sharding=cpu, unscaled=unscaled) as checkpoint:
        said = checkpoint.config()
        if checkpoint.is_gguf and not said:
            needs = "servers need Hugging Face's names"
            remedy = "convert the model's safetensors files instead"
            raise CheckpointError(src, "", f"the file is {checkpoint.format.name}", needs, remedy)
        plan = _Plan(checkpoint, floats, unscaled)
        config = {key: x for key, x in said.items() if key not in _folder.QUANTIZATIONS}
        _save.save_folder(place, plan.tensors, plan.quantization(), config, shard_bytes, add)
    return Changes(rows=tuple(plan.rows))


class _Plan:
    """The new checkpoint: its tensors by name, and a row for each weight."""

    def __init__(self, checkpoint: Checkpoint, floats: bool, unscaled: bool) -> None:
        self._checkpoint, self._floats, self._unscaled = checkpoint, floats, unscaled
        self._last: tuple[str, Any] = ("", None)
        shapes = {name: checkpoint.shape(name) for name in checkpoint}
        weights = {n: x for n, x in shapes.items() if isinstance(x, QArray)}
        self._forms = _compressed.forms(weights)
        self._why = self._why_in_floats(shapes)
        self._inputs = self._activations(shapes)
        self.tensors: dict[str, Stored] = {}
        self.rows: list[Change] = []
        for name, struct in shapes.items():
            if isinstance(struct, QArray):
                self._add_weight(name, struct)
            elif name != _gguf_names.ROPE_FACTORS and not self._is_unused_scale(name):
                self._add_array(name)

    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config; None without anything in 8 bits.

        Raises:
          CheckpointError: servers do not hold the cache of attention so.
        """
        cache = self._checkpoint.format.cache
        if isinstance(cache, str):
            needs = "servers hold caches in FP8"
            remedy = "remove the key, and the cache stays in floats"
            got = f"kv_cache_quant_algo is {cache!r}"
            raise CheckpointError(self._checkpoint.path, "", got, needs, remedy)
        if not self._forms and not cache:
            return None
        static = [name for name in self.tensors if _names.last(name) == "input_scale"]
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        wide = _save.wide_modules(shapes, self._forms)
        made = _compressed.config(self._forms, wide, self._inputs, static)
        return {**made, "kv_cache_scheme": cache}

    def _why_in_floats(self, shapes: dict[str, Any]) -> dict[str, str]:
        """By weight, why servers cannot hold it; these leave the forms.

        Raises:
          CheckpointError: there is one, and nobody asked for floats.
        """
        kept = _kept.reasons({name: tuple(x.shape) for name, x in shapes.items()})
        found = {n: _why_not(n, shapes[n].shape, form, kept) for n, form in self._forms.items()}
        found = {name: why for name, why in found.items() if why}
        if found and not self._floats:
            name, why = next(iter(found.items()))
            more = f"{_FLAG} ({len(found) - 1} more)" if len(found) > 1 else _FLAG
            what, needs = f"is {shapes[name]}; {why}", "a server has to hold it"
            raise CheckpointError(self._checkpoint.path, name, what, needs, more)
        for name in found:
            del self._forms[name]
        return found

    def _activations(self, shapes: dict[str, Any]) -> dict[str, Inputs | None]:
        """By weight, the source's treatment of its input in a server."""
        found: dict[str, Inputs | None] = {}
        for name, form in self._forms.items():
            item = self._checkpoint.item(name)
            if item.layout.inputs:
                found[name] = item.layout.inputs
                continue
            note = item.layout.activations
            scale = _names.joined(_names.module_of(name), "input_scale")
            how = recipes.FP8_BLOCK if form.strategy == "block" else _DYNAMIC[form.kind]
            inputs: Any = how.activation
            if scale in shapes and note.startswith(("static", "per tensor")):
                inputs = dataclasses.replace(inputs, granularity="tensor", static=True)
            found[name] = None if note in ("", "floats") or form.is_mx else inputs
        return found

    def _is_unused_scale(self, name: str) -> bool:
        """Whether it is the scale of inputs with dynamic scales."""
        if _names.last(name) != "input_scale":
            return False
        inputs = self._inputs.get(_names.joined(_names.module_of(name), "weight"))
        if inputs is None:
            return True
        is_static = '"dynamic": false' in inputs if isinstance(inputs, str) else inputs.static
        return not is_static

    def _add_array(self, name: str) -> None:
        entry = self._checkpoint.item(name).value.entry
        widens = self._unscaled and entry.code in FP8

        def values() -> np.ndarray:
            read = self._checkpoint.raw(entry.name)
            return read.astype(_FLOAT) if widens else read

        code = "BF16" if widens else entry.code
        lazy = Lazy(entry.shape, np.dtype(object), values)
        self.tensors[name] = Stored(lazy, code, entry.shape, is_array=True)

    def _add_weight(self, name: str, struct: QArray) -> None:
        if name in self._why:
            self._add_floats(name, struct, self._why[name])
            return
        form = self._forms[name] = self._served(name, self._forms[name])
        lazies = QArray(
            *(self._part(name, part, form, struct) for part in ("qvalue", "scale", "zero_point")),
            tiles=struct.tiles,
        )
        made = stored(name, lazies, form)
        self.tensors |= made
        how = f"{_compressed.format_of(form)}, {form.strategy}"
        self._note(name, struct, struct.qvalue.dtype, made, how)

    def _served(self, name: str, form: Held) -> Held:
        """The form of a weight in a server."""
        packed = form.kind == "int" and self._inputs[name] is None
        # Packed weights of one scale have it once for each row.
        strategy = "channel" if packed and form.strategy == "tensor" else form.strategy
        return dataclasses.replace(form, exponents=form.is_mx, packed=packed, strategy=strategy)

    def _add_floats(self, name: str, struct: QArray, why: str) -> None:
        def widened() -> np.ndarray:
            return np.asarray(dequantize(self._read(name), jnp.bfloat16))

        lazy = Lazy(struct.shape, _FLOAT, widened)
        self.tensors[name] = Stored(lazy, "BF16", struct.shape)
        self._note(name, struct, _FLOAT, {name: self.tensors[name]}, f"in floats: {why}")

    def _note(
        self, name: str, struct: QArray, after: Any, made: dict[str, Stored], recipe: str
    ) -> None:
        row = Change(
            path=name,
            kind="",
            shape=struct.shape,
            before=np.dtype(struct.qvalue.dtype).name,
            after=np.dtype(after).name,
            recipe=recipe,
            reason="",
            bytes_before=self._checkpoint.nbytes(name),
            bytes_after=sum(tensor.nbytes for tensor in made.values()),
        )
        self.rows.append(row)

    def _part(self, name: str, part: str, form: Held, struct: QArray) -> Any:
        """One array of a weight."""
        leaf = getattr(struct, part)
        if leaf is None:
            return None
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
        if part == "scale" and dtype == dtypes.E8M0 and not form.is_mx:
            dtype = np.dtype(np.float32)
        if part == "zero_point":
            dtype = np.dtype(np.int8)
        if form.packed and math.prod(shape) == 1:
            shape = (struct.shape[0], 1)

        def make() -> np.ndarray:
            values = np.asarray(getattr(self._read(name), part))
            if part == "zero_point" and (values != values.astype(np.int8)).any():
                got, needs = "has zero points past int8", "servers hold int8"
                raise CheckpointError(self._checkpoint.path, name, got, needs, _QUANTIZE)
            return np.broadcast_to(values.astype(dtype, copy=False), shape)

        return Lazy(shape, dtype, make)

    def _read(self, name: str) -> Any:
        """A weight; the last one is kept, for its scale and its zero point."""
        if self._last[0] != name:
            self._last = ("", None)
            self._last = (name, self._checkpoint[name])
        return self._last[1]


def _why_not(name: str, shape: Shape, form: Held, kept: Mapping[str, str]) -> str:
    """Why servers cannot hold a weight; "" if they can."""
    usual = (dtypes.FLOAT8[0], dtypes.EIGHT_BIT_INTS[0])
    if form.dtype not in usual:
        return f"servers do not hold its codes ({dtypes.names(usual)} alone)"
    if not _save.is_linear(name, shape):
        return "it is no layer's weight [N, K]"
    if name in kept:
        return f"{kept[name]}; servers hold these in floats"
    if form.kind == "int" and form.strategy == "block":
        return "servers do not hold blocks of int8"
    if form.kind == "float" and form.strategy == "group" and not form.is_mx:
        return "servers do not hold groups of e4m3"
    return ""
