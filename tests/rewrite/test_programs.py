"""Every program of the table is captured, and computes what it computed before."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from rewrite.programs import PROGRAMS, Program
from rewrite.styles import STYLES
from rewrite.support import count, float64, relative_l2

import jaxfp8
from jaxfp8._value import dtypes

cases = pytest.mark.parametrize("case", PROGRAMS + STYLES, ids=lambda p: p.name)


@cases
def test_program_becomes_the_expected_number_of_scaled_dots(case: Program) -> None:
    args = case.args()
    assert count(jaxfp8.rewrite(case.fun), *args) == case.calls


@cases
@pytest.mark.same_bits
def test_program_is_as_near_float64_as_before(case: Program) -> None:
    args = case.args()
    plain = jax.tree.leaves(jax.jit(case.fun)(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(case.fun)(*args))
    exact = float64(case.plain or case.fun, *args)
    for got, was, want in zip(rewritten, plain, exact, strict=True):
        assert (got.shape, got.dtype) == (was.shape, was.dtype)
        if dtypes.is_eight_bit(got.dtype):
            assert np.mean(np.asarray(got) != np.asarray(was)) < 0.05
        elif got.dtype == np.int32:
            np.testing.assert_array_equal(got, was)
        else:
            assert relative_l2(got, want) <= 1.05 * relative_l2(was, want) + case.floor


@cases
def test_every_dot_of_the_program_is_reported_as_captured(case: Program) -> None:
    report = jaxfp8.explain(case.fun)(*case.args())
    assert len(report.matched) == case.calls
    assert not report.missed
    assert all("tests/rewrite" in site.file for site in report.matched)
