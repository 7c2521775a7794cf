"""A library that is missing or does not fit is an error one can catch, and JAX goes on working."""

import concurrent.futures
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jaxfp8 import LibraryError
from jaxfp8._call.library import ffi


@pytest.fixture
def afresh(monkeypatch):
    """Makes the loader look again, before the test and after it."""
    ffi.reset()
    monkeypatch.setattr(ffi, "_REGISTERED", set())
    yield monkeypatch
    monkeypatch.undo()
    ffi.reset()


def assert_jax_works():
    assert float(jax.jit(lambda x: (x @ x).sum())(jnp.eye(3))) == 3.0


def refusal(platform: str = "cpu") -> str:
    with pytest.raises(LibraryError) as caught:
        ffi.ensure_registered(platform)
    assert_jax_works()
    return str(caught.value)


def test_the_library_is_there_and_fits():
    assert ffi.why_unavailable("cpu") is None
    assert ffi.library_path().name == "libjaxfp8_cpu.so"
    assert ffi.built_api_version() <= ffi.running_api_version()


def test_the_library_is_built_for_the_oldest_supported_jaxlib():
    """0.3 is the FFI of jaxlib 0.10.0; a library for a later one does not load there."""
    assert ffi.built_api_version() == (0, 3)


def test_a_missing_library_is_an_error_with_a_remedy(afresh):
    afresh.setattr(ffi, "library_path", lambda platform="cpu": None)
    text = refusal()
    assert "the kernel library for 'cpu' is not installed" in text
    assert "pip install --force-reinstall" in text
    assert "python -m jaxfp8 doctor" in text
    assert ffi.why_unavailable("cpu") == text.rstrip(".")
    assert ffi.kernel_calls() == {}
    assert ffi.available_kernels() == ()
    assert ffi.cpu_features() == ""


def test_a_platform_without_a_library_is_an_error(afresh):
    assert "the kernel library for 'tpu' is not installed" in refusal("tpu")


def test_a_broken_file_is_an_error(afresh, tmp_path):
    broken = tmp_path / "libjaxfp8_cpu.so"
    broken.write_bytes(b"not a library")
    afresh.setattr(ffi, "library_path", lambda platform="cpu": broken)
    assert "cannot be loaded" in refusal()
    assert ffi.built_api_version() is None


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_an_error(afresh, tmp_path, share):
    whole = ffi.library_path().read_bytes()
    broken = tmp_path / "libjaxfp8_cpu.so"
    broken.write_bytes(whole[: int(share * len(whole))])
    afresh.setattr(ffi, "library_path", lambda platform="cpu": broken)
    assert "cannot be loaded" in refusal()


def test_a_library_that_is_not_ours_is_an_error(afresh):
    libc = next(
        pathlib.Path(match[1])
        for match in re.finditer(r"(/\S+/libc\.so\.6)", pathlib.Path("/proc/self/maps").read_text())
    )
    afresh.setattr(ffi, "library_path", lambda platform="cpu": libc)
    assert "cannot be loaded" in refusal()


def test_a_library_of_older_sources_is_an_error_and_none_of_it_is_registered(afresh):
    targets = {**ffi.TARGETS, "cpu": (*ffi.TARGETS["cpu"], "jaxfp8_of_tomorrow")}
    afresh.setattr(ffi, "TARGETS", targets)
    registered = []
    afresh.setattr(jax.ffi, "register_ffi_target", lambda *a, platform: registered.append(platform))
    ffi.register_ahead()  # importing the package is no error
    assert "cpu" not in registered
    assert "has no `jaxfp8_of_tomorrow`: it was built from older sources" in refusal()


@pytest.mark.parametrize("running", [(0, 2), (1, 0)])
def test_a_library_built_for_another_ffi_is_an_error_and_is_not_registered(afresh, running):
    afresh.setattr(ffi, "running_api_version", lambda: running)
    registered = []
    afresh.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    major, minor = ffi.built_api_version()
    text = refusal()
    assert f"is built for XLA FFI {major}.{minor}, but jaxlib has {running[0]}.{running[1]}" in text
    assert 'pip install --upgrade "jax>=0.10.0"' in text
    assert registered == []


def test_a_refusal_by_xla_is_an_error(afresh):
    def refuse(*args, **kwargs):
        raise RuntimeError("no")

    afresh.setattr(jax.ffi, "register_ffi_target", refuse)
    assert "is refused by XLA: no" in refusal()


@pytest.mark.parametrize("running", [None, (0, 2), (1, 0)])
def test_ahead_of_a_backend_only_what_is_known_to_fit_is_registered(afresh, running):
    afresh.setattr(ffi, "running_api_version", lambda: running)
    afresh.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: pytest.fail(str(a)))
    ffi.register_ahead()


def test_what_xla_refuses_ahead_is_an_error_at_the_first_use(afresh):
    def refuse(*args, **kwargs):
        raise ValueError("no")

    afresh.setattr(jax.ffi, "register_ffi_target", refuse)
    ffi.register_ahead()
    assert "is refused by XLA: no" in refusal()


def test_after_an_error_the_library_can_be_used_again(afresh):
    afresh.setattr(ffi, "library_path", lambda platform="cpu": None)
    refusal()
    afresh.undo()
    ffi.reset()
    ffi.ensure_registered("cpu")
    assert ffi.why_unavailable("cpu") is None


def test_registration_from_many_threads_happens_once(afresh):
    registered = []
    afresh.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ffi.ensure_registered, ["cpu"] * 16))
    targets = [target for target, _ in registered]
    assert targets == list(ffi.TARGETS["cpu"])


def test_counters_start_again_at_0():
    ffi.reset_kernel_calls()
    assert set(ffi.kernel_calls().values()) == {0}
