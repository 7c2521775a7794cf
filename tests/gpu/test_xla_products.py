"""Small products, which XLA computes: right, without a wide copy of their weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import oracle
import specs
from jaxfp8._call.gpu import xla_products
from jaxfp8._call.gpu.canonical import is_empty
from jaxfp8._call.library import ffi
from jaxfp8._call.ops.dot import scaled_dot

HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
pytestmark = pytest.mark.skipif(not HOPPER, reason="XLA takes products on Hopper alone")
_TAKES = xla_products.takes
# Tensor cores cut off what is far below the largest term of an instruction.
SLACK = 2.0**-21


@pytest.fixture(autouse=True)
def left_to_xla(calls, monkeypatch):
    monkeypatch.setattr(xla_products, "takes", _TAKES)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("seed", range(40))
def test_random_products(seed):
    rng = np.random.default_rng(seed)
    spec = specs.draw_spec(rng)
    while is_empty(spec) or not xla_products.takes(spec, "", 90):
        spec = specs.draw_spec(rng)
    operands = specs.draw_operands(rng, spec)
    before = ffi.kernel_calls("cuda")
    out, amax = scaled_dot(spec, **{name: jnp.asarray(x) for name, x in operands.items()})
    found = None if amax is None else np.asarray(amax)
    oracle.assert_within_bound(spec, operands, np.asarray(out), found, SLACK)
    assert ffi.kernel_calls("cuda") == before


@pytest.mark.parametrize("layout", ["mk,nk->mn", "mk,kn->mn"])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_loop_keeps_weights_in_8_bits(layout, stacked):
    """XLA does not move the decoding in front of the loop, where it would be stored."""
    n, number = 1024, 8
    channel = 1 if layout.startswith("mk,nk") else 2
    stack = jax.random.normal(jax.random.key(0), (number, n, n), jnp.bfloat16)
    w = jaxfp8.quantize(stack, channelwise_axes=(0, channel))
    product = functools.partial(jaxfp8.einsum, layout)

    def layers(w):
        return [w[i] for i in range(number)]

    def turns(x, w):
        def turn(_, x):
            return functools.reduce(product, layers(w) if stacked else w, x)

        return jax.lax.fori_loop(0, 9, turn, x)

    args = jnp.ones((4, n), jnp.bfloat16), w if stacked else layers(w)
    compiled = jax.jit(turns).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * n * n


def test_repeats_have_the_same_bits():
    x = jax.random.normal(jax.random.key(0), (33, 300), jnp.bfloat16)
    w = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (300, 77)), channelwise_axes=(1,))
    run = jax.jit(jaxfp8.matmul)
    first = np.asarray(run(x, w))
    assert all(np.array_equal(np.asarray(run(x, w)), first) for _ in range(5))
