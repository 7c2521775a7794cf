"""The C functions of the CPU library, called as a C program would."""

import ast
import ctypes
import dataclasses
import pathlib

import numpy as np
import pytest

import oracle
import specs
from jaxfp8._call.library import abi, ffi
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

CASES_PER_TEST = 25


def compute(spec, operands, threads=1, kernel=""):
    """Status, message and results of one call."""
    epilogue = spec.epilogue
    results = {"out": np.empty(spec.out_shape, dtypes.storage(epilogue.out_dtype))}
    if epilogue.amax is not None:
        results["amax"] = np.empty(epilogue.amax, np.float32)
    arrays = {name: np.ascontiguousarray(x) for name, x in operands.items()} | results
    addresses = {name: x.ctypes.data for name, x in arrays.items()}
    buffers = abi.Buffers.of(**addresses)
    given = ctypes.byref(abi.Spec.of(spec, kernel)), ctypes.byref(buffers), threads
    status, text = abi.call(ffi._library("cpu"), "jaxfp8_cpu_scaled_dot", *given)
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
    given = abi.Spec(struct_size=8)
    buffers = abi.Buffers.of()
    library = ffi._library("cpu")
    asked = ctypes.byref(given), ctypes.byref(buffers), 1
    status, text = abi.call(library, "jaxfp8_cpu_scaled_dot", *asked)
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


def matrices(m, k, n, tiles=None):
    """float32 times int8 with a scale per column of the right side, or by other tiles."""
    sides = {"contracting": (1,), "batch": (), "zero_point": False}
    lhs = OperandSpec(dtype="float32", shape=(m, k), tiles=(m, k), scale=False, **sides)
    rhs = OperandSpec(dtype="int8", shape=(n, k), tiles=tiles or (1, k), scale=True, **sides)
    epilogue = EpilogueSpec(out_dtype="float32")
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue)


@pytest.mark.parametrize("tile", [2**40, 2**63 - 1])
def test_a_tile_may_be_larger_than_its_axis(tile):
    rng = np.random.default_rng(4)
    lhs, rhs = rng.normal(size=(3, 20)).astype(np.float32), rng.integers(-9, 9, (5, 20), np.int8)
    scale = rng.uniform(1, 2, (5, 1)).astype(np.float32)
    spec = matrices(3, 20, 5, tiles=(1, tile))
    status, text, results = compute(spec, {"lhs": lhs, "rhs": rhs, "rhs_scale": scale})
    assert (status, text) == (0, "")
    np.testing.assert_allclose(results["out"], lhs @ (rhs * scale).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(-3, 4, 5), (3, -4, 5), (3, 4, -5)])
def test_a_negative_size_is_refused(sizes):
    spec = matrices(*sizes, tiles=(1, 1))
    spec = dataclasses.replace(spec, lhs=dataclasses.replace(spec.lhs, tiles=(1, 1)))
    asked = ctypes.byref(abi.Spec.of(spec, "")), ctypes.byref(abi.Buffers.of()), 2
    status, text = abi.call(ffi._library("cpu"), "jaxfp8_cpu_scaled_dot", *asked)
    assert status == 1
    assert "needs sizes of at least 0" in text


def without_lines(size):
    """A product without rows and columns: every array is empty, however deep."""
    sides = {"shape": (0, size, 64), "contracting": (1, 2), "batch": (), "tiles": (1, 1, 3)}
    return ScaledDotSpec(
        lhs=OperandSpec(dtype="float32", scale=True, zero_point=False, **sides),
        rhs=OperandSpec(dtype="int8", scale=False, zero_point=False, **sides),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )


@pytest.mark.parametrize("size", [2**44, 2**58, 2**62])
def test_sizes_whose_product_no_machine_holds_are_refused(size):
    asked = ctypes.byref(abi.Spec.of(without_lines(size)))
    library = ffi._library("cpu")
    none = ctypes.byref(abi.Buffers.of())
    for status, text in (
        abi.call(library, "jaxfp8_cpu_route", asked),
        abi.call(library, "jaxfp8_cpu_scaled_dot", asked, none, 1),
    ):
        assert status == 1
        assert f"`lhs` has shape (0, {size}, 64), but needs at most 2^50 bytes" in text


def test_empty_arrays_may_have_any_other_axes():
    asked = ctypes.byref(abi.Spec.of(without_lines(2**40))), ctypes.byref(abi.Buffers.of()), 2
    assert abi.call(ffi._library("cpu"), "jaxfp8_cpu_scaled_dot", *asked) == (0, "")


def test_a_list_of_sizes_without_values_is_refused():
    spec = abi.Spec.of(matrices(3, 4, 5))
    spec.rhs.tiles.values = None
    asked = ctypes.byref(spec)
    status, text = abi.call(ffi._library("cpu"), "jaxfp8_cpu_route", asked)
    assert status == 1
    assert "`spec`->rhs has a list of rank 2 whose values are null" in text


def test_the_example_for_pytorch_has_the_structs_of_the_library():
    """Without PyTorch: the classes alone are run."""
    source = (pathlib.Path(__file__).parents[2] / "examples" / "from_pytorch.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    names = {"ctypes": ctypes}
    exec(compile(ast.Module(classes, []), "from_pytorch.py", "exec"), names)
    for own, example in ((abi.Spec, "Spec"), (abi.Buffers, "Buffers")):
        assert ctypes.sizeof(names[example]) == ctypes.sizeof(own)
    assert [n for n, _ in names["Buffers"]._fields_] == [n for n, _ in abi.Buffers._fields_]
