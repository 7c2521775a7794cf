"""The error of a bad checkpoint: one sentence with the file and the tensor."""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn


class CheckpointError(ValueError):
    """A checkpoint contradicts itself, or needs a format this package cannot hold.

    Attributes:
      file: the file or folder at fault.
      tensor: name of the tensor at fault, or "" for the file as a whole.
      got: what is there instead.
      needs: the content needed instead.
      remedy: advice to the user.

    Example:
      >>> raise CheckpointError(
      ...     "a.safetensors", "w", "has 3 bytes", "8 are needed", "fetch it again"
      ... )
      Traceback (most recent call last):
      ...
      jaxfp8.checkpoint._errors.CheckpointError: a.safetensors: tensor 'w' has 3 bytes, but 8 are
      needed; fetch it again.
    """

    def __init__(
        self, file: str | os.PathLike[str], tensor: str, got: str, needs: str, remedy: str
    ) -> None:
        self.file, self.tensor = os.fspath(file), tensor
        self.got, self.needs, self.remedy = got, needs, remedy
        what = f"tensor {tensor!r} {got}" if tensor else got
        super().__init__(f"{self.file}: {what}, but {needs}; {remedy}.")

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.file, self.tensor, self.got, self.needs, self.remedy)


def refuse(file: str, tensor: str, got: str, needs: str, remedy: str) -> NoReturn:
    """Raises `CheckpointError`."""
    raise CheckpointError(file, tensor, got, needs, remedy)


def from_json(text: str | bytes) -> Any:
    """The content of a text; None for one that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
