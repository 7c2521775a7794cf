"""Files of other kinds, recognised by their first bytes, and the way from each to safetensors.

Nothing is unpacked or unpickled: a pickle can run any program.
"""

from __future__ import annotations

import codecs
import itertools
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._header import LENGTH_BYTES, MOST_BYTES

# A tar has its magic number at byte 257.
HEAD_BYTES = 512


class Kind(NamedTuple):
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

_TORCH = Kind("a zip with a pickle, as torch.save writes it", _IN_TORCH)
_PICKLE = Kind("a pickle, as torch.save wrote it before 1.6", _IN_TORCH)
_NPZ = Kind("an npz of numpy", f"read it with `numpy.load` {_FROM_ARRAYS}")
_KERAS = Kind("a model of Keras 3", f"load it with Keras {_FROM_ARRAYS}")
_GGML = Kind("a GGML file of llama.cpp", _OTHERS_SAFETENSORS)
_ONNX = Kind("an ONNX model", _OTHERS_SAFETENSORS)
_TENSORFLOW = f"load it with TensorFlow {_FROM_ARRAYS}"
_VARIABLES = f"read it with `tf.train.load_variable` {_FROM_ARRAYS}"
_FLAX = f"read it with `flax.serialization.msgpack_restore` {_FROM_ARRAYS}"
_ARCHIVE = Kind("a compressed file or an archive", "unpack it, and name what was in it")
_LFS = Kind("a pointer of Git LFS, not the file itself", "run `git lfs pull` in the folder")
_PAGE = Kind("a web page", f"{_AGAIN}, from its download address, logged in where that is needed")
_INDEX = Kind("the index of a checkpoint", "name the folder that it lies in")
_JSON = Kind("a JSON text", f"name a safetensors file, or {_AGAIN}", weights=False)
_TEXT = Kind("a text", f"name a safetensors file, or {_AGAIN}", weights=False)

# orbax writes at least one of these names in each folder.
_ORBAX = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "array_metadatas"}
_RESTORE = f"restore it with orbax {_FROM_ARRAYS}"
# A folder may be a whole disk.
_LOOKED_AT, _LISTED = 200, 4

# First bytes of files with a magic number, and of others, asked in this order.
_BY_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (rb"GGUF", Kind("a GGUF file of llama.cpp", "name the file itself")),
    (rb"(lm|fm|tj)gg", _GGML),
    (
        rb"\x89HDF\r\n\x1a\n",
        Kind("an HDF5 file (Keras, TensorFlow)", f"read it with h5py {_FROM_ARRAYS}"),
    ),
    (rb"\x93NUMPY", Kind("an npy of numpy", _NPZ.remedy)),
    (rb".{4}TFL3", Kind("a TensorFlow Lite model", _OTHERS_SAFETENSORS)),
    (rb"PAR1", Kind("a Parquet table", _OTHERS_SAFETENSORS)),
    (rb"version https://git-lfs\.github\.com/spec/", _LFS),
    (rb"\x1f\x8b|.{4}1AY&SY|\x28\xb5\x2f\xfd|\xfd7zXZ\0|7z\xbc\xaf\x27\x1c|.{257}ustar", _ARCHIVE),
)
_BY_PATTERN: tuple[tuple[bytes, Kind], ...] = (
    (rb"\x80[\x02-\x05][\x8a\x95}\]c(X]", _PICKLE),
    (rb"\x08\x01\x12", Kind("a SavedModel of TensorFlow", _TENSORFLOW)),
    (rb"\x08[\x02-\x1f](\x12[\x00-\x40]|\x1a|\x3a|\x42|\x72)", _ONNX),
    (
        rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[A-Za-z_0-9]",
        Kind("a msgpack file of Flax", _FLAX),
    ),
    (rb"\x00{64}", Kind("made of zeros", f"{_AGAIN}: its download did not end")),
)
_BY_NAME: tuple[tuple[bytes, Kind], ...] = (
    (
        rb".*\.ckpt(-\d+)?\.(index|meta|data-\d+-of-\d+)\Z",
        Kind("a checkpoint of TensorFlow", _VARIABLES),
    ),
    (rb".*\.onnx\Z", _ONNX),
    (rb".*\.(pt|pth|pkl|pickle|ckpt)\Z", _PICKLE),
)


def check(path: str, head: bytes) -> None:
    """Refuses a file of another kind.

    Args:
      path: the file.
      head: its first `HEAD_BYTES` bytes, or all.

    Raises:
      CheckpointError: the file is of a known other kind.
    """
    writer = kind(os.path.basename(path), head)
    if writer is not None:
        needs = "a safetensors file is needed"
        raise CheckpointError(path, "", f"the file is {writer.words}", needs, writer.remedy)


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
        got = f"the folder has none itself, and {_listed(below)} below it have some"
        return _missing(folder, got, f"name one of these, {folder / below[0]}")
    steps = [name for name in names[:_LOOKED_AT] if name.isdigit()]
    if any((folder / step / mark).exists() for step in ("", *steps) for mark in _ORBAX):
        return _missing(folder, "the folder is a checkpoint of orbax", _RESTORE)
    kinds = {name: _kind_of(folder / name) for name in names[:_LOOKED_AT]}
    others = {name: one for name, one in kinds.items() if one is not None and one.weights}
    if others:
        name, first = next(iter(others.items()))
        rest = len(others) - 1
        more = f" (and {rest} such file{'s' * (rest > 1)})" if rest else ""
        return _missing(folder, f"{name} is {first.words}{more}", first.remedy)
    got = f"the folder has {_listed(names)} alone" if names else "the folder is empty"
    return _missing(folder, got, "check the path, or fetch the files")


def _missing(folder: pathlib.Path, got: str, remedy: str) -> CheckpointError:
    return CheckpointError(folder, "", got, "a safetensors file is needed", remedy)


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
    found = _first(_BY_MAGIC, head)
    if found is None and head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(name, head)
    by_name = os.fsencode(name)
    return found or _text(name, head) or _first(_BY_PATTERN, head) or _first(_BY_NAME, by_name)


def _first(table: Iterable[tuple[bytes, Kind]], begin: bytes) -> Kind | None:
    return next((kind for pattern, kind in table if re.match(pattern, begin, re.DOTALL)), None)


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
