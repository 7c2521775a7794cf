"""What is not provably a dot on 8-bit data is left alone, bit for bit, and the report says why."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from rewrite.negatives import NEGATIVES
from rewrite.programs import Program
from rewrite.support import count, left_alone

import jaxfp8

cases = pytest.mark.parametrize("case", NEGATIVES, ids=lambda p: p.name)
_SILENT = {
    "no_eight_bit_data_at_all",
    "dequantized_but_never_multiplied",
    "empty_operand",
}


@cases
@left_alone
def test_program_is_left_alone(case: Program) -> None:
    assert count(jaxfp8.rewrite(case.fun), *case.args()) == 0


@cases
@left_alone
def test_results_are_bit_equal(case: Program) -> None:
    args = case.args()
    plain = jax.tree.leaves(case.fun(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(case.fun)(*args))
    for got, want in zip(rewritten, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "case", [p for p in NEGATIVES if p.name not in _SILENT], ids=lambda p: p.name
)
def test_the_report_gives_a_reason_and_a_remedy(case: Program) -> None:
    report = jaxfp8.explain(case.fun)(*case.args())
    assert len(report.missed) == 1
    assert report.missed[0].reason
    assert report.missed[0].remedy


@cases
def test_rewrite_warns_exactly_where_the_report_has_a_miss(case: Program) -> None:
    args, rewritten = case.args(), jaxfp8.rewrite(case.fun)
    if case.name not in _SILENT:
        where = re.escape(jaxfp8.explain(case.fun)(*args).missed[0].where)
        with pytest.warns(jaxfp8.FallbackWarning, match=f"none of the 1 .*{where}.*explain"):
            rewritten(*args)
    rewritten(*args)  # and but once


@cases
def test_strict_raises_exactly_where_the_report_has_a_miss(case: Program) -> None:
    args = case.args()
    strict = jaxfp8.rewrite(case.fun, strict=True)
    if case.name in _SILENT:
        strict(*args)
        return
    with pytest.raises(ValueError, match=r"`jaxfp8.rewrite`: strict, but 1 of 1 8-bit dots"):
        strict(*args)
