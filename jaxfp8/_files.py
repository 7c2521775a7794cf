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
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
            part = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        if part is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
