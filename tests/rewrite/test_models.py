"""Models as people write them, with 8-bit weights: every product of theirs is captured."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewrite.captured import check, check_values
from rewrite.support import BF16, E4M3, F32, Data, count

import jaxfp8

B, S, D, FF, LAYERS, VOCAB, LENGTH = 2, 3, 32, 48, 3, 40, 8
HEADS, GROUPS, SIZE = 4, 2, 8
DATA = Data()
IDS = jnp.asarray([[1, 2, 3], [4, 5, 6]])


def stack(*shape: int) -> tuple[jax.Array, jax.Array]:
    """FP8 matrices for all layers, scaled by column."""
    return DATA.bits8(LAYERS, *shape), DATA.scale(LAYERS, 1, shape[-1]) * 0.1


def deq(w: Any, dtype: Any = F32) -> Any:
    q, s = w
    return q.astype(dtype) * s.astype(dtype)


WEIGHTS = {
    "q": stack(D, HEADS * SIZE),
    "k": stack(D, GROUPS * SIZE),
    "v": stack(D, GROUPS * SIZE),
    "o": stack(HEADS * SIZE, D),
    "gate": stack(D, FF),
    "up": stack(D, FF),
    "down": stack(FF, D),
}
NORMS = DATA.scale(LAYERS, 2, D)
TABLE = (DATA.bits8(VOCAB, D), DATA.scale(VOCAB, 1))


def norm(x: Any, gain: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def heads(x: Any, number: int) -> Any:
    return x.reshape(*x.shape[:-1], number, SIZE)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Grouped-query attention of [B, S, H, D] on [B, T, G, D]."""
    k, v = (jnp.repeat(a, HEADS // GROUPS, 2) for a in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(SIZE))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], HEADS * SIZE)


def block(x: Any, w: Any, gains: Any) -> Any:
    """One layer of a Llama: attention and SwiGLU, `w` gives its wide weights."""
    h = norm(x, gains[0])
    q, k, v = heads(h @ w("q"), HEADS), heads(h @ w("k"), GROUPS), heads(h @ w("v"), GROUPS)
    x = x + attend(q, k, v) @ w("o")
    h = norm(x, gains[1])
    return x + (jax.nn.silu(h @ w("gate")) * (h @ w("up"))) @ w("down")


def llama(ids: Any, table: Any, weights: Any, norms: Any) -> Any:
    def layer(x: Any, inputs: Any) -> Any:
        w, gains = inputs
        return block(x, lambda name: deq(w[name]), gains), None

    x, _ = lax.scan(layer, deq(table)[ids], (weights, norms))
    return x @ deq(table).T


def llama_dequantized_outside(ids: Any, table: Any, weights: Any, norms: Any) -> Any:
    wide, embedding = {name: deq(w) for name, w in weights.items()}, deq(table)

    def layer(x: Any, inputs: Any) -> Any:
        w, gains = inputs
        return block(x, w.__getitem__, gains), None

    return lax.scan(layer, embedding[ids], (wide, norms))[0] @ embedding.T


def llama_with_remat(ids: Any, table: Any, weights: Any, norms: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, inputs: Any) -> Any:
        w, gains = inputs
        return block(x, lambda name: deq(w[name]), gains), None

    return lax.scan(layer, deq(table)[ids], (weights, norms))[0] @ deq(table).T


@pytest.mark.parametrize("model", [llama, llama_dequantized_outside, llama_with_remat])
def test_llama_is_captured(model: Any) -> None:
    check(model, IDS, TABLE, WEIGHTS, NORMS, calls=8, others=2, within=1e-4)


def _loss(model: Any) -> Any:
    return lambda norms, *rest: jnp.mean(model(*rest, norms) ** 2)


# Of the 8 products each once more as dy @ W^T; those of attention have no 8-bit data, and four
# others in the backward pass, four more with what is computed again.
@pytest.mark.parametrize(
    ("model", "calls", "others"), [(llama, 16, 6), (llama_dequantized_outside, 16, 6)]
)
def test_backward_pass_of_llama_reads_the_8_bit_weights(
    model: Any, calls: int, others: int
) -> None:
    args = NORMS, IDS, TABLE, WEIGHTS
    check(jax.grad(_loss(model)), *args, calls=calls, others=others, within=1e-4)


def test_gradient_of_a_rewritten_llama_is_that_of_the_llama() -> None:
    args = NORMS, IDS, TABLE, WEIGHTS
    got = jax.grad(jaxfp8.rewrite(_loss(llama)))
    assert count(got, *args) == 16
    check_values(got, jax.grad(_loss(llama)), *args, within=1e-4)


def decode(token: Any, cache: Any, place: Any, table: Any, weights: Any, norms: Any) -> Any:
    """One token through all layers, with keys and values kept in 8 bits."""
    x = deq(table)[token][:, None]

    def layer(x: Any, inputs: Any) -> Any:
        w, gains, (keys, values) = inputs
        h = norm(x, gains[0])
        q = (h @ deq(w["q"])).reshape(B, GROUPS, HEADS // GROUPS, SIZE)
        k, v = heads(h @ deq(w["k"]), GROUPS), heads(h @ deq(w["v"]), GROUPS)
        keys = lax.dynamic_update_slice(keys, k.astype(keys.dtype), (0, place, 0, 0))
        values = lax.dynamic_update_slice(values, v.astype(values.dtype), (0, place, 0, 0))
        scores = jnp.einsum("bghd,bsgd->bghs", q, keys.astype(F32))
        scores = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= place, scores, -1e9))
        mixed = jnp.einsum("bghs,bsgd->bghd", scores, values.astype(F32))
        x = x + mixed.reshape(B, 1, HEADS * SIZE) @ deq(w["o"])
        h = norm(x, gains[1])
        x = x + (jax.nn.silu(h @ deq(w["gate"])) * (h @ deq(w["up"]))) @ deq(w["down"])
        return x, (keys, values)

    x, cache = lax.scan(layer, x, (weights, norms, cache))
    return (x @ deq(table).T)[:, 0], cache


def generate(token: Any, cache: Any, table: Any, weights: Any, norms: Any) -> Any:
    def more(state: Any) -> Any:
        return state[1] < 3

    def step(state: Any) -> Any:
        token, place, cache = state
        logits, cache = decode(token, cache, place, table, weights, norms)
        return jnp.argmax(logits, -1).astype(token.dtype), place + 1, cache

    return lax.while_loop(more, step, (token, jnp.int32(0), cache))[0]


# FP8 keys and values make two more products.
@pytest.mark.parametrize(("dtype", "calls", "others"), [(F32, 8, 2), (E4M3, 10, 0)])
def test_decode_step_is_captured(dtype: Any, calls: int, others: int) -> None:
    cache = (jnp.zeros((LAYERS, B, LENGTH, GROUPS, SIZE), dtype),) * 2
    args = jnp.asarray([1, 2]), cache, jnp.int32(3), TABLE, WEIGHTS, NORMS
    check(decode, *args, calls=calls, others=others, within=1e-4)


def test_decode_loop_is_captured() -> None:
    cache = (jnp.zeros((LAYERS, B, LENGTH, GROUPS, SIZE), E4M3),) * 2
    args = jnp.asarray([1, 2]), cache, TABLE, WEIGHTS, NORMS
    check(generate, *args, calls=10, within=0.0)


# Experts

EXPERTS = (
    (DATA.bits8(4, D, FF), DATA.scale(4, 1, FF) * 0.2),
    (DATA.bits8(4, FF, D), DATA.scale(4, 1, D) * 0.2),
)
ROUTER = DATA.normal(D, 4)


def gathered(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Each token has the weights of its expert gathered."""
    gates = jax.nn.softmax(x @ router)
    best = jnp.argmax(gates, -1)
    h = jax.nn.silu(jnp.einsum("td,tdf->tf", x, deq(up)[best]))
    y = jnp.einsum("tf,tfd->td", h, jnp.take(deq(down), best, axis=0))
    return jnp.take_along_axis(gates, best[:, None], 1) * y


def mapped(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Each expert works on all tokens; what it says counts as much as its gate."""
    every = jax.vmap(lambda up, down: jax.nn.silu(x @ deq(up)) @ deq(down))(up, down)
    return jnp.einsum("te,etd->td", jax.nn.softmax(x @ router), every)


def dispatched(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Tokens are sent to their experts and back by products with one-hot masks."""
    mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), 4)
    h = jax.nn.gelu(jnp.einsum("etd,edf->etf", jnp.einsum("te,td->etd", mask, x), deq(up)))
    return jnp.einsum("te,etd->td", mask, jnp.einsum("etf,efd->etd", h, deq(down)))


def scanned(x: Any, router: Any, up: Any, down: Any) -> Any:
    """One expert after the other."""
    gates = jax.nn.softmax(x @ router)

    def expert(total: Any, inputs: Any) -> Any:
        up, down, gate = inputs
        return total + gate[:, None] * (jax.nn.silu(x @ deq(up)) @ deq(down)), None

    return lax.scan(expert, jnp.zeros_like(x), (up, down, gates.T))[0]


# The router, and dispatch and combination where they are products, have no 8-bit data.
@pytest.mark.parametrize(
    ("model", "others"), [(gathered, 1), (mapped, 2), (dispatched, 3), (scanned, 1)]
)
def test_mixture_of_experts_is_captured(model: Any, others: int) -> None:
    args = DATA.normal(6, D), ROUTER, *EXPERTS
    check(model, *args, calls=2, others=others, within=1e-5)


# One function each


def test_kernel_with_several_contracted_axes_is_captured() -> None:
    """As MaxText serves FP8: a kernel and its kernel_scale."""

    def project(x: Any, kernel: Any, scale: Any) -> Any:
        wide = (kernel.astype(F32) * scale).astype(BF16)
        return lax.dot_general(x, wide, (((2, 3), (0, 1)), ((), ())))

    kernel, scale = DATA.bits8(4, 8, D), DATA.scale(1, 1, D)
    check(project, DATA.normal(2, 3, 4, 8, dtype=BF16), kernel, scale, calls=1)


def test_tied_embedding_and_weights_of_three_axes_are_captured() -> None:
    def model(ids: Any, table: Any, w: Any) -> Any:
        embedding = deq(table, BF16)
        h = jnp.einsum("btd,dnh->btnh", embedding[ids], deq(w, BF16))
        return jnp.einsum("btnh,dnh->btd", h, deq(w, BF16)) @ embedding.T

    w = DATA.bits8(D, 4, 8), DATA.scale(1, 4, 8)
    check(model, IDS, TABLE, w, calls=3, within=1e-2)


def test_fp8_matmul_with_delayed_scaling_is_captured_with_its_amax() -> None:
    """The program whose output scale and amax XLA was asked to fuse."""

    def matmul(x: Any, y: Any, x_scale: Any, y_scale: Any, z_scale: Any) -> Any:
        z = lax.dot(x.astype(np.float32) * x_scale, y.astype(np.float32) * y_scale)
        return jnp.clip(z / z_scale, -448, 448).astype(E4M3), jnp.max(lax.abs(z), axis=(0, 1))

    scales = (jnp.float32(0.5), jnp.float32(0.25), jnp.float32(2))
    args = DATA.bits8(5, D), DATA.bits8(D, 24), *scales
    site = jaxfp8.explain(matmul)(*args).matched[0]
    assert site.epilogue == "scale, amax, out scale -> float8_e4m3fn"
    check(matmul, *args, calls=1, within=1e-2)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (jnp.float8_e5m2, E4M3)])
def test_dequantize_and_dot_of_two_fp8_arrays_is_captured(dtypes: Any) -> None:
    """The pattern that guides to FP8 in XLA tell users to write, scales being Python numbers."""

    @jax.jit
    def matmul(a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
        return lax.dot(a.astype(BF16) * a_scale, b.astype(BF16) * b_scale)

    a, b = DATA.bits8(16, D, dtype=dtypes[0]), DATA.bits8(D, 64, dtype=dtypes[1])
    check(lambda a, b: matmul(a, 1.0, b, 0.5), a, b, calls=1)
