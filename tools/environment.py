"""Make a virtual environment with the project, its extras and its built library.

    python3 tools/environment.py .venv --constraints tools/constraints-oldest.txt
    python3 tools/environment.py .venv-latest --headers .venv

With JAXFP8_CUDA=1 the kernels for NVIDIA GPUs are built too, now and from now on.
JAXFP8_CUDA_ARCHITECTURES, like CMAKE_CUDA_ARCHITECTURES, limits the build to fewer GPUs and less
time. JAXFP8_CUDA_LINEINFO=ON adds source lines for profilers.

There are three steps: interpreter, dependencies, library. A stamp in the environment skips a step
with unchanged inputs, so a second run does nothing and needs no network. The script needs only the
standard library. Its own interpreter becomes that of the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
EXTRAS = ("flax", "demo", "bench", "test", "docs")
# The folder of NVIDIA's tools from wheels.
CUDA_ROOT = "lib/python3*/site-packages/nvidia/cu13"
# Shown of pip's output while it runs; the whole goes to a log next to the stamp.
NEWS = re.compile(r"\s*(Collecting|Downloading|Building|Installing|Created|Successfully)\b")


def main() -> None:
    """Bring the environment up to date, or exit with a sentence on the missing part."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument("--constraints", type=Path, help="pip constraints file")
    parser.add_argument("--headers", type=Path, help="environment whose jaxlib has the headers")
    args = parser.parse_args()
    environment = Environment((ROOT / args.venv).absolute())
    environment.ensure_interpreter()
    environment.ensure_dependencies(args.constraints)
    headers_from = Environment((ROOT / (args.headers or args.venv)).absolute())
    headers_from.ensure_cuda()
    environment.ensure_library(headers_from)


class Environment:
    """A virtual environment and the stamps of its inputs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stamps = folder / ".stamps"
        self.python = folder / "bin" / "python"
        asked = os.environ.get("JAXFP8_CUDA", "0").upper() in ("1", "ON", "TRUE", "YES")
        self.cuda = asked or (self.stamps / "cuda").exists()

    def ensure_interpreter(self) -> None:
        """Make the environment anew when there is none, or its Python or its place differs."""
        key = digest([sys.version, sys.base_prefix, str(self.folder)])
        if self.is_current("interpreter", key) and runs(self.python):
            return
        say(f"{self.folder.name}: new environment on Python {sys.version.split()[0]}")
        shutil.rmtree(self.folder, ignore_errors=True)
        if not can_make_environments():
            install_venv()
        self.run("venv", [sys.executable, "-m", "venv", str(self.folder)])
        self.stamp("interpreter", key)

    def ensure_dependencies(self, constraints: Path | None) -> None:
        """Install the requirements of the project, its extras, its build and its checks."""
        wanted = [*project_requirements(), *lines(TOOLS / "requirements-dev.txt")]
        bare = lines(TOOLS / "requirements-no-deps.txt")
        limits = lines(constraints) if constraints else []
        key = digest([*wanted, "--no-deps", *bare, "--constraint", *limits])
        if self.is_current("dependencies", key):
            return
        say(f"{self.folder.name}: installing dependencies (a minute or two)")
        limit = ["--constraint", str(constraints)] if constraints else []
        self.pip("dependencies", *limit, *wanted)
        self.pip("dependencies-bare", "--no-deps", *bare)
        self.stamp("dependencies", key)

    def ensure_cuda(self) -> None:
        """Install the needs of the CUDA part: headers of cuBLAS, a compiler if there is none."""
        wanted = cuda_requirements()
        if not self.cuda or self.is_current("cuda", digest(wanted)):
            return
        say(f"{self.folder.name}: installing what the CUDA part is built with")
        self.pip("cuda", "--no-deps", *wanted)
        self.stamp("cuda", digest(wanted))

    def ensure_library(self, headers_from: Environment) -> None:
        """Build the C++ libraries and install the package in editable form."""
        settings = self.build_settings(headers_from)
        key = digest([*settings.values(), *project_files()])
        if self.is_current("library", key):
            return
        compilers = os.environ.get("CXX", "c++"), "g++", "clang++"
        if not any(map(shutil.which, compilers)):
            sys.exit("No C++ compiler found. On Debian or Ubuntu: apt-get install g++")
        say(f"{self.folder.name}: building the C++ libraries")
        flags = [f"--config-settings={name}={value}" for name, value in settings.items()]
        flags += ["--no-deps", "--no-build-isolation", "--force-reinstall", "--verbose"]
        self.pip("library", *flags, "--editable", str(ROOT))
        self.stamp("library", key)

    def build_settings(self, headers_from: Environment) -> dict[str, str]:
        """Settings of scikit-build-core, for the editable package and the wheel."""
        settings = {
            "cmake.define.JAXFP8_FFI_INCLUDE": str(headers_from.ffi_include()),
            "cmake.define.JAXFP8_CUDA": "ON" if headers_from.cuda else "OFF",
        }
        if headers_from.cuda:
            settings["cmake.define.JAXFP8_CUBLAS_INCLUDE"] = str(headers_from.cublas_include())
            architectures = os.environ.get("JAXFP8_CUDA_ARCHITECTURES", "")  # empty: GPUs at hand
            settings["cmake.define.JAXFP8_CUDA_ARCHITECTURES"] = architectures
            lines_of_source = os.environ.get("JAXFP8_CUDA_LINEINFO", "OFF")
            settings["cmake.define.JAXFP8_CUDA_LINEINFO"] = lines_of_source
        return settings

    def ffi_include(self) -> Path:
        """The XLA FFI headers of this environment's jaxlib."""
        return self.only("lib/python3*/site-packages/jaxlib/include")

    def cublas_include(self) -> Path:
        """The headers of this environment's cuBLAS."""
        return self.only(f"{CUDA_ROOT}/include")

    def only(self, pattern: str) -> Path:
        """The one folder in this environment to match a pattern."""
        folders = sorted(self.folder.glob(pattern))
        if not folders:
            sys.exit(f"No {pattern} in {self.folder}; remove it and run this again.")
        return folders[0]

    def is_current(self, step: str, key: str) -> bool:
        """Whether `step` was last done with this very key."""
        stamp = self.stamps / step
        return stamp.exists() and stamp.read_text() == key

    def stamp(self, step: str, key: str) -> None:
        """Note the end of `step`."""
        self.stamps.mkdir(exist_ok=True)
        (self.stamps / step).write_text(key)

    def pip(self, step: str, *arguments: str) -> None:
        """Run `pip install` in the environment."""
        pip = [str(self.python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
        # Python compiles a module when it is first imported; all of them would take 20 s.
        self.run(step, [*pip, "install", "--no-compile", "--progress-bar=off", *arguments])

    def run(self, step: str, command: list[str]) -> None:
        """Run `command` with its news on the terminal and its output in a log; exit if it fails."""
        tools_first = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        start, output = time.monotonic(), []
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ, PATH=tools_first),
        ) as process:
            for line in process.stdout or ():
                output.append(line)
                show_news(line)
        clear_news()
        self.stamps.mkdir(parents=True, exist_ok=True)
        log = self.stamps / f"{step}.log"
        log.write_text("".join(output))
        if process.returncode:
            sys.exit(f"{''.join(output[-60:])}\nfailed: {' '.join(command[:4])} ... (log: {log})")
        say(f"{self.folder.name}: {step} done in {time.monotonic() - start:.0f} s")


