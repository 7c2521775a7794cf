"""A stack of 8-bit layers is never widened by XLA:CPU, however the scan comes by its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from rewrite.support import BF16, E4M3, E5M2, F32, Data, count

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

LAYERS, SIZE = 16, 256


def _deq(q: Any, s: Any) -> Any:
    return q.astype(BF16) * s.astype(BF16)


def as_stacks(x: Any, q: Any, s: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ _deq(*w)), None), x, (q, s))[0]


def as_constants(x: Any, q: Any, s: Any) -> Any:
    layers = jnp.arange(LAYERS)
    return lax.scan(lambda x, i: (jnp.tanh(x @ _deq(q[i], s[i])), None), x, layers)[0]


def dequantized_outside(x: Any, q: Any, s: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, _deq(q, s))[0]


def gradient(x: Any, q: Any, s: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(as_stacks(x, q, s).astype(F32)))(x)


def gradient_dequantized_outside(x: Any, q: Any, s: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(dequantized_outside(x, q, s).astype(F32)))(x)


def in_fori_loop(x: Any, q: Any, s: Any) -> Any:
    return lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ _deq(q[i], s[i])), x)


def in_nested_jit(x: Any, q: Any, s: Any) -> Any:
    layer = jax.jit(lambda x, q, s: jnp.tanh(x @ _deq(q, s)))
    return lax.scan(lambda x, w: (layer(x, *w), None), x, (q, s))[0]


def in_branches(x: Any, q: Any, s: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        wide = _deq(*w)
        one, other = (lambda x: jnp.tanh(x @ wide)), (lambda x: jnp.cos(x @ wide))
        return lax.cond(jnp.sum(x) > 0, one, other, x), None

    return lax.scan(layer, x, (q, s))[0]


def in_one_branch(x: Any, q: Any, s: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ _deq(*w)), jnp.cos, x), None

    return lax.scan(layer, x, (q, s))[0]


MODELS = [as_stacks, as_constants, dequantized_outside, gradient, gradient_dequantized_outside]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
def test_stack_of_layers_is_never_widened(model: Callable[..., Any], dtype: Any) -> None:
    data = Data()
    q = data.bits8(LAYERS, SIZE, SIZE, dtype=dtype)
    args = data.normal(2, SIZE, dtype=BF16), q, data.scale(LAYERS, 1, SIZE) * 0.05
    compiled = jax.jit(jaxfp8.rewrite(model)).lower(*args).compile()
    text = compiled.as_text()
    for wide in ("f16", "bf16", "f32"):
        assert f"{wide}[{LAYERS},{SIZE},{SIZE}]" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * q.nbytes


@pytest.mark.parametrize("dtype", [E4M3, jnp.int8], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize(
    "model",
    [
        as_stacks,
        as_constants,
        dequantized_outside,
        in_fori_loop,
        in_nested_jit,
        in_branches,
        in_one_branch,
    ],
    ids=lambda f: f.__name__,
)
def test_gradient_of_the_rewrite_keeps_8_bits(model: Callable[..., Any], dtype: Any) -> None:
    def loss(x: Any, q: Any, s: Any) -> Any:
        return jnp.sum(jaxfp8.rewrite(model)(x, q, s).astype(F32))

    data = Data()
    q = data.bits8(LAYERS, SIZE, SIZE, dtype=dtype)
    args = data.normal(2, SIZE, dtype=BF16), q, data.scale(LAYERS, 1, SIZE) * 0.05
    assert count(jax.grad(loss), *args) == (4 if model is in_branches else 2)
    compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
    text = compiled.as_text()
    for wide in ("f16", "bf16", "f32"):
        assert f"{wide}[{LAYERS},{SIZE},{SIZE}]" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * q.nbytes  # picked codes, copies


def of_qarrays(x: Any, q: Any, s: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jaxfp8.QArray(q, s))[0]


def gradient_of_qarrays(x: Any, q: Any, s: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(of_qarrays(x, q, s).astype(F32)))(x)


def indexed(x: Any, q: Any, s: Any) -> Any:
    def layer(i: Any, x: Any) -> Any:
        one = [lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in (q, s)]
        return jnp.tanh(x @ jaxfp8.QArray(*one))

    return lax.fori_loop(0, LAYERS, layer, x)


def gathered(x: Any, q: Any, s: Any) -> Any:
    def layer(x: Any, i: Any) -> Any:
        one = [jnp.take(leaf, i, axis=0, mode="clip") for leaf in (q, s)]
        return jnp.tanh(x @ jaxfp8.QArray(*one)), None

    return lax.scan(layer, x, jnp.asarray([3, 1, LAYERS + 5]))[0]


def in_linen(x: Any, q: Any, s: Any) -> Any:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            layer = jaxfp8.linen.Dense(SIZE, use_bias=False, dtype=BF16, name="layer")
            return jnp.tanh(layer(x)), None

    stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
    params = {"layer": {"kernel": jaxfp8.QArray(q, s)}}
    return stack().apply({"params": params}, x, None)[0]


def in_nnx(x: Any, q: Any, s: Any) -> Any:
    @nnx.vmap(in_axes=(0, 0))
    def stacked(q: Any, s: Any) -> Any:
        layer = jaxfp8.nnx.Linear(SIZE, SIZE, use_bias=False, dtype=BF16, rngs=nnx.Rngs(0))
        layer.weight = jaxfp8.QArray(q, s)
        return layer

    run = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return run(x, stacked(q, s))


@pytest.mark.parametrize(
    "model",
    [of_qarrays, gradient_of_qarrays, indexed, gathered, in_linen, in_nnx],
    ids=lambda f: f.__name__,
)
def test_stack_of_8_bit_operands_is_sliced_as_bytes(model: Callable[..., Any]) -> None:
    data = Data()
    q = data.bits8(LAYERS, SIZE, SIZE, dtype=E4M3)
    args = data.normal(2, SIZE, dtype=BF16), q, data.scale(LAYERS, 1, SIZE) * 0.05
    rewritten = jax.jit(jaxfp8.rewrite(model))
    compiled = rewritten.lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * q.nbytes
    assert jnp.array_equal(compiled(*args), jax.jit(model)(*args))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 3}], ids=str)
def test_stack_that_passes_through_a_scan_keeps_its_codes(options: Any, dtype: Any) -> None:
    def model(q: Any, s: Any) -> Any:
        def turn(y: Any, w: Any) -> Any:
            return y + w[1], lax.optimization_barrier(w[0])

        return lax.scan(turn, 0.0, (q, s), **options)

    codes = np.random.default_rng(0).permutation(1024).astype(np.uint8).reshape(8, 128)
    total, got = jaxfp8.rewrite(model)(codes.view(dtype), jnp.arange(8.0))
    assert np.array_equal(np.asarray(got).view(np.uint8), codes) and total == 28
    empty = jaxfp8.rewrite(model)(jnp.zeros((0, 3), dtype), jnp.zeros(0))[1]
    assert empty.shape == (0, 3) and empty.dtype == dtype


def test_rows_of_an_embedding_are_picked_before_they_are_dequantized() -> None:
    def model(ids: Any, q: Any, s: Any) -> Any:
        table = q.astype(F32) * s
        rows = table[ids]
        return rows, jnp.take(table, ids, axis=0), rows @ table.T

    data = Data()
    args = jnp.asarray([3, 1, 39]), data.bits8(40, 32), data.scale(40, 1)
    assert "f32[40,32]" not in str(jax.make_jaxpr(jaxfp8.rewrite(model))(*args))
    for got, want in zip(jaxfp8.rewrite(model)(*args)[:2], jax.jit(model)(*args)[:2], strict=True):
        assert jnp.array_equal(got, want)


def test_taken_rows_out_of_bounds_are_nan_as_in_the_function() -> None:
    def model(ids: Any, q: Any, s: Any, x: Any) -> Any:
        table = q.astype(F32) * s
        return jnp.take(table, ids, axis=0) @ x, jnp.take(table, ids, axis=0)

    data = Data()
    args = jnp.asarray([3, 77, -1]), data.bits8(40, 32), data.scale(40, 1), data.normal(32, 5)
    assert len(jaxfp8.explain(model)(*args).matched) == 1
    for got, want in zip(jaxfp8.rewrite(model)(*args), model(*args), strict=True):
        assert jnp.array_equal(jnp.isnan(got), jnp.isnan(want))
        assert jnp.allclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
