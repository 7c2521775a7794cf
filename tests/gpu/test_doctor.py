"""The doctor on a machine with a GPU."""

import pytest

from jaxfp8 import _doctor
from jaxfp8._call.gpu import xla_products
from jaxfp8._call.library import ffi
from jaxfp8._doctor import _products

_TAKES = xla_products.takes


@pytest.fixture(autouse=True)
def left_to_xla(calls, monkeypatch):
    """Small products are XLA's, as users have it."""
    monkeypatch.setattr(xla_products, "takes", _TAKES)


def test_the_doctor_is_content(capsys):
    assert _doctor.run() == 0, capsys.readouterr().out
    assert "Everything works." in capsys.readouterr().out


def test_the_path_that_a_line_names_is_the_one_that_runs():
    told = {finding.name: finding.text for finding in _doctor.graphics()}
    for kind in _products.KINDS:
        problem = _products.problem(kind, "cuda", ffi.compute_capability())
        (ran,) = _products.multiply(problem, "cuda").ran
        assert f"{problem.sizes}: {ran}" in told[f"{kind.name} on sm_{ffi.compute_capability()}"]
