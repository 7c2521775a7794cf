"""What the tests of the benchmark share."""

import pytest

from jaxfp8._bench import _peaks


@pytest.fixture
def short(monkeypatch):
    """Rounds that take no time."""
    monkeypatch.setattr("jaxfp8._bench._measure._ROUND_SECONDS", 1e-4)
    monkeypatch.setattr("jaxfp8._bench._measure._REST_SECONDS", 0)
    monkeypatch.setattr(_peaks, "_LEAST_READ", 1 << 16)
    monkeypatch.setattr(_peaks, "_MOST_READ", 1 << 18)
    monkeypatch.setattr(_peaks, "_ROUNDS", 100)
