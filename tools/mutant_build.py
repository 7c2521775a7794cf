"""A program of the C++ sources, and the same program with one source changed, built in less time.

The unchanged program is built once by CMake and Ninja. For a copy of the sources in which one file
differs, only the objects that read this file are compiled, by the commands of the first build with
the copy's path in them; all other objects are links to those of the first build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

# Runs a shell command in a folder; returns its status and its output.
Run = Callable[[str, Path], tuple[int, str]]


class BuildError(Exception):
    """The compiler or the linker said no; holds what it said."""


class Build:
    """One target of a CMake project.

    Attributes:
      root: the copy of the repository that is built.
      source: the folder of the project's CMakeLists.txt, from `root`.
      target: a library or a program.
      settings: options of CMake.
      run: how commands are run.
    """

    def __init__(self, root: Path, source: str, target: str, settings: list[str], run: Run):
        self.root, self.source, self.target = root, source, target
        self.settings, self.run = settings, run
        self.folder = root / "build" / target

    def make(self, jobs: int) -> Path:
        """The unchanged program."""
        cmake, ninja = tool("cmake"), tool("ninja")
        options = " ".join([*self.settings, f"-DCMAKE_MAKE_PROGRAM={ninja}"])
        for command in (
            f"{cmake} -G Ninja -S {self.source} -B {self.folder} {options}",
            f"{ninja} -C {self.folder} -j {jobs} {self.target}",
        ):
            self._run(command, self.root)
        return self.folder / self._outputs()[-1]

    def changed(self, copy: Path, file: str, only: Collection[str]) -> Path:
        """The program of `copy`, in which `file` differs.

        With `only`, the change is seen by the sources of these names (without ".cc") alone.
        """
        folder = copy / "build" / self.target
        commands = self._commands()
        readers = [o for o, command in commands if self._reads(o, command, file, only)]
        if not readers:
            raise BuildError(f"no source of `{self.target}` reads {file}")
        for output, command in commands:
            # CMake names some objects by the whole paths of their sources.
            place = folder / self._moved(output, copy)
            place.parent.mkdir(parents=True, exist_ok=True)
            if _is_compilation(command) and output not in readers:
                place.symlink_to(self.folder / output)
            else:
                # A mistake may leave a variable unused.
                self._run(self._moved(command, copy).replace(" -Werror", ""), folder)
        return place

    def _moved(self, text: str, copy: Path) -> str:
        """A command or path of the first build with the copy's path in it."""
        return text.replace(str(self.root), str(copy))

    def _commands(self) -> list[tuple[str, str]]:
        """The outputs of the first build's commands with these, those that link last."""
        text = self._run(f"{tool('ninja')} -C {self.folder} -t commands {self.target}", self.root)
        found = [(m[1], line) for line in text.splitlines() if (m := re.search(r" -o (\S+)", line))]
        return sorted(found, key=lambda pair: not _is_compilation(pair[1]))

    def _outputs(self) -> list[str]:
        return [output for output, _ in self._commands()]

    def _reads(self, output: str, command: str, file: str, only: Collection[str]) -> bool:
        """Whether a command compiles a source that reads the file."""
        source = re.search(r" -c (\S+)", command)
        if source is None or (only and Path(source[1]).stem not in only):
            return False
        return self.root / file in self._read_by().get(output, ())

    def _read_by(self) -> dict[str, set[Path]]:
        """The files that each object was made from."""
        if not hasattr(self, "_known"):
            text = self._run(f"{tool('ninja')} -C {self.folder} -t deps", self.root)
            known: dict[str, set[Path]] = {}
            for block in text.split("\n\n"):
                head, *paths = block.strip().splitlines() or [""]
                absolute = {Path(os.path.normpath(self.folder / p.strip())) for p in paths}
                known[head.partition(": #deps")[0]] = absolute
            self._known = known
        return self._known

    def _run(self, command: str, folder: Path) -> str:
        status, output = self.run(command, folder)
        if status:
            raise BuildError(output)
        return output


def _is_compilation(command: str) -> bool:
    return " -c " in command


def tool(name: str) -> str:
    """The path of a tool: the one beside this Python, or of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is needed to build, and is neither beside {sys.executable} nor on PATH")
    return found