def can_make_environments() -> bool:
    """Whether this Python has `ensurepip`, needed by `venv`; Debian packages it apart."""
    ensurepip = importlib.util.find_spec("ensurepip")
    return ensurepip is not None and ensurepip.origin is not None


def install_venv() -> None:
    """Install Debian's python3-venv as root, and say so; otherwise say how."""
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    if os.geteuid() or not shutil.which("apt-get"):
        sys.exit(
            f"{sys.executable} cannot make virtual environments: it has no ensurepip.\n"
            f"On Debian or Ubuntu: sudo apt-get install {package}"
        )
    say(f"{sys.executable} has no ensurepip: apt-get install {package}")
    subprocess.run(["apt-get", "update", "-q"], check=True)
    subprocess.run(["apt-get", "install", "-q", "-y", package], check=True)
    importlib.invalidate_caches()
    if not can_make_environments():
        sys.exit(f"{package} is installed, but {sys.executable} still has no ensurepip.")


def project_requirements() -> list[str]:
    """Requirements in pyproject.toml: dependencies, the extras used here, and the build's.

    The build's pinned jaxlib is left out: it is there for its headers, and this environment
    may hold another; `--headers` names the one to build against.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"].get("optional-dependencies", {})
    wanted = list(project["project"]["dependencies"])
    wanted += [requirement for extra in EXTRAS for requirement in extras[extra]]
    wanted += [r for r in project["build-system"]["requires"] if not r.startswith("jaxlib")]
    return list(dict.fromkeys(expand(wanted, extras)))


def cuda_requirements() -> list[str]:
    """Requirements of the CUDA build in pyproject.toml; no compiler if the machine has one."""
    scikit_build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    wanted = [r for override in scikit_build["overrides"] for r in override["build"]["requires"]]
    if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
        wanted = [r for r in wanted if "cublas" in r]
    return wanted


def expand(wanted: Iterable[str], extras: dict[str, list[str]]) -> Iterable[str]:
    """Replace `jaxfp8[a,b]` by the content of these extras: the project itself comes from here."""
    for requirement in wanted:
        own = re.fullmatch(r"jaxfp8\[(.*)\]", requirement.replace(" ", ""))
        if own is None:
            yield requirement
        else:
            for extra in own[1].split(","):
                yield from expand(extras[extra], extras)


def project_files() -> list[str]:
    """Inputs of the installed package: the build's files, and the list of modules."""
    build = [ROOT / "pyproject.toml", *sorted((ROOT / "ffi").rglob("*"))]
    contents = [f"{path}\n{path.read_text()}" for path in build if path.is_file()]
    return contents + sorted(str(path) for path in (ROOT / "jaxfp8").rglob("*.py"))


def lines(file: Path) -> list[str]:
    """The lines of a requirements file, without comments."""
    bare = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in bare if line]


def digest(parts: Iterable[str]) -> str:
    """A hash of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def runs(python: Path) -> bool:
    """Whether an interpreter is there and works."""
    return python.exists() and not subprocess.run([python, "-c", ""], check=False).returncode


def say(text: str) -> None:
    """One line of progress."""
    print(f"==> {text}", flush=True)


def show_news(line: str) -> None:
    """Show the progress of a long step on one overwritten line; on a terminal only."""
    if sys.stdout.isatty() and NEWS.match(line):
        print(f"\r\033[K    {line.strip()[:76]}", end="", flush=True)


def clear_news() -> None:
    """Remove the line of `show_news`."""
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    main()
