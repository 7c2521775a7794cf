"""The digits example at reduced length: one seed, 150 steps."""

import pytest


@pytest.fixture(scope="module")
def digits():
    """The example; imported when a test runs, since each process of a run imports this file."""
    pytest.importorskip("sklearn")
    import digits

    return digits


@pytest.fixture(scope="module")
def data(digits):
    return digits.load()


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.slow
def test_a_perceptron_learns_digits_in_fp8_as_in_bfloat16(api, digits, data):
    if api == "nnx":
        pytest.importorskip("jaxfp8.nnx")
    recipes = ["bf16", "delayed"] if api == "linen" else ["delayed"]
    scores = [digits.TRAINERS[api]("mlp", digits.RECIPES[r], 0, 150, data) for r in recipes]
    assert min(scores) > 0.95 and max(scores) - min(scores) < 0.015
