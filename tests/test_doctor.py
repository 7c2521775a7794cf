"""The doctor finds what is there, and what is wrong with it."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxfp8 import _doctor
from jaxfp8._call.gpu import asked, xla_products
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import routes
from jaxfp8._doctor import _products, _remedies


def findings(look):
    return {finding.name: finding for finding in look()}


@pytest.fixture
def other_library(monkeypatch):
    """Makes the package look elsewhere for its library, and forget that afterwards."""

    def use(path):
        monkeypatch.setattr(ffi, "library_path", lambda platform="cpu": path)
        ffi.reset()

    yield use
    monkeypatch.undo()
    ffi.reset()


def test_doctor_is_content_in_a_fresh_process(tmp_path: pathlib.Path):
    command = [sys.executable, "-m", "jaxfp8", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything works." in done.stdout
    for shown in (jax.__version__, str(ffi.library_path("cpu")), *ffi.available_kernels()):
        assert shown in done.stdout


def test_products_are_computed_by_kernels_that_the_counters_name():
    before = ffi.kernel_calls()
    found = list(_doctor.smoke())
    ran = {name for name, calls in ffi.kernel_calls().items() if calls > before[name]}
    assert ran
    assert len(found) == len(_products.KINDS)
    assert {finding.remedy for finding in found} == {None}
    for finding in found:
        assert finding.text.partition(": right, computed by ")[2] in ran


HOPPER = 90
# By kind and rows, the path that is for it on a GPU of compute capability 9.0.
PATHS = {
    ("W8A16", 16): "sm80_w8a16",
    ("W8A16", 512): "sm90_gemm",
    ("FP8", 16): "sm80_w8a16",
    ("FP8", 512): "cublaslt_fp8",
    ("FP8 in blocks", 512): "sm90_gemm",
    ("INT8", 16): "sm90_gemm",
    ("INT8", 512): "sm90_gemm",
    ("float32 x FP8", 16): "general",
}


@pytest.mark.parametrize("kind", _products.KINDS, ids=lambda kind: f"{kind.name}-{kind.rows}")
def test_no_product_of_a_gpu_is_left_to_xla(kind):
    problem = _products.problem(kind, "cuda", HOPPER)
    assert not xla_products.takes(problem.spec, "", HOPPER)
    assert problem.spec.out_shape == (kind.rows, problem.size)


def test_a_size_that_xla_takes_is_not_large_enough(monkeypatch):
    monkeypatch.setattr(xla_products, "_MOST_WEIGHTS", 1 << 25)
    assert _products.problem(_products.KINDS[0], "cuda", HOPPER).size == 8192


@pytest.mark.cuda_library
def test_each_path_of_a_hopper_gpu_has_a_product():
    found = {}
    for kind in _products.KINDS:
        spec = _products.problem(kind, "cuda", HOPPER).spec
        found[kind.name, kind.rows] = routes.path_on(spec, HOPPER, asked.CUBLASLT)
    assert found == PATHS


@pytest.mark.cuda_library
def test_lines_of_a_gpu_say_for_which_sizes_they_are():
    found = findings(_doctor.graphics)["FP8 on sm_90"]
    assert found.text == "16 x 4096 x 4096: sm80_w8a16; 512 x 4096 x 4096: cublaslt_fp8"


def test_a_missing_library_is_named_with_the_command_that_builds_it(other_library, capsys):
    other_library(None)
    assert _doctor.run() == 1
    out = capsys.readouterr().out
    assert "is not installed" in out
    assert f"{sys.executable} -m pip install --force-reinstall --no-deps" in out
    assert "Everything works" not in out


def test_a_file_that_is_no_library_is_named(other_library, tmp_path, capsys):
    path = tmp_path / "libjaxfp8_cpu.so"
    path.write_text("not a library")
    other_library(path)
    assert _doctor.run() == 1
    assert "cannot be loaded" in capsys.readouterr().out


def test_a_library_too_new_for_jaxlib_asks_for_a_newer_jax(other_library, monkeypatch):
    other_library(ffi.library_path("cpu"))
    monkeypatch.setattr(ffi, "running_api_version", lambda: (0, 0))
    found = findings(_doctor.library)["cpu kernels"]
    assert "is built for XLA FFI" in found.text
    assert "install --upgrade jax" in found.remedy


@pytest.mark.parametrize(
    ("excess", "ran"), [(1e-3, ("scalar",)), (float("nan"), ("scalar",)), (0.0, ())], ids=str
)
def test_a_product_that_is_wrong_or_of_no_kernel_is_a_finding(excess, ran, monkeypatch):
    outcome = _products.Outcome(excess=excess, ran=ran)
    monkeypatch.setattr(_products, "multiply", lambda *_: outcome)
    assert all(finding.remedy for finding in _doctor.smoke())


@pytest.mark.parametrize("kind", _products.KINDS[3:6:2], ids=lambda kind: kind.name)
def test_an_output_beyond_the_bound_is_wrong(kind, monkeypatch):
    problem, multiply = _products.problem(kind, "cpu", None), _products._multiply
    assert _products.multiply(problem, "cpu").excess <= 0
    monkeypatch.setattr(_products, "_multiply", lambda x, w: multiply(x, w).at[-1, -1].add(0.1))
    assert _products.multiply(problem, "cpu").excess > 0.05


def test_a_gpu_that_is_too_old_needs_no_mending(monkeypatch):
    monkeypatch.setattr(ffi, "PLATFORMS", ("cuda",))
    monkeypatch.setattr(ffi, "has_backend", lambda _: True)
    monkeypatch.setattr(ffi, "compute_capability", lambda: 75)
    (found,) = _doctor.smoke()
    assert "7.5" in found.text and found.remedy is None


def installed_from(monkeypatch, note):
    """Makes the package one that pip installed, and noted that of."""

    class Distribution:
        version = "1.2"
        read_text = staticmethod(lambda name: json.dumps(note))

    monkeypatch.setattr(_remedies.importlib.metadata, "distribution", lambda _: Distribution)


def test_a_remedy_names_the_folder_that_the_package_came_from(monkeypatch, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    installed_from(monkeypatch, {"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert _remedies.reinstall("cpu").endswith(f"--no-deps --editable '{folder}'")


def test_a_remedy_names_no_folder_to_install_from_that_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    installed_from(monkeypatch, {"url": gone.as_uri(), "dir_info": {}})
    remedy = _remedies.reinstall("cuda")
    assert remedy.startswith(f"get the sources again, since {gone} is gone")
    assert remedy.endswith("install --force-reinstall --no-deps .")
    assert "JAXFP8_CUDA=1" in remedy


def test_a_remedy_installs_from_a_repository_what_came_from_it(monkeypatch):
    source = {"url": "https://x.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}
    installed_from(monkeypatch, source)
    assert _remedies.reinstall("cpu").endswith(" git+https://x.org/a.git@12ab")


def test_a_remedy_for_a_package_from_an_index_names_its_version(monkeypatch):
    installed_from(monkeypatch, {})
    assert _remedies.reinstall("cpu").endswith(" jaxfp8==1.2")


def test_jax_works_on_without_the_library(other_library):
    other_library(None)
    assert _doctor.run() == 1
    assert float(jax.numpy.ones(3).sum()) == 3
