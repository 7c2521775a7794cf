"""JAX's persistent cache finds programs on meshes that another process compiled."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAMS = pathlib.Path(__file__).parent / "cached_programs.py"


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """What the cache says of each program in the second of two processes."""
    command = [sys.executable, str(PROGRAMS), str(tmp_path_factory.mktemp("cache"))]
    runs = [
        subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        for _ in range(2)
    ]
    first, second = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    assert set(map(tuple, first.values())) == {("miss",)}
    return second


@pytest.mark.slow
def test_a_program_with_explicit_axes_is_found(second):
    assert second["explicit axes"] == ["hit"]


def test_a_program_with_automatic_axes_is_found_with_the_flag_of_jax(second):
    assert second["automatic axes, flag"] == ["hit"]


def test_a_program_with_automatic_axes_is_not_found_without_as_those_of_jax(second):
    """The key has the address of the Python function that XLA asks, as JAX lowers it."""
    assert second["automatic axes, no flag"] == second["JAX's own, no flag"] == ["miss"]
