"""Hundreds of random scaled dots on the platform's kernels, each against float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import sampling

import jaxfp8
import oracle
import specs
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.reference import dot_reference

pytestmark = pytest.mark.any_jax

CASES_PER_TEST = 50


def _named(rng: np.random.Generator):
    spec = specs.draw_spec(rng)
    return spec, specs.draw_operands(rng, spec)


@pytest.mark.parametrize("block", range(12))
def test_kernels_agree_with_float64(block: int) -> None:
    rng = np.random.default_rng(block)
    for _ in range(CASES_PER_TEST):
        spec, operands = _named(rng)
        with jaxfp8.strict():
            out, amax = scaled_dot(spec, **operands)
        oracle.assert_within_bound(spec, operands, np.asarray(out), amax)


@pytest.mark.parametrize("block", range(4))
def test_reference_agrees_with_float64(block: int) -> None:
    rng = np.random.default_rng(10_000 + block)
    for _ in range(sampling.examples(CASES_PER_TEST)):
        spec, operands = _named(rng)
        meaning = jax.jit(functools.partial(dot_reference.scaled_dot, spec))
        out = meaning(*(operands[name] for name in spec.operand_names()))
        oracle.assert_within_bound(spec, operands, *map(np.asarray, out))


def test_oracle_refuses_wrong_results() -> None:
    rng = np.random.default_rng(0)
    tried = refused = 0
    while tried < CASES_PER_TEST:
        spec, operands = _named(rng)
        out = np.asarray(scaled_dot(spec, **operands)[0])
        wrong = np.roll(out.reshape(-1), 1).reshape(out.shape)
        if np.array_equal(wrong, out):
            continue
        tried += 1
        try:
            oracle.assert_within_bound(spec, operands, wrong)
        except AssertionError:
            refused += 1
    # A rolled output can lie within the bound by chance, where most of it saturates.
    assert refused > 0.9 * tried
