"""What `tools/kernel_resources.py` makes of a build log."""

import pathlib
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[1] / "tools" / "kernel_resources.py"
LOG = """\
[1/2] Building CUDA object some.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    {stack} bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, {stack} bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""  # noqa: E501

pytestmark = pytest.mark.any_jax


def run(tmp_path, *arguments):
    log = tmp_path / "build.log"
    log.write_text(LOG.format(stack=16, stores=4))
    command = [sys.executable, str(TOOL), str(log), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_kernel_is_a_line_and_spills_are_a_failure(tmp_path):
    ran = run(tmp_path)
    _, *lines = [line.split() for line in ran.stdout.splitlines()]
    assert lines == [
        ["first", "sm_80", "40", "0", "0", "0"],
        ["second", "sm_90a", "96", "4096", "16", "12"],
    ]
    assert ran.returncode == 1


def test_only_the_kernels_asked_for_count(tmp_path):
    ran = run(tmp_path, "--only", "first")
    assert ran.returncode == 0
    assert "second" not in ran.stdout
    assert run(tmp_path, "--only", "nonesuch").returncode == 1
