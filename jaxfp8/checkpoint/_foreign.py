"""Files of other kinds, recognised by their first bytes, and the way from each to safetensors.

Nothing is unpacked or unpickled: a pickle can run any program.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import os
import pathlib
import re

from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._header import LENGTH_BYTES, MOST_BYTES

# A tar has its magic number at byte 257.
HEAD_BYTES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Attributes:
      words: its name, with an article.
      remedy: the way to a readable file.
      weights: whether it may hold the weights of a model. Text files next to a model do not.
    """

    words: str
    remedy: str
    weights: bool = True


_OTHERS_SAFETENSORS = "fetch the model's safetensors files instead"
_IN_TORCH = (
    "fetch the model's safetensors files instead, or write them where torch is installed: "
    '`safetensors.torch.save_file(torch.load(file, weights_only=True), "model.safetensors")`'
)
_FROM_ARRAYS = "and pass the arrays to `jaxfp8.checkpoint.save`"
_AGAIN = "fetch the file again"

_TORCH = Kind(words="a zip with a pickle, as torch.save writes it", remedy=_IN_TORCH)
_PICKLE = Kind(words="a pickle, as torch.save wrote it before 1.6", remedy=_IN_TORCH)
_NPZ = Kind(words="an npz of numpy", remedy=f"read it with `numpy.load` {_FROM_ARRAYS}")
_NPY = Kind(words="an npy of numpy", remedy=f"read it with `numpy.load` {_FROM_ARRAYS}")
_KERAS = Kind(words="a model of Keras 3", remedy=f"load it with Keras {_FROM_ARRAYS}")
_GGUF = Kind(words="a GGUF file of llama.cpp", remedy="name the file itself")
_GGML = Kind(words="a GGML file of llama.cpp", remedy=_OTHERS_SAFETENSORS)
_HDF5 = Kind(words="an HDF5 file (Keras, TensorFlow)", remedy=f"read it with h5py {_FROM_ARRAYS}")
_ONNX = Kind(words="an ONNX model", remedy=_OTHERS_SAFETENSORS)
_TENSORFLOW = Kind(
    words="a SavedModel of TensorFlow", remedy=f"load it with TensorFlow {_FROM_ARRAYS}"
)
_CHECKPOINT = Kind(
    words="a checkpoint of TensorFlow",
    remedy=f"read it with `tf.train.load_variable` {_FROM_ARRAYS}",
)
_TFLITE = Kind(words="a TensorFlow Lite model", remedy=_OTHERS_SAFETENSORS)
_MSGPACK = Kind(
    words="a msgpack file of Flax",
    remedy=f"read it with `flax.serialization.msgpack_restore` {_FROM_ARRAYS}",
)
_PARQUET = Kind(words="a Parquet table", remedy=_OTHERS_SAFETENSORS)
_ARCHIVE = Kind(
    words="a compressed file or an archive", remedy="unpack it, and name what was in it"
)
_POINTER = Kind(
    words="a pointer of Git LFS, not the file itself",
    remedy="run `git lfs pull` in the folder",
)
_PAGE = Kind(
    words="a web page",
    remedy=f"{_AGAIN}, from its download address, logged in where that is needed",
)
_INDEX = Kind(words="the index of a checkpoint", remedy="name the folder that it lies in")
_JSON = Kind(words="a JSON text", remedy=f"name a safetensors file, or {_AGAIN}", weights=False)
_TEXT = Kind(words="a text", remedy=f"name a safetensors file, or {_AGAIN}", weights=False)
_ZEROS = Kind(words="made of zeros", remedy=f"{_AGAIN}: its download did not end")

# orbax writes at least one of these names in each folder.
_ORBAX = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "array_metadatas"}
_RESTORE = f"restore it with orbax {_FROM_ARRAYS}"
# A folder may be a whole disk.
_LOOKED_AT, _LISTED = 200, 4

_BY_MAGIC: tuple[tuple[bytes, int, Kind], ...] = (
    (b"GGUF", 0, _GGUF),
    (b"lmgg", 0, _GGML),
    (b"fmgg", 0, _GGML),
    (b"tjgg", 0, _GGML),
    (b"\x89HDF\r\n\x1a\n", 0, _HDF5),
    (b"\x93NUMPY", 0, _NPY),
    (b"TFL3", 4, _TFLITE),
    (b"PAR1", 0, _PARQUET),
    (b"version https://git-lfs.github.com/spec/", 0, _POINTER),
    (b"\x1f\x8b", 0, _ARCHIVE),
    (b"1AY&SY", 4, _ARCHIVE),
    (b"\x28\xb5\x2f\xfd", 0, _ARCHIVE),
    (b"\xfd7zXZ\0", 0, _ARCHIVE),
    (b"7z\xbc\xaf\x27\x1c", 0, _ARCHIVE),
    (b"ustar", 257, _ARCHIVE),
)
# Kinds without a magic number, asked in this order.
_BY_PATTERN: tuple[tuple[str, Kind], ...] = (
    (r"\x80[\x02-\x05][\x8a\x95}\]c(X]", _PICKLE),
    (r"\x08\x01\x12", _TENSORFLOW),
    (r"\x08[\x02-\x1f](\x12[\x00-\x40]|\x1a|\x3a|\x42|\x72)", _ONNX),
    (r"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[A-Za-z_0-9]", _MSGPACK),
    (r"\x00{64}", _ZEROS),
)
_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r".*\.ckpt(-\d+)?\.(index|meta|data-\d+-of-\d+)", _CHECKPOINT),
    (r".*\.onnx", _ONNX),
    (r".*\.(pt|pth|pkl|pickle|ckpt)", _PICKLE),
)


