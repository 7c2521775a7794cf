"""The doctor finds what is there, and what is wrong with it."""

import pathlib
import subprocess
import sys

import jax
import pytest

from jaxfp8 import _doctor
from jaxfp8._call import ffi


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
    found = findings(_doctor.smoke)
    ran = {name for name, calls in ffi.kernel_calls().items() if calls > before[name]}
    assert ran
    assert {finding.remedy for finding in found.values()} == {None}
    for finding in found.values():
        assert finding.text.removeprefix("right, computed by ") in ran


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


def test_a_wrong_product_is_a_finding():
    assert _doctor._judge("product", 1e-3, "scalar").remedy
    assert _doctor._judge("product", float("nan"), "scalar").remedy


def test_a_product_that_no_kernel_computed_is_a_finding():
    assert _doctor._judge("product", 0.0, "").remedy


def test_jax_works_on_without_the_library(other_library):
    other_library(None)
    assert _doctor.run() == 1
    assert float(jax.numpy.ones(3).sum()) == 3
