"""Every kernel, by its name, through the real call: what it is given arrives, and so do results.

What a kernel computes is tested in C++ (ffi/tests/cpu), for all codes, sizes and layouts.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from native import calls

import oracle
import specs
from jaxfp8._call.library import ffi
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, ScaledDotSpec

KERNELS = ffi.kernels("cpu")
CODES = np.arange(256, dtype=np.uint8)


@pytest.fixture(autouse=True)
def kernel_runs_here(request):
    """Skips a test whose kernel this machine cannot run, and says why."""
    kernel = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kernel")
    if kernel and kernel not in ffi.available_kernels():
        pytest.skip(f"{kernel} needs what this CPU lacks; it has {ffi.cpu_features()}")


def sums_integers(kernel: str) -> bool:
    return kernel.endswith(("_int8", "_vnni"))


@functools.cache
def problem(seed: int):
    """A random problem, of which all kernels are given the same operands."""
    rng = np.random.default_rng([seed, 77])
    spec = specs.draw_spec(rng)
    return spec, specs.draw_operands(rng, spec)


def scaled_problem(kernel: str, **more) -> tuple[ScaledDotSpec, dict[str, np.ndarray]]:
    """Three rows times a weight with a scale for each 20 of the depth, and a bias."""
    left, right = ("int8", "int8") if sums_integers(kernel) else ("bfloat16", "float8_e4m3fn")
    spec = ScaledDotSpec(
        lhs=calls.side(left, (3, 200), (1,), tiles=(1, 200), scale=True, **more),
        rhs=calls.side(right, (200, 131), (0,), tiles=(20, 1), scale=True, **more),
        epilogue=EpilogueSpec(out_dtype="float32", bias=(1, 131), activation="relu"),
    )
    return spec, specs.draw_operands(np.random.default_rng(7), spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_problems_stay_within_the_bound(kernel):
    """Any dtypes, axes, tiles, zero points, epilogue and sizes; see tests/specs.py."""
    taken = [seed for seed in range(40) if calls.takes(kernel, problem(seed)[0])][:6]
    assert len(taken) >= 2
    for seed in taken:
        spec, operands = problem(seed)
        out, *amax = calls.call_named(spec, operands, kernel)
        oracle.assert_within_bound(spec, operands, out, *amax)


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_256_codes_are_exact_as_weights(kernel):
    weights = ("int8", "uint8") if sums_integers(kernel) else ("float8_e4m3fn", "float8_e5m2")
    left = "int8" if sums_integers(kernel) else "bfloat16"
    for dtype in weights:
        spec = calls.matrices(left, dtype, 1, 1, 256)
        (out,) = calls.call(
            spec,
            np.ones((1, 1), jnp.dtype(left)),
            CODES[None, :].view(dtypes.storage(dtype)),
            kernel=kernel,
        )
        np.testing.assert_array_equal(
            out[0], oracle.decode(CODES.view(dtypes.storage(dtype)), dtype)
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_forced_kernel_is_the_one_that_is_counted(kernel):
    spec = calls.matrices("int8", "int8", 2, 3, 4)
    before = ffi.kernel_calls()
    calls.call(spec, np.ones((2, 3), np.int8), np.ones((3, 4), np.int8), kernel=kernel)
    after = ffi.kernel_calls()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        kernel: 1
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_and_bias_may_have_16_bits(kernel, dtype):
    """The same bits as with the same numbers in float32."""
    spec, operands = scaled_problem(kernel)
    names = ("lhs_scale", "rhs_scale", "bias")
    narrow = {name: operands[name].astype(jnp.dtype(dtype)) for name in names}
    wide = {name: value.astype(np.float32) for name, value in narrow.items()}
    (expected,) = calls.call_named(spec, operands | wide, kernel)
    (out,) = calls.call_named(spec, operands | narrow, kernel)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_may_be_rounded_by_the_call(kernel):
    """The same bits as with scales that were rounded to bfloat16 before."""
    spec, operands = scaled_problem(kernel)
    for name in ("lhs_scale", "rhs_scale"):
        rounded = operands[name].astype(jnp.bfloat16).astype(np.float32)
        (expected,) = calls.call_named(spec, operands | {name: rounded}, kernel)
        given = [operands[operand] for operand in spec.operand_names()]
        (out,) = calls.call(spec, *given, kernel=kernel, **{f"{name}_rounded": True})
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("tile", [1028, 1040, 1056, 2080])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_end_of_a_deep_tile_may_be_as_long_as_the_next_tile(kernel, tile):
    """A kernel cuts [N, K] into pieces; here two that look alike lie in tiles of two lengths."""
    left, right = ("int8", "int8") if sums_integers(kernel) else ("bfloat16", "int8")
    depth = tile + tile % 1024
    spec = ScaledDotSpec(
        lhs=calls.side(left, (2, 5, depth), (1, 2)),
        rhs=calls.side(right, (9, 5, depth), (1, 2), tiles=(1, 1, tile), scale=True),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    operands = specs.draw_operands(np.random.default_rng(7), spec)
    operands["rhs_scale"] = np.abs(operands["rhs_scale"]) % 1  # moderate: sums are float32
    (out,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, out)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if sums_integers(name)])
def test_zero_points_may_be_bytes(kernel):
    """The same bits as with int32."""
    spec, operands = scaled_problem(kernel, zero_point=True)
    (expected,) = calls.call_named(spec, operands, kernel)
    oracle.assert_within_bound(spec, operands, expected)
    names = ("lhs_zero_point", "rhs_zero_point")
    narrow = {name: operands[name].astype(np.int8) for name in names}
    (out,) = calls.call_named(spec, operands | narrow, kernel)
    np.testing.assert_array_equal(out, expected)
