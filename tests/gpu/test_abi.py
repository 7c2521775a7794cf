"""The C functions on PyTorch's tensors: poisoned memory, streams, graphs, refusals."""

import ctypes
import dataclasses

import numpy as np
import pytest
from gpu import products, tensors
from gpu.tensors import Call, canonical, torch

import oracle
import specs
from jaxfp8._call.library import abi, ffi


@pytest.fixture(autouse=True)
def the_first_gpu(gpu):
    """Makes GPU 0 current, where PyTorch allocates and captures.

    Of two GPUs JAX leaves the last one current when it starts, and GPU 0 when it has computed. A
    graph captured on one does not wait for tensors that are filled on the other.
    """
    torch.cuda.set_device(0)


def check(call: Call, operands) -> None:
    out, amax = call.results()
    oracle.assert_within_bound(call.spec, operands, out, amax, 2.0**-10)


def problem(seed: int, *args, **more):
    spec, operands = canonical(*_drawn(seed, *args, **more))
    return spec, operands


def _drawn(seed: int, *args, **more):
    spec = products.matrices(*args, **more)
    return spec, products.draw(seed, spec)


KINDS = {
    "fp8": ("float8_e4m3fn", "float8_e4m3fn"),
    "int8": ("int8", "int8"),
    "weight-only": ("bfloat16", "float8_e4m3fn"),
    "float32": ("float32", "int8"),
}


@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_poisoned_results_and_workspaces_do_not_matter(kind, m):
    spec, operands = problem(1, *KINDS[kind], m, 200, 136, amax=(1, 1), bias=(1, 136))
    call = Call(spec, operands)
    for byte in (0xFF, 0x7F, 0x00):
        for name in ("out", "amax", "workspace"):
            call.held[name].fill_(byte)
        assert call.run() == (0, "")
        check(call, operands)


@pytest.mark.parametrize("block", range(4))
def test_random_problems(block):
    rng = np.random.default_rng(90_000 + block)
    for _ in range(40):
        spec = dataclasses.replace(specs.draw_spec(rng), precision="highest")
        if 0 in spec.lhs.shape + spec.rhs.shape:
            continue
        spec, operands = canonical(spec, specs.draw_operands(rng, spec))
        call = Call(spec, operands)
        assert call.run() == (0, "")
        check(call, operands)


def test_a_smaller_workspace_serves_or_is_refused_with_a_sentence():
    for kind in KINDS.values():
        spec, operands = problem(2, *kind, 200, 264, 136)
        call = Call(spec, operands)
        for size in (0, 1 << 10, 1 << 16, 1 << 20, 33 << 20):
            call.bytes = min(size, call.bytes)
            status, text = call.run()
            if status == 0:
                check(call, operands)
            else:
                assert "workspace" in text


def test_streams_at_once():
    calls = []
    for i in range(8):
        kind = list(KINDS.values())[i % 3]
        spec, operands = problem(3 + i, *kind, 64 + i, 512, 256)
        calls.append((Call(spec, operands), operands, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for call, _, stream in calls:
            assert call.run(stream) == (0, "")
    for call, operands, _ in calls:
        check(call, operands)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_reads_its_operands_anew(kind):
    spec, operands = problem(4, *KINDS[kind], 48, 256, 128)
    call = Call(spec, operands)
    assert call.run() == (0, "")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert call.run() == (0, "")
    other = products.draw(5, spec)
    for name, x in other.items():
        call.held[name].copy_(tensors.tensor(x))
    call.held["out"].fill_(tensors.POISON)
    graph.replay()
    check(call, other)


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("m", [1, 9, 33, 64])
def test_blocks_that_share_outputs_add_up_in_one_order(m, rhs_first):
    """Eight blocks on an H100: K has 33 tiles, and the columns have three."""
    spec, operands = problem(
        7, *KINDS["weight-only"], m, 4136, 264, rhs_first=rhs_first, rhs_tiles=(1, 4136)
    )
    call = Call(spec, operands)
    assert call.run() == (0, "")
    check(call, operands)
    first, _ = call.results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert call.run() == (0, "")
    for _ in range(10):
        call.held["out"].fill_(tensors.POISON)
        call.held["workspace"].fill_(0xFF)
        graph.replay()
        np.testing.assert_array_equal(call.results()[0], first)


def test_what_makes_no_sense_is_refused():
    spec, operands = problem(6, *KINDS["fp8"], 16, 32, 16)
    status, text = Call(spec, operands, kernel="nonesuch").run()
    assert status == 1
    assert "general" in text
    call = Call(spec, operands)
    del call.held["rhs"]
    status, text = call.run()
    assert status == 1
    assert "rhs" in text


def test_the_route_that_is_told_is_the_route_that_is_taken():
    version = ffi.cublaslt()[1]
    capability = ffi.compute_capability()
    for kind in KINDS.values():
        for m in (1, 64, 300):
            spec, operands = problem(7, *kind, m, 256, 128)
            told = next(
                n for n, why in ffi.cuda_paths(spec, capability, version).items() if not why
            )
            before = ffi.kernel_calls("cuda")
            assert Call(spec, operands).run() == (0, "")
            assert ffi.kernel_calls("cuda")[told] == before[told] + 1


def test_plans_can_be_made_ahead():
    spec, operands = problem(8, *KINDS["fp8"], 32, 64, 48)
    call = Call(spec, operands)
    asked = ctypes.byref(abi.Spec.of(spec)), call.bytes
    assert abi.call(ffi._library("cuda"), "jaxfp8_cuda_prepare", *asked) == (0, "")
    assert call.run() == (0, "")
    check(call, operands)
