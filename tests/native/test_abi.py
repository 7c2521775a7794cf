"""The C functions of the CPU library, called as a C program would."""

import ctypes

import numpy as np
import pytest

import oracle
import specs
from jaxfp8 import _abi, _dtypes, _ffi

CASES_PER_TEST = 25


def compute(spec, operands, threads=1, kernel=""):
    """Status, message and results of one call."""
    epilogue = spec.epilogue
    results = {"out": np.empty(spec.out_shape, _dtypes.storage(epilogue.out_dtype))}
    if epilogue.amax is not None:
        results["amax"] = np.empty(epilogue.amax, np.float32)
    arrays = {name: np.ascontiguousarray(x) for name, x in operands.items()} | results
    addresses = {name: x.ctypes.data for name, x in arrays.items()}
    buffers = _abi.Buffers.of(**addresses)
    given = ctypes.byref(_abi.Spec.of(spec, kernel)), ctypes.byref(buffers), threads
    status, text = _abi.call(_ffi._library("cpu"), "jaxfp8_cpu_scaled_dot", *given)
    return status, text, results


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block", range(4))
def test_random_problems(block, threads):
    rng = np.random.default_rng(50_000 + block)
    for _ in range(CASES_PER_TEST):
        spec = specs.draw_spec(rng)
        operands = specs.draw_operands(rng, spec)
        status, text, results = compute(spec, operands, threads)
        assert (status, text) == (0, "")
        oracle.assert_within_bound(spec, operands, results["out"], results.get("amax"))


def test_a_problem_that_makes_no_sense_is_refused_with_a_sentence():
    rng = np.random.default_rng(1)
    spec = specs.draw_spec(rng)
    operands = specs.draw_operands(rng, spec)
    status, text, _ = compute(spec, operands, kernel="nonesuch")
    assert status == 1
    assert "`kernel` is `nonesuch`, but needs one of: " in text


def test_a_struct_of_another_version_is_refused():
    given = _abi.Spec(struct_size=8)
    buffers = _abi.Buffers.of()
    library = _ffi._library("cpu")
    asked = ctypes.byref(given), ctypes.byref(buffers), 1
    status, text = _abi.call(library, "jaxfp8_cpu_scaled_dot", *asked)
    assert status == 1
    assert "struct_size" in text


def test_a_missing_operand_is_refused():
    rng = np.random.default_rng(2)
    spec = specs.draw_spec(rng)
    while 0 in spec.lhs.shape + spec.rhs.shape:
        spec = specs.draw_spec(rng)
    operands = specs.draw_operands(rng, spec)
    del operands["rhs"]
    status, text, _ = compute(spec, operands)
    assert status == 1
    assert "rhs" in text
