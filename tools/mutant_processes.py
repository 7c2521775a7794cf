"""Shell commands of tools/mutants.py, which end when it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path


class Processes:
    """Commands in process groups of their own, which all end when this program is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def run(
        self,
        command: str,
        folder: Path,
        environment: dict[str, str] | None = None,
        limit: float | None = None,
    ) -> tuple[int | None, str]:
        """The status (None past the time limit) and output of a shell command."""
        with self._lock:
            if self.stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            _end(process)
            return None, process.communicate()[0]
        finally:
            with self._lock:
                self._running.discard(process)

    def build(self, command: str, folder: Path) -> tuple[int, str]:
        """The same without a limit."""
        status, output = self.run(command, folder)
        return status or 0, output

    def stop(self) -> None:
        """Ends all that runs, and starts nothing more."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
