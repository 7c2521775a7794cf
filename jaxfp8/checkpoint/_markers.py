"""Marks of weights outside the configuration: ComfyUI's tensors and torchao's metadata.

Both may name layouts with familiar tensors and another meaning, such as rotated weights or scales
in the order of a kernel. Unknown layouts are therefore refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxfp8.checkpoint._errors import CheckpointError, from_json
from jaxfp8.checkpoint._file import File
from jaxfp8.checkpoint._header import Entry

# The layouts of ComfyUI that are read, and the dtype of each.
_COMFY = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
# These choose a kernel, and change no stored number.
_HARMLESS = ("format", "full_precision_matrix_mult")
_COMFY_METADATA = "_quantization_metadata"
_TORCHAO = ("Tensor", "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "MXTensor")
_MARK = ".comfy_quant"
_MOST_BYTES = 1 << 16
_REMEDY = "load a version of the model whose weights are float8_e4m3fn with plain scales"


def check(files: Mapping[str, File], entries: Mapping[str, Entry]) -> str:
    """Refuses unknown layouts. Returns the writer that marks show; "" without marks.

    Raises:
      CheckpointError: a mark cannot be read, names an unknown layout, or another dtype.
    """
    writer = ""
    for file in files.values():
        for layer, said in _comfy(file, entries):
            _check_comfy(file.path, layer, said, entries)
            writer = "ComfyUI"
        for name, text in file.header.metadata.items():
            kind = _torchao_type(text)
            if kind is not None and kind not in _TORCHAO:
                needs = f"one of {', '.join(_TORCHAO)} is read"
                raise CheckpointError(file.path, name, f"is a {kind} of torchao", needs, _REMEDY)
    return writer


def _check_comfy(path: str, layer: str, said: dict[str, Any], entries: Mapping[str, Entry]) -> None:
    extra = [key for key, value in said.items() if value and key not in _HARMLESS]
    code = _COMFY.get(str(said.get("format")))
    if code is None or extra:
        got = f"is said to be {json.dumps(said)[:120]}"
        needs = f"one of {', '.join(_COMFY)} is read"
        raise CheckpointError(path, layer, got, needs, _REMEDY)
    weight = entries.get(f"{layer.removesuffix(_MARK)}.weight")
    if weight is not None and weight.code != code:
        needs = f"its layer is said to be {said['format']}, which is {code}"
        raise CheckpointError(path, weight.name, f"is {weight}", needs, "fetch the file again")


def _comfy(file: File, entries: Mapping[str, Entry]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The marks of layers, in tensors of their own or in the metadata."""
    for entry in file.header.entries:
        if entry.name.endswith(_MARK) and entries[entry.name].file == file.path:
            text = file.read(entry).tobytes() if entry.nbytes <= _MOST_BYTES else b""
            yield entry.name, _object(file.path, entry.name, text)
    if _COMFY_METADATA in file.header.metadata:
        content = _object(file.path, "", file.header.metadata[_COMFY_METADATA])
        layers = content.get("layers", {})
        for layer, said in layers.items() if isinstance(layers, dict) else ():
            yield layer, said if isinstance(said, dict) else {"format": said}


def _object(path: str, name: str, text: str | bytes) -> dict[str, Any]:
    content = from_json(text)
    if isinstance(content, dict):
        return content
    got = "does not say what its layer is" if name else f"{_COMFY_METADATA} cannot be read"
    raise CheckpointError(path, name, got, "a JSON object is needed", "fetch the file again")


def _torchao_type(text: str) -> str | None:
    """The class of a tensor in torchao's metadata; None for other metadata."""
    if not text.startswith('{"_type"'):
        return None
    content = from_json(text)
    if content is None:
        return "tensor that cannot be read"
    kind = str(content.get("_type")).rpartition(".")[2]
    data = content.get("_data")
    is_swizzled = isinstance(data, dict) and data.get("is_swizzled_scales")
    return f"{kind} with scales in the order of a kernel" if is_swizzled else kind
