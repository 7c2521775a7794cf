"""Two processes of two devices each compute what one process of four does."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent.parent
FOLDERS = f"{TESTS}:{TESTS.parent / 'examples'}"

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1].split(":")
import jax
processes, devices, port, rank, folder = *map(int, sys.argv[2:6]), sys.argv[6]
jax.config.update("jax_num_cpu_devices", devices)
if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
from mesh import shared_programs
shared_programs.run(folder if rank == 0 else None)
"""


def results(processes, folder):
    """What the programs give: arrays by name, written by the first process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, FOLDERS, str(processes), str(4 // processes)]
            + [str(port), str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    with np.load(folder / "results.npz") as stored:
        return dict(stored)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = (results(n, folder) for n, folder in zip((1, 2), folders, strict=True))
    assert one.keys() == two.keys()
    for name, want in one.items():
        tolerance = 5e-3 if name == "GPT" else 1e-5  # its steps are in bfloat16
        np.testing.assert_allclose(two[name], want, rtol=tolerance, atol=1e-5, err_msg=name)
