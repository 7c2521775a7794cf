"""Atomic writes: a reader, or the next run, never finds half a file."""

from __future__ import annotations

import contextlib
import os
import tempfile


def write_whole(path: str, content: str | bytes) -> None:
    """Write a whole file or none: the old file stays until the new one is on disk."""
    folder, name = os.path.split(os.path.abspath(path))
    data = content.encode() if isinstance(content, str) else content
    descriptor, part = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o666 & ~umask())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # already renamed
            os.unlink(part)


def why_not_written(path: str) -> str | None:
    """Why no file can be written at a path; None if nothing is known to be in the way."""
    folder = os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path):
        return "that is a folder; give the name of a file"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK) else f"no files can be made in {folder}"


def umask() -> int:
    """The permission bits masked from new files of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
