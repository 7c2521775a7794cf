"""Test or measure on a machine with an NVIDIA GPU, with the python3 and the JAX it has; offline.

    python3 tools/gpu.py test  [pytest options]    everything marked `gpu`, correctness first
    python3 tools/gpu.py bench [options]           `python -m jaxfp8 bench` on the GPU
    python3 tools/gpu.py sanitize                  compute-sanitizer over a reduced suite

Needs jax[cuda13] and pytest in this Python. A missing CUDA library in `jaxfp8/_lib` is built first,
for this machine's GPU alone. The build needs nvcc, cmake and ninja.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "jaxfp8" / "_lib"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def main() -> None:
    """Build a missing library, then run the command; exits with its status."""
    what, *options = sys.argv[1:]
    if not (LIBRARIES / "libjaxfp8_cuda.so").exists():
        build()
    commands = {"test": test, "bench": bench, "sanitize": sanitize}
    sys.exit(max(run(command) for command in commands[what](options)))


def test(options: list[str]) -> list[list[str]]:
    """The test suite for a GPU."""
    return [[sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/gpu", *options]]


def bench(options: list[str]) -> list[list[str]]:
    """The benchmark."""
    return [[sys.executable, "-m", "jaxfp8", "bench", "--platform", "cuda", *options]]


def sanitize(options: list[str]) -> list[list[str]]:
    """The reduced suite under each of NVIDIA's checkers."""
    suite = [sys.executable, "tests/gpu/sanitized.py", *options]
    tool = ["compute-sanitizer", "--error-exitcode", "9", "--print-limit", "5", "--tool"]
    return [[*tool, checker, *suite] for checker in SANITIZERS]


def run(command: list[str]) -> int:
    """The status of a command run on this checkout, without preallocated GPU memory."""
    paths = {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Compiled as users' programs are: tests/conftest.py compiles in less time otherwise.
    paths["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, check=False).returncode


def build() -> None:
    """Both libraries, for the GPU of this machine."""
    folder = ROOT / "build" / "gpu"
    settings = [
        "-DJAXFP8_CUDA=ON",
        f"-DJAXFP8_FFI_INCLUDE={package('jaxlib') / 'include'}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (
        ["cmake", "-G", "Ninja", "-S", "ffi", "-B", str(folder), *settings],
        ["cmake", "--build", str(folder)],
    ):
        if run(command):
            sys.exit("the libraries could not be built")
    LIBRARIES.mkdir(exist_ok=True)
    for library in folder.glob("*/libjaxfp8_*.so"):
        shutil.copy2(library, LIBRARIES)


def package(name: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed in {sys.executable}")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
