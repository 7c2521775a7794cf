"""Writing files so that a reader, or the next run, finds a whole one."""

from __future__ import annotations

import contextlib
import os
import tempfile


def write_whole(path: str, content: str | bytes) -> None:
    """Write a whole file or none: what stood there before stays until all of it is safe.

    Raises:
      OSError: it cannot be written.
    """
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
        with contextlib.suppress(FileNotFoundError):  # where all went well
            os.unlink(part)


def umask() -> int:
    """The rights that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
