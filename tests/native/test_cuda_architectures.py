"""Which GPUs the CUDA library is compiled for."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
ALL = "80-real;86-real;89-real;90a-real;100a-real;120-real;80-virtual"


@pytest.fixture
def architectures(tmp_path):
    if CMAKE is None or not (ROOT / "ffi").is_dir():
        pytest.skip("needs CMake and the sources of the libraries")
    script = tmp_path / "print.cmake"
    script.write_text(
        f'include("{ROOT}/ffi/cuda/architectures.cmake")\n'
        'file(WRITE "${CMAKE_CURRENT_LIST_DIR}/out" "${JAXFP8_CUDA_ARCHITECTURES}")\n'
    )

    def resolve(named="", cudaarchs="", gpus=()):
        query = tmp_path / "nvidia-smi"
        query.write_text("#!/bin/sh\n" + "".join(f"echo {gpu}\n" for gpu in gpus) + "exit 0\n")
        query.chmod(0o755)
        environment = {"PATH": str(tmp_path), "CUDAARCHS": cudaarchs}
        command = [CMAKE, f"-DJAXFP8_CUDA_ARCHITECTURES={named}", "-P", str(script)]
        subprocess.run(command, check=True, env=environment)
        return (tmp_path / "out").read_text()

    return resolve


def test_the_gpus_of_the_machine_are_the_default(architectures):
    assert architectures(gpus=("9.0", "9.0", "12.0")) == "90a-real;120-real"


def test_all_are_the_default_on_a_machine_without_a_gpu(architectures):
    assert architectures() == ALL


def test_the_variable_of_cmake_is_honoured(architectures):
    assert architectures(cudaarchs="89", gpus=("9.0",)) == "89"


def test_a_name_goes_before_the_variable_of_cmake(architectures):
    assert architectures(named="80-real", cudaarchs="89") == "80-real"


def test_hopper_has_the_letter_of_its_family(architectures):
    assert architectures(named="90;100-real") == "90a;100a-real"


def test_all_can_be_named_beside_a_gpu(architectures):
    assert architectures(named="all", gpus=("9.0",)) == ALL
