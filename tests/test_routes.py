"""The kernel that a report names is the one that runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import routes
from jaxfp8.testing import kernel_calls

RNG = np.random.default_rng(0)


def quantized(dtype, *shape, tile=None, **options):
    x = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    tiles = {"tiled_axes": {0: tile}} if tile else {"channelwise_axes": (1,)}
    return jaxfp8.quantize(x, dtype, **tiles, **options)


def plain(dtype, *shape):
    return jnp.asarray(RNG.normal(size=shape), dtype)


CASES = {
    "bf16 x e4m3": lambda: (plain(jnp.bfloat16, 3, 64), quantized(jnp.float8_e4m3fn, 64, 17)),
    "f32 x e5m2": lambda: (plain(jnp.float32, 3, 64), quantized(jnp.float8_e5m2, 64, 17)),
    "int8 x int8": lambda: (quantized(jnp.int8, 3, 64, tile=3), quantized(jnp.int8, 64, 17)),
    "e4m3 x int8": lambda: (
        quantized(jnp.float8_e4m3fn, 3, 64, tile=3),
        quantized(jnp.int8, 64, 17),
    ),
    "short blocks": lambda: (
        plain(jnp.bfloat16, 3, 256),
        quantized(jnp.float8_e4m3fn, 256, 17, tile=4),
    ),
    "many rows by blocks of 32": lambda: (
        plain(jnp.float32, 256, 1024),
        quantized(jnp.float8_e4m3fn, 1024, 66, tile=32),
    ),
    "zero points": lambda: (
        plain(jnp.bfloat16, 3, 64),
        quantized(jnp.uint8, 64, 17, zero_point=True),
    ),
}


def spec_of(lhs, rhs):
    jaxpr = jax.make_jaxpr(jaxfp8.matmul)(lhs, rhs)
    return next(iter(specs_in(jaxpr.jaxpr)))


def specs_in(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scaled_dot":
            yield eqn.params["spec"]
    for inner in core.subjaxprs(jaxpr):
        yield from specs_in(inner)


@pytest.mark.parametrize("case", CASES)
def test_kernel_that_is_named_is_the_one_that_runs(case):
    lhs, rhs = CASES[case]()
    kernel = routes.kernel_for(spec_of(lhs, rhs), "cpu")
    before = kernel_calls()
    jax.block_until_ready(jaxfp8.matmul(lhs, rhs))
    after = kernel_calls()
    assert [name for name in after if after[name] > before[name]] == [kernel]


def test_each_other_kernel_has_a_reason():
    paths = ffi.cpu_paths(spec_of(*CASES["e4m3 x int8"]()))
    assert set(ffi.available_kernels()) <= set(paths)
    assert [why for why in paths.values()].count("") == 1


@pytest.mark.parametrize("size", [1024, 4096])
def test_a_report_needs_no_data(size):
    """Blocks of 32 and many rows: with data the kernel would be chosen by the scales."""

    def f(x, q, s):
        w = q.astype(jnp.float32).reshape(size // 32, 32, size) * s[:, None, :]
        return x @ w.reshape(size, size).astype(x.dtype)

    shapes = (
        jax.ShapeDtypeStruct((256, size), jnp.bfloat16),
        jax.ShapeDtypeStruct((size, size), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((size // 32, size), jnp.float32),
    )
    told = {jaxfp8.explain(f)(*shapes).sites[0].kernels["cpu"] for _ in range(3)}
    assert len(told) == 1
    assert told <= set(ffi.available_kernels())


def test_platform_without_kernels_has_none():
    assert routes.kernel_for(spec_of(*CASES["bf16 x e4m3"]()), "tpu") is None
