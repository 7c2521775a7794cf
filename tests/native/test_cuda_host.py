"""The CUDA library's host code, and the arithmetic of its kernels compiled for the host.

Each file of ffi/tests is a program of its own: it prints what failed and returns how it went.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

FFI = pathlib.Path(__file__).parents[2] / "ffi"
TESTS = sorted(FFI.glob("tests/*_test.cc"))
# What each program is linked with; files without a line here need nothing.
SOURCES = {
    "cublaslt_plan_file_test": ["cuda/cublaslt/plan_file.cc"],
    "cublaslt_product_test": [
        f"cuda/cublaslt/{name}.cc"
        for name in ("attempts", "layout", "matmul_shape", "paths", "pieces", "product")
    ],
    "cuda_problem_test": ["cuda/problem.cc", "common/check.cc"],
    "imma_schedule_test": ["cuda/kernels/sm80_imma/schedule.cc", "cuda/problem.cc"],
    "sm90_gemm_groups_test": [
        *(f"cuda/kernels/sm90_gemm/{name}.cc" for name in ("operands", "schedule")),
        "cuda/problem.cc",
    ],
    "sm90_gemm_schedule_test": [
        *(f"cuda/kernels/sm90_gemm/{name}.cc" for name in ("operands", "schedule")),
        "cuda/problem.cc",
    ],
    "w8a16_schedule_test": ["cuda/kernels/sm80_w8a16/schedule.cc", "cuda/problem.cc"],
}
OPTIONS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-restrict"]

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(
        shutil.which("c++") is None or not TESTS, reason="needs a C++ compiler and the sources"
    ),
]


def header_folders() -> list[pathlib.Path]:
    """Where the headers of CUDA and of cuBLASLt are, as far as they are there."""
    packages = [pathlib.Path(folder, "nvidia", "cu13", "include") for folder in sys.path]
    nvcc = shutil.which("nvcc")
    beside = [pathlib.Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    named = [pathlib.Path(path) for path in [os.environ.get("JAXFP8_CUBLAS_INCLUDE")] if path]
    candidates = [*beside, pathlib.Path("/usr/local/cuda/include"), *packages, *named]
    return [folder for folder in candidates if folder.is_dir()]


def missing_headers(name: str, folders: list[pathlib.Path]) -> str | None:
    """The header of CUDA that a test needs and this machine has not."""
    texts = "".join((FFI / path).read_text() for path in SOURCES.get(name, []))
    needed = ["cuda_runtime_api.h"] if "cuda/path.h" in texts or "kernels/" in texts else []
    needed += ["cublasLt.h"] if name.startswith("cublaslt_") else []
    return next((h for h in needed if not any((f / h).is_file() for f in folders)), None)


@pytest.mark.parametrize("source", TESTS, ids=lambda path: path.stem)
def test_host(source, tmp_path):
    folders = header_folders()
    missing = missing_headers(source.stem, folders)
    if missing:
        pytest.skip(f"needs {missing}; install nvidia-cublas and nvcc, as for building")
    program = tmp_path / source.stem
    linked = [str(FFI / path) for path in SOURCES.get(source.stem, [])]
    system = [option for folder in folders for option in ("-isystem", str(folder))]
    command = ["c++", *OPTIONS, f"-I{FFI}", *system, str(source), *linked, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout
