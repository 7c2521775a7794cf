"""Files and folders of other kinds are named, with the way to safetensors."""

import gzip
import io
import json
import pathlib
import pickle
import tarfile
import zipfile

import flax.serialization
import numpy as np
import pytest
from checkpoint.files import codes, file_bytes, folder, scales

from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError


class Bomb:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("unpickled"),)


def zipped(member, data=b"x"):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(member, data)
    return made.getvalue()


def tarred():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        file.addfile(tarfile.TarInfo("model.bin"))
    return made.getvalue()


def numpys(save):
    made = io.BytesIO()
    save(made, np.ones(3))
    return made.getvalue()


# The first number of a file that torch wrote before its zips.
OLD_TORCH = 0x1950A86A20F9469CFC6C
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
KINDS = {
    "GGML": ("m.bin", b"lmgg" + bytes(99), "GGML", "safetensors files instead"),
    "torch": ("pytorch_model.bin", zipped("archive/data.pkl"), "torch.save", "weights_only=True"),
    "torch in any name": ("model", zipped("m/version"), "torch.save", "save_file"),
    "old torch": ("m.bin", pickle.dumps(OLD_TORCH, 2), "a pickle", "weights_only=True"),
    "pickle": ("m.pkl", pickle.dumps({"a": Bomb()}), "a pickle", "weights_only=True"),
    "HDF5": ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5", "h5py"),
    "ONNX": ("m.onnx", b"\x08\x09\x12\x07pytorch\x1a\x051.2.3", "ONNX", "safetensors files"),
    "ONNX in any name": ("model", b"\x08\x09\x12\x07pytorch\x1a\x051.2", "ONNX", "safetensors"),
    "SavedModel": ("saved_model.pb", b"\x08\x01\x12\xc0\x01" + bytes(99), "TensorFlow", "load it"),
    "TensorFlow": ("m.ckpt.data-00000-of-00001", b"\x9a\x01" * 99, "TensorFlow", "tf.train"),
    "TFLite": ("m.tflite", b"\x1c\0\0\0TFL3" + bytes(99), "TensorFlow Lite", "safetensors"),
    "npy": ("w.npy", numpys(np.save), "npy", "numpy.load"),
    "npz": ("w.npz", numpys(lambda file, a: np.savez(file, w=a)), "npz", "numpy.load"),
    "keras": ("m.keras", zipped("metadata.json"), "Keras 3", "load it with Keras"),
    "msgpack": (
        "flax_model.msgpack",
        flax.serialization.msgpack_serialize({"params": {"w": np.ones(3)}}),
        "msgpack file of Flax",
        "msgpack_restore",
    ),
    "Git LFS": ("model.safetensors", POINTER, "Git LFS", "git lfs pull"),
    "page": ("model.safetensors", b"\n<!DOCTYPE html><html>", "web page", "fetch the file again"),
    "gzip": ("model.safetensors.gz", gzip.compress(b"abc" * 99), "archive", "unpack it"),
    "tar": ("m.nemo", tarred(), "archive", "unpack it"),
    "zip": ("m.zip", zipped("model.safetensors"), "archive", "unpack it"),
    "index": (
        "weights.json",
        json.dumps({"weight_map": {}}).encode(),
        "the index of a checkpoint",
        "name the folder",
    ),
    "JSON": ("config.json", b'{"model_type": "llama"}', "JSON", "name a safetensors file"),
    "German text": ("LIESMICH", "\u00e4".encode() * 400, "a text", "name a safetensors file"),
    "error as text": ("model.safetensors", b"Entry not found", "a text", "fetch the file again"),
    "zeros": ("model.safetensors", bytes(4096), "made of zeros", "did not end"),
}


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS.keys())
def test_a_file_of_another_kind_is_named(tmp_path, monkeypatch, case):
    name, data, words, remedy = case
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(tmp_path / name)
    assert words in refused.value.got and remedy in refused.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == [name]  # nothing was unpickled


@pytest.mark.parametrize("name", ["GGML", "torch", "HDF5", "msgpack", "npz"])
def test_a_folder_of_such_files_names_them(tmp_path, name):
    file, data, words, remedy = KINDS[name]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(data)
    (tmp_path / f"z{file}").write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(tmp_path)
    assert f"{file} is " in refused.value.got and words in refused.value.got
    assert "and 1 such file" in refused.value.got and remedy in refused.value.remedy


FOLDERS = {
    "nothing": ([], "the folder is empty"),
    "texts": (["config.json", "README.md"], "the folder has README.md, config.json alone"),
    "orbax": (["_METADATA", "d/0"], "a checkpoint of orbax"),
    "orbax by steps": (["7/_CHECKPOINT_METADATA"], "a checkpoint of orbax"),
    "parts": (["unet/m.safetensors", "vae/m.safetensors"], "unet, vae below it have some"),
    "cache": (["refs/main", "snapshots/1f/m.safetensors"], "snapshots/1f below it have some"),
}


@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_without_safetensors_says_what_it_has(tmp_path, case):
    names, found = case
    for name in names:
        path = tmp_path / "m" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (tmp_path / "m").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=found):
        checkpoint.load(tmp_path / "m")


def test_a_folder_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "is_file", refused)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        checkpoint.load(tmp_path)


def test_what_is_no_regular_file_is_named():
    with pytest.raises(CheckpointError, match="no regular file"):
        checkpoint.load("/dev/null")


@pytest.mark.parametrize("length", [0x088B1F, 0x5D0280, 0x120108])
def test_a_header_whose_length_looks_like_another_kind_is_read(tmp_path, length):
    data = file_bytes({"a": scales(3)})
    size = int.from_bytes(data[:8], "little")
    whole = length.to_bytes(8, "little") + data[8 : 8 + size] + b" " * (length - size)
    (tmp_path / "model.safetensors").write_bytes(whole + data[8 + size :])
    np.testing.assert_array_equal(checkpoint.load(tmp_path)["a"], scales(3))


def test_others_beside_safetensors_do_not_matter(tmp_path):
    path = folder(tmp_path / "m", {"a.weight": codes((4, 4)), "a.weight_scale": scales(())})
    (path / "pytorch_model.bin").write_bytes(KINDS["torch"][1])
    assert list(checkpoint.load(path)) == ["a.weight"]
