"""A program that only looks like what a kernel computes keeps its meaning."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from rewrite.lookalikes import LOOKALIKES, Lookalike
from rewrite.support import left_alone

import jaxfp8

cases = pytest.mark.parametrize("case", LOOKALIKES, ids=lambda a: a.name)


@left_alone
@cases
def test_lookalike_computes_what_the_function_computes(case: Lookalike) -> None:
    args = case.args()
    plain = jax.tree.leaves(jax.jit(case.fun)(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(case.fun)(*args))
    for got, want in zip(rewritten, plain, strict=True):
        assert got.dtype == want.dtype
        near = np.asarray(want, np.float64)
        if want.dtype.kind in "iu":
            np.testing.assert_allclose(np.asarray(got, np.float64), near, atol=1)
        else:
            np.testing.assert_allclose(np.asarray(got, np.float64), near, rtol=2e-2, atol=1e-4)


@cases
def test_lookalike_is_captured_no_further_than_it_means(case: Lookalike) -> None:
    report = jaxfp8.explain(case.fun)(*case.args())
    assert len(report.matched) == case.calls
    told = " ".join(site.epilogue for site in report.matched)
    assert not [word for word in case.without if word in told]


def test_second_dot_of_a_dynamic_requantization_reads_fp8() -> None:
    case = next(a for a in LOOKALIKES if a.name == "requantized_by_its_own_amax")
    second = jaxfp8.explain(case.fun)(*case.args()).matched[1]
    assert (second.lhs.dtype, second.rhs.dtype) == ("float8_e4m3fn", "float8_e4m3fn")
