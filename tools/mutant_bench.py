"""Where tools/mutants.py tries mutants: builds them into copies of the sources and runs tests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mutant_build import Build, BuildError
from mutant_processes import Processes
from mutant_report import BROKEN, ERROR, KILLED, SURVIVED, Outcome
from mutant_table import ROOT, Mutant

# Not copied: environments, what was built, caches.
_LEFT_OUT = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
_LIBRARY = "jaxfp8/_lib/libjaxfp8_cpu.so"
_OPTIONS = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
_NO_TESTS = (4, 5)  # of pytest: no such file or option; none was collected
# An editable install finds the package in its own checkout, before PYTHONPATH.
_SHIM = """import sys
sys.meta_path[:] = [
    f for f in sys.meta_path if "jaxfp8" not in getattr(f, "known_source_files", ())
]
"""
# The first test that failed, as pytest and as the C++ programs say it.
_FAILURE = re.compile(r"^(?:FAILED|ERROR):? (.+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command: whether it passed, failed, or ran no test; what failed; how long it took."""

    status: str
    detail: str
    seconds: float


class Bench:
    """Where mutants are tried: the unchanged copy, its programs, and a copy for each mutant."""

    def __init__(self, work: Path, python: str, jobs: int) -> None:
        self.work, self.python, self.jobs = work, python, jobs
        self.base = work / "base"
        self.processes = Processes()
        self._pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._known: dict[str, Any] = {}

    def prepare(self) -> None:
        """Copies the sources and builds the library; what an earlier run built is used again."""
        old = self.work / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.base.exists():
            self.base.rename(old)
        _copy(ROOT, self.base, _keeping_time_of(old, self.base))
        if (old / "build").exists():
            (old / "build").rename(self.base / "build")
        shutil.rmtree(old, ignore_errors=True)
        paths = self.work / "path"
        paths.mkdir(exist_ok=True)
        (paths / "sitecustomize.py").write_text(_SHIM)
        library = self.base / _LIBRARY
        library.parent.mkdir(exist_ok=True)
        shutil.copy2(self._library().make(self.jobs), library)

    def try_all(
        self, mutants: Sequence[Mutant], extra: dict[str, tuple[str, ...]]
    ) -> Iterator[Any]:
        """The outcome of each mutant, as they become known; `extra` runs on what survives."""
        # The others run on what survives the first, if anything does.
        for command in dict.fromkeys(mutant.tests[0] for mutant in mutants):
            self._pool.submit(self._unchanged, command)
        # Those that are compiled take longest.
        ordered = sorted(mutants, key=lambda m: m.suite != "native")
        tried = [self._pool.submit(self._try, m, extra.get(m.suite, ())) for m in ordered]
        for future in concurrent.futures.as_completed(tried):
            yield future.result()

    def close(self) -> None:
        """Ends what runs and removes the copies of mutants."""
        self.processes.stop()
        self._pool.shutdown(cancel_futures=True)
        for folder in self.work.glob("m-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _try(self, mutant: Mutant, extra: Sequence[str]) -> Outcome:
        start, copy = time.monotonic(), self.work / f"m-{mutant.id}"
        try:
            verdict, by = self._verdict(mutant, copy, extra)
        except BuildError as error:
            verdict, by = BROKEN, _first_error(str(error))
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return Outcome(mutant, verdict, by, time.monotonic() - start)

    def _verdict(self, mutant: Mutant, copy: Path, extra: Sequence[str]) -> tuple[str, str]:
        shutil.rmtree(copy, ignore_errors=True)
        _copy(self.base, copy)
        text = mutant.applied(copy)
        (copy / mutant.file).write_text(text)
        if mutant.file.endswith(".py"):
            try:
                compile(text, mutant.file, "exec")
            except SyntaxError as error:
                raise BuildError(str(error)) from error
        for command in (*mutant.tests, *extra):
            unchanged = self._unchanged(command)
            if unchanged.status != "passes":
                return ERROR, f"`{command}` {unchanged.status} without it: {unchanged.detail}"
            ran = self._run(command, copy, mutant, 60 + 5 * unchanged.seconds)
            if ran.status != "passes":
                return KILLED, ran.detail
        return SURVIVED, ""

    def _unchanged(self, command: str) -> Ran:
        """The command on the unchanged sources, run once."""

        def run() -> Ran:
            try:
                return self._run(command, self.base)
            except BuildError as error:
                return Ran("does not build", _first_error(str(error)), 0)

        ran: Ran = self._do_once(f"unchanged: {command}", run)
        return ran

    def _run(
        self, command: str, copy: Path, mutant: Mutant | None = None, limit: float | None = None
    ) -> Ran:
        """Runs a command on a copy: "pytest ..." or "check PROGRAM ...", of ffi/tests/cpu."""
        runner, *words = shlex.split(command)
        if runner == "pytest":
            if mutant is not None and mutant.suite == "native":
                self._put_library(copy, mutant)
            program = [self.python, "-m", "pytest", *_OPTIONS, *words]
        elif runner == "check":
            program = [*_plainly(), str(self._program(words[0], copy, mutant)), *words[1:]]
        else:
            raise ValueError(f"`{command}` begins with neither pytest nor check")
        paths = os.pathsep.join([str(self.work / "path"), str(copy)])
        environment = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        status, output = self.processes.run(shlex.join(program), copy, environment, limit)
        seconds = time.monotonic() - start
        if status == 0:
            return Ran("passes", "", seconds)
        if runner == "pytest" and status in _NO_TESTS:
            return Ran("runs no test", output.strip()[-300:], seconds)
        return Ran("fails", _what_failed(status, output), seconds)

    def _library(self) -> Build:
        """The library of the unchanged sources."""
        include = subprocess.run(
            [self.python, "-c", "import jaxlib, os; print(os.path.dirname(jaxlib.__file__))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        settings = [f"-DJAXFP8_FFI_INCLUDE={include}/include"]
        return Build(self.base, "ffi", "jaxfp8_cpu", settings, self.processes.build)

    def _put_library(self, copy: Path, mutant: Mutant) -> None:
        """Builds the library with the mutant in it, the first time that it is asked for."""
        if not (copy / "build" / "jaxfp8_cpu").exists():
            library = self._library().changed(copy, mutant.file, mutant.only)
            shutil.copy2(library, copy / _LIBRARY)

    def _program(self, name: str, copy: Path, mutant: Mutant | None) -> Path:
        """A program of ffi/tests/cpu: of the unchanged sources, or with a mutant in it."""
        build = Build(self.base, "ffi/tests/cpu", name, [], self.processes.build)
        unchanged: Path = self._do_once(f"build {name}", lambda: build.make(self.jobs))
        return unchanged if mutant is None else build.changed(copy, mutant.file, mutant.only)

    def _do_once(self, key: str, work: Callable[[], Any]) -> Any:
        """The result of what several mutants need; whoever asks first does it."""
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            if key not in self._known:
                self._known[key] = work()
        return self._known[key]


def _copy(source: Path, target: Path, copy_file: Callable[[str, str], Any] = shutil.copy2) -> None:
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(source, target, ignore=left_out, symlinks=True, copy_function=copy_file)


def _keeping_time_of(old: Path, new: Path) -> Callable[[str, str], None]:
    """Copies a file: one that differs from that in `old` is new to whoever builds, whatever its
    time in the tree; one that does not is not.
    """

    def copy_file(source: str, target: str) -> None:
        shutil.copyfile(source, target)
        before = old / Path(target).relative_to(new)
        if before.exists() and before.read_bytes() == Path(target).read_bytes():
            shutil.copystat(before, target)

    return copy_file


@functools.cache
def _plainly() -> tuple[str, ...]:
    """What programs with sanitizers are run by, where memory lies too far apart for them."""
    command = ("setarch", "--addr-no-randomize")
    is_allowed = (
        shutil.which("setarch")
        and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )
    return command if is_allowed else ()


def _what_failed(status: int | None, output: str) -> str:
    if status is None:
        return "does not end"
    found = _FAILURE.search(output)
    last = (output.strip().splitlines() or ["no output"])[-1]
    return (found[1] if found else f"status {status}: {last}").strip()


def _first_error(output: str) -> str:
    return next((line for line in output.splitlines() if "error" in line), output.strip()[-300:])
