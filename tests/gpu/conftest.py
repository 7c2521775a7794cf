"""What needs an NVIDIA GPU: run by `make test-gpu`, left out by `make test`."""

import pathlib

import jax
import pytest

from jaxfp8._call.gpu import xla_products

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.fixture(autouse=True)
def gpu():
    """The first GPU; the test is skipped where there is none."""
    if not _has_gpu():
        pytest.skip("needs an NVIDIA GPU and jax[cuda13]")
    return jax.devices("cuda")[0]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Small products go to the call as well, since those of tests are small."""
    monkeypatch.setattr(xla_products, "takes", lambda *_: False)
