"""Threads, bits and memory: what concerns the whole process."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from native import calls

import specs
from jaxfp8._value.spec import EpilogueSpec, ScaledDotSpec

TESTS = pathlib.Path(__file__).parent.parent
PRODUCTS = [("bfloat16", "float8_e4m3fn"), ("int8", "int8"), ("float32", "uint8")]

_DIGEST = """
import hashlib, os, sys
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))
sys.path.insert(0, sys.argv[2])
from native import test_process
print(hashlib.sha256(b"".join(a.tobytes() for a in test_process.large_products())).hexdigest())
"""

_MEMORY = """
import os, pathlib, re, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # each thread has panels of its own
sys.path[:0] = sys.argv[2:]
import jax, jax.numpy as jnp, numpy as np
from native import calls
from jaxfp8._call.library import ffi
from jaxfp8._value.spec import EpilogueSpec, ScaledDotSpec

def kilobytes(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+) kB", status)[1])

k = n = 8192
layout, m = sys.argv[1].split(":")
w = jax.device_put(np.random.default_rng(0).integers(0, 120, (k, n), np.uint8))
x = jax.device_put(np.ones((int(m), k), jnp.bfloat16))
spec = ScaledDotSpec(
    lhs=calls.side("bfloat16", x.shape, (1,)),
    rhs=calls.side("float8_e4m3fn", (k, n), (0,) if layout == "kn" else (1,)),
    epilogue=EpilogueSpec(out_dtype="bfloat16"),
)
ffi.ensure_registered("cpu")
call = jax.ffi.ffi_call(calls.TARGET, calls.results_of(spec))
jax.block_until_ready((x, w))
run = jax.jit(lambda x, w: call(x, w, **spec.attributes(), kernel="")).lower(x, w).compile()
assert run.memory_analysis().temp_size_in_bytes < w.nbytes // 10
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = kilobytes("VmRSS")
jax.block_until_ready(run(x, w))
print(kilobytes("VmHWM") - before)
"""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments, str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def product(seed: int, lhs: str, rhs: str, m: int, k: int, n: int):
    """A spec with a scale per column, and operands."""
    spec = ScaledDotSpec(
        lhs=calls.side(lhs, (m, k), (1,)),
        rhs=calls.side(rhs, (k, n), (0,), tiles=(k, 1), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32", amax=(1, 1)),
    )
    return spec, specs.draw_operands(np.random.default_rng(seed), spec)


def large_products() -> list[np.ndarray]:
    """Results of products large enough to be shared between threads."""
    sizes = (1, 2048, 2048), (65, 900, 1100), (300, 500, 600)
    return [
        array
        for lhs, rhs in PRODUCTS
        for size in sizes
        for array in calls.call_named(*product(7, lhs, rhs, *size))
    ]


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_threads():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only")
    assert run_python(_DIGEST, "1") == run_python(_DIGEST, "64")


def test_calls_from_many_threads_do_not_disturb_each_other():
    problems = [product(i, *PRODUCTS[i % 3], 40 + i, 700, 900) for i in range(6)]
    expected = [calls.call_named(*problem) for problem in problems]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        futures = [(i, pool.submit(calls.call_named, *problems[i])) for i in [*range(6)] * 4]
        for i, future in futures:
            for got, wanted in zip(future.result(timeout=120), expected[i], strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_a_call_on_a_busy_pool_does_not_wait_for_it():
    """Many calls inside one program, each of which may use the pool that runs the program."""
    spec, operands = product(1, "bfloat16", "float8_e4m3fn", 33, 800, 900)
    call = jax.ffi.ffi_call(calls.TARGET, calls.results_of(spec))
    given = tuple(operands.values())
    (expected, _) = calls.call_named(spec, operands)
    many = jax.jit(lambda *g: [call(*g, **spec.attributes(), kernel="")[0] + i for i in range(12)])
    for i, out in enumerate(many(*given)):
        np.testing.assert_array_equal(out, expected + np.float32(i))


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.slow
def test_a_product_needs_less_than_a_tenth_of_its_weight_of_memory(layout, m):
    """64 MB of FP8 in a fresh process, in both layouts."""
    grown = int(run_python(_MEMORY, f"{layout}:{m}"))
    assert grown < 6400, f"peak memory grew by {grown} kB"