def check(path: str, head: bytes) -> None:
    """Refuses a file of another kind.

    Args:
      path: the file.
      head: its first `HEAD_BYTES` bytes, or all.

    Raises:
      CheckpointError: the file is of a known other kind.
    """
    found = kind(os.path.basename(path), head)
    if found is not None:
        needs = "a safetensors file is needed"
        raise CheckpointError(path, "", f"the file is {found.words}", needs, found.remedy)


def without(folder: pathlib.Path) -> CheckpointError:
    """The error for a folder without a safetensors file: it names the files found instead."""
    names = sorted(path.name for path in folder.iterdir())
    below = sorted(
        {
            str(path.parent.relative_to(folder))
            for pattern in ("*/*.safetensors", "*/*/*.safetensors")
            for path in itertools.islice(folder.glob(pattern), _LOOKED_AT)
        }
    )
    if below:
        found = f"the folder has none itself, and {_listed(below)} below it have some"
        return _missing(folder, found, f"name one of these, {folder / below[0]}")
    steps = [name for name in names[:_LOOKED_AT] if name.isdigit()]
    if any((folder / step / mark).exists() for step in ("", *steps) for mark in _ORBAX):
        return _missing(folder, "the folder is a checkpoint of orbax", _RESTORE)
    kinds = {name: _kind_of(folder / name) for name in names[:_LOOKED_AT]}
    others = {name: found for name, found in kinds.items() if found is not None and found.weights}
    if others:
        name, first = next(iter(others.items()))
        rest = len(others) - 1
        more = f" (and {rest} such file{'s' * (rest > 1)})" if rest else ""
        return _missing(folder, f"{name} is {first.words}{more}", first.remedy)
    found = f"the folder has {_listed(names)} alone" if names else "the folder is empty"
    return _missing(folder, found, "check the path, or fetch the files")


def _missing(folder: pathlib.Path, found: str, remedy: str) -> CheckpointError:
    return CheckpointError(folder, "", found, "a safetensors file is needed", remedy)


def _kind_of(path: pathlib.Path) -> Kind | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return kind(path.name, file.read(HEAD_BYTES))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def kind(name: str, head: bytes) -> Kind | None:
    """The kind of a file other than safetensors; None for safetensors and for unknown files.

    Args:
      name: its name. It decides between kinds with equal first bytes.
      head: its first `HEAD_BYTES` bytes, or all.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length <= MOST_BYTES and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return None
    for magic, place, found in _BY_MAGIC:
        if head[place : place + len(magic)] == magic:
            return found
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(name, head)
    for look in (_text, _by_pattern, _by_name):
        if (other := look(name, head)) is not None:
            return other
    return None


def _zip(name: str, head: bytes) -> Kind:
    """The kind of a zip, from the name of its first member."""
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if first.endswith(b".npy") or name.endswith(".npz"):
        return _NPZ
    if name.endswith(".keras") or first in (b"metadata.json", b"config.json"):
        return _KERAS
    is_torch = b"data.pkl" in first or first.endswith((b"/version", b".format_version"))
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    return _TORCH if is_torch or name.endswith(suffixes) else _ARCHIVE


def _text(name: str, head: bytes) -> Kind | None:
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if re.match(rb"<(!doctype|html|\?xml|head|body|!--)", begin):
        return _PAGE
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may be cut
    except UnicodeDecodeError:
        return None
    if not text or not all(sign.isprintable() or sign in "\t\r\n" for sign in text):
        return None
    if begin[:1] not in (b"{", b"["):
        return _TEXT
    return _INDEX if name.endswith(".index.json") or '"weight_map"' in text else _JSON


def _by_pattern(name: str, head: bytes) -> Kind | None:
    text = head.decode("latin-1")
    return next((k for pattern, k in _BY_PATTERN if re.match(pattern, text, re.DOTALL)), None)


def _by_name(name: str, head: bytes) -> Kind | None:
    return next((k for pattern, k in _BY_NAME if re.fullmatch(pattern, name)), None)
