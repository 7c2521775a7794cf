"""FP8 stacks that loops slice for products, on the CPU: sliced as bytes, not widened."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.ops import loop_picks

STACK = jaxfp8.quantize(
    jax.random.normal(jax.random.key(0), (8, 128, 128)) / 11, channelwise_axes=(0, 2)
)
X = jax.random.normal(jax.random.key(1), (2, 128))


def layer(x, w):
    return jnp.tanh(x @ w), None


def scanned(body, x, stack):
    return jax.lax.scan(body, x, stack)[0]


def twice(x, stack):
    """Each scan has a body of its own: JAX 0.10 writes a body that two scans share only once."""
    return scanned(lambda *args: layer(*args), scanned(layer, x, stack), stack)


def after_a_product(x, stack):
    """The same product stands in front of the loop: JAX may not write it from its cache."""
    return scanned(layer, layer(x, stack[0])[0], stack)


LOOPS = {
    "scan": functools.partial(scanned, layer),
    "remat": functools.partial(scanned, jax.checkpoint(layer)),
    "two scans": twice,
    "after a product": after_a_product,
    "gradient": jax.grad(lambda x, stack: scanned(jax.checkpoint(layer), x, stack).sum()),
    "jit in the body": functools.partial(scanned, jax.jit(layer)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_slices_an_fp8_stack_as_bytes(name):
    compiled = jax.jit(LOOPS[name]).lower(X, STACK).compile()
    # XLA would convert the stack to float16, twice its size.
    assert compiled.memory_analysis().temp_size_in_bytes < STACK.qvalue.nbytes
    want = jax.jit(jaxfp8.rewrite(LOOPS[name]))(X, STACK)
    np.testing.assert_array_equal(compiled(X, STACK), want)


def unrolled(x, stack):
    for i in range(len(stack.qvalue)):
        x, _ = layer(x, jaxfp8.QArray(stack.qvalue[i], stack.scale[i]))
    return x


def test_lowering_reads_each_operation_a_few_times(monkeypatch):
    """Products may be many, and the module grows with each of them."""
    read = []
    monkeypatch.setattr(loop_picks._Module, "_replace", lambda self, op: read.append(op.name))

    def visits(products):
        read.clear()
        stack = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], products, 0), STACK)
        jax.jit(unrolled).lower(X, stack)
        return len(read)

    assert visits(40) < 2.5 * visits(20)


def test_a_program_for_several_platforms_keeps_its_slices():
    traced = jax.jit(functools.partial(scanned, layer)).trace(X, STACK)
    alone, both = (
        traced.lower(lowering_platforms=platforms).as_text()
        for platforms in (("cpu",), ("cpu", "cuda"))
    )
    slices = "stablehlo.dynamic_slice", "-> tensor<1x128x128xui8>"
    assert any(all(part in line for part in slices) for line in alone.splitlines())
    assert not any(all(part in line for part in slices) for line in both.splitlines())
