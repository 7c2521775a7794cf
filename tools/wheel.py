"""Build the wheel, and try it as a user without a compiler would.

python tools/wheel.py build     dist/jaxfp8-*.whl, out of the objects of the last `make setup`
python tools/wheel.py try       a bare environment, the wheel, the oldest JAX, tools/smoke.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import environment
from environment import ROOT, TOOLS, say

DIST = ROOT / "dist"
PLAIN = ROOT / "build" / "wheel"
BARE = ROOT / "build" / "smoke"


def build() -> None:
    """Make the wheel with the settings of the running environment."""
    here = environment.Environment(Path(sys.prefix))
    for folder in (DIST, PLAIN):
        shutil.rmtree(folder, ignore_errors=True)
    settings = here.build_settings(here)
    architectures = "cmake.define.JAXFP8_CUDA_ARCHITECTURES"
    fewer = settings.get(architectures)
    if fewer == "":
        settings[architectures] = "all"
    flags = [f"--config-settings={name}={value}" for name, value in settings.items()]
    command = ["wheel", ".", "--no-deps", "--no-build-isolation", f"--wheel-dir={PLAIN}", *flags]
    here.run("wheel", [str(here.python), "-m", "pip", *command])
    # Names the oldest C library able to run the wheel. Drivers of GPUs come with the machine.
    repair = ["-m", "auditwheel", "repair", "--exclude=libcu*", f"--wheel-dir={DIST}"]
    here.run("auditwheel", [str(here.python), *repair, *map(str, PLAIN.glob("*.whl"))])
    say(f"dist/{wheel().name}" + (f", not to be released: for {fewer} only" if fewer else ""))


def try_out() -> None:
    """Install the wheel without compiler or checkout, and run a user's first steps."""
    shutil.rmtree(BARE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(BARE)], check=True)
    bare = environment.Environment(BARE)
    limits = ["--constraint", str(TOOLS / "constraints-oldest.txt")]
    bare.pip("wheel", "--only-binary=:all:", *limits, str(wheel()))
    say("a bare environment: no compiler on the path, nothing but the wheel and what it asks for")
    paths = {"PATH": str(BARE / "bin"), "HOME": os.environ.get("HOME", "/")}
    smoke = [str(bare.python), "-I", str(TOOLS / "smoke.py")]
    subprocess.run(smoke, check=True, cwd=BARE, env=paths)


def wheel() -> Path:
    """The built wheel."""
    wheels = sorted(DIST.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{len(wheels)} wheels in {DIST}; run `make wheel`.")
    return wheels[0]


if __name__ == "__main__":
    {"build": build, "try": try_out}[sys.argv[1]]()
