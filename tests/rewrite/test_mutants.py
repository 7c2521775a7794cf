"""A program with one equation changed is refused, or captured as the other program that it is."""

from __future__ import annotations

import compiling
import jax
import numpy as np
import pytest
from rewrite.mutants import mutant
from rewrite.programs import PROGRAMS, Program
from rewrite.styles import STYLES
from rewrite.support import left_alone, relative_l2

import jaxfp8
from jaxfp8._value import dtypes

pytestmark = pytest.mark.any_jax


@left_alone
@pytest.mark.parametrize("case", PROGRAMS + STYLES, ids=lambda p: p.name)
@pytest.mark.same_bits
def test_mutant_computes_what_it_says(case: Program) -> None:
    args = case.args()
    changed = mutant(case.fun, args)
    plain = jax.tree.leaves(compiling.jit(changed)(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(changed)(*args))
    is_coarse = "f16" in str(jax.make_jaxpr(changed)(*args))
    for got, want in zip(rewritten, plain, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if dtypes.is_eight_bit(want.dtype):
            assert np.mean(np.asarray(got) != np.asarray(want)) < 0.05
        elif np.all(np.isfinite(np.asarray(want, np.float64))):
            assert relative_l2(got, np.asarray(want)) < (1e-2 if is_coarse else 1e-4)


def test_most_mutants_are_other_programs() -> None:
    """Else they would tell nothing."""
    same = []
    for case in (PROGRAMS + STYLES)[::14]:
        args = case.args()
        was, now = (jax.tree.leaves(jax.jit(f)(*args)) for f in (case.fun, mutant(case.fun, args)))
        same.append(all(np.array_equal(a, b) for a, b in zip(was, now, strict=True)))
    assert sum(same) <= 1
