"""Two processes of two devices each compute what one process of four does."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from mesh import shared_programs

TESTS = pathlib.Path(__file__).parent.parent
FOLDERS = f"{TESTS}:{TESTS.parent / 'examples'}"

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1].split(":")
import jax
port, rank, folder = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from mesh import shared_programs
shared_programs.run(folder if rank == 0 else None)
"""


def started(rank, port, folder):
    """One of two processes; the first writes what the programs give."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, FOLDERS, str(port), str(rank), str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )


def stored(folder):
    """Arrays by name."""
    with np.load(folder / "results.npz") as arrays:
        return dict(arrays)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """The one is this process, with four devices."""
    one, two = (tmp_path / name for name in ("one", "two"))
    one.mkdir()
    two.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [started(rank, port, two) for rank in range(2)]
    shared_programs.run(str(one))
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    got = stored(two)
    assert got.keys() == stored(one).keys()
    for name, want in stored(one).items():
        tolerance = 5e-3 if name == "GPT" else 1e-5  # its steps are in bfloat16
        np.testing.assert_allclose(got[name], want, rtol=tolerance, atol=1e-5, err_msg=name)
