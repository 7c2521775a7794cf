"""Random programs compute the same when rewritten, whether they are captured or not."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import sampling
from rewrite.random_programs import make
from rewrite.support import float64, left_alone, relative_l2

import jaxfp8

pytestmark = pytest.mark.any_jax

# float32 throughout, so that a wrong scale or axis stands out; sums that cancel lose some digits.
TOLERANCE = 3e-5


@left_alone
@pytest.mark.slow
@hypothesis.given(st.integers(0, 100_000))
@hypothesis.settings(max_examples=sampling.examples(25))
def test_random_program_is_as_near_float64_as_before(seed: int) -> None:
    fun, args = make(seed)
    plain = jax.tree.leaves(jax.jit(fun)(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(fun)(*args))
    for got, was, want in zip(rewritten, plain, float64(fun, *args), strict=True):
        assert (got.shape, got.dtype) == (was.shape, was.dtype)
        if np.all(np.isfinite(want)):
            assert relative_l2(got, want) <= 1.05 * relative_l2(was, want) + TOLERANCE


def test_most_random_programs_are_captured() -> None:
    reports = [jaxfp8.explain(fun)(*args) for fun, args in map(make, range(40))]
    matched = sum(len(report.matched) for report in reports)
    missed = sum(len(report.missed) for report in reports)
    assert matched >= 3 * missed
