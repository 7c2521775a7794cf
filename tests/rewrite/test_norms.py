"""An RMSNorm inside the launch of the products that read it, on a GPU, and what it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, F16, F32, count
from rewrite.test_gates import joint_calls
from rewrite.test_joint import K, Weights, dot, hopper, weight

import jaxfp8
from jaxfp8._call.ops import joint

pytestmark = pytest.mark.cuda_library
hopper = hopper  # the fixture

N = 192
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, K)), BF16)
GAIN = jnp.asarray(np.random.default_rng(1).normal(size=K), BF16)
WIDE_GAIN = GAIN.astype(F32)
WS = tuple(weight(i + 1, N) for i in range(3))
Norm = Callable[[jax.Array, jax.Array], jax.Array]


def llama(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain


def in_float32(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    return (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def layer_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * gain).astype(x.dtype)


def without_gain(x: jax.Array, gain: jax.Array) -> jax.Array:
    return llama(x, jnp.ones_like(gain)) if gain is None else in_float32(x, jnp.float32(1.0))


def heads(x: jax.Array, gain: jax.Array, ws: Weights, norm: Norm = llama) -> list[jax.Array]:
    y = norm(x, gain)
    return [dot(y, w) for w in ws]


def gated(x: jax.Array, gain: jax.Array, ws: Weights, norm: Norm = llama) -> jax.Array:
    y = norm(x, gain)
    return jax.nn.silu(dot(y, ws[0])) * dot(y, ws[1])


def block(x: jax.Array, gain: jax.Array, ws: Weights) -> jax.Array:
    """The input of the norm is the output of a product, and the residual of the next."""
    x = x + dot(gated(x, gain, ws), (ws[2][0].T, ws[0][1][:1]))
    return x + heads(x, gain, ws)[0].sum()


INSIDE: dict[str, Callable[..., Any]] = {
    "query, key and value": heads,
    "one product": lambda x, gain, ws: heads(x, gain, ws[:1]),
    "a gain in float32": lambda x, gain, ws: heads(x, WIDE_GAIN, ws, in_float32),
    "one plus the gain": lambda x, gain, ws: heads(x, 1 + gain, ws),
    "one plus the gain in float32": lambda x, gain, ws: heads(
        x, 1 + gain.astype(F32), ws, in_float32
    ),
    "rounded once": lambda x, gain, ws: heads(x, gain, ws, in_float32),
    "three axes": lambda x, gain, ws: heads(x[:, None], gain, ws),
    "normalised twice": lambda x, gain, ws: [dot(llama(x, gain), w) for w in ws],
    "jitted": lambda x, gain, ws: heads(x, gain, ws, jax.jit(llama)),
    "two launches": lambda x, gain, ws: heads(x, gain, (*ws, *ws)),
    "in a scan": lambda x, gain, ws: jax.lax.scan(
        lambda c, g: (c, heads(c, g, ws)), x, jnp.stack([gain, 2 * gain])
    )[1],
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_norm_is_inside_the_launch(name: str) -> None:
    fun = INSIDE[name]
    rewritten = jaxfp8.rewrite(fun)
    calls = joint_calls(rewritten, X, GAIN, WS)
    assert calls
    assert all(eqn.params["fused"].norm is not None for eqn in calls)
    assert count(rewritten, X, GAIN, WS, name="rsqrt") == 0
    expected = fun(X.astype(F32), GAIN.astype(F32), WS)
    for a, b in zip(
        jax.tree.leaves(rewritten(X, GAIN, WS)), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a, F32), np.asarray(b, F32)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


OUTSIDE: dict[str, Callable[..., Any]] = {
    "the norm is returned": lambda x, gain, ws: (heads(x, gain, ws), llama(x, gain)),
    "another reader": lambda x, gain, ws: [y + llama(x, gain).sum() for y in heads(x, gain, ws)],
    "the mean is taken away": lambda x, gain, ws: heads(x, gain, ws, layer_norm),
    "no gain": lambda x, gain, ws: heads(x, gain, ws, without_gain),
    "an input that is computed": lambda x, gain, ws: heads(x * 2, gain, ws),
    "a gain that is computed": lambda x, gain, ws: heads(x, gain * 2, ws),
    "float16": lambda x, gain, ws: heads(x.astype(F16), gain.astype(F16), ws),
    "gate": gated,
    "many columns": lambda x, gain, ws: heads(
        x, gain, [(w.repeat(64, 1), s.repeat(64, -1)) for w, s in ws]
    ),
    "many rows": lambda x, gain, ws: heads(jnp.concatenate([x] * 3), gain, ws),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_norms_are_left_in_front(name: str) -> None:
    rewritten = jaxfp8.rewrite(OUTSIDE[name])
    calls = joint_calls(rewritten, X, GAIN, WS)
    assert calls
    assert all(eqn.params["fused"].norm is None for eqn in calls)


def test_the_norm_in_front_of_a_gate_is_left() -> None:
    rewritten = jaxfp8.rewrite(block)
    norms = [e.params["fused"].norm is not None for e in joint_calls(rewritten, X, GAIN, WS)]
    assert norms == [False, True]
    assert count(rewritten, X, GAIN, WS, name="rsqrt") == 1


@pytest.mark.parametrize("fun", [heads, gated], ids=["heads", "gate"])
@pytest.mark.parametrize("mode", ["eager", "jit", "vmap", "grad", "jvp", "explicit axes"])
def test_where_no_launch_runs_the_bits_are_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch, mode: str, fun: Callable[..., Any]
) -> None:
    """On a CPU a launch is its definition."""

    def loss(x: jax.Array, gain: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(jaxfp8.rewrite(fun)(x, gain, WS))
        return sum(jnp.sum(jnp.tanh(y.astype(F32))) for y in leaves)

    def run() -> Any:
        rewritten = jaxfp8.rewrite(fun)
        explicit = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        replicated = jax.NamedSharding(explicit, jax.P())
        modes: dict[str, Callable[[], Any]] = {
            "eager": lambda: rewritten(X, GAIN, WS),
            "jit": lambda: jax.jit(rewritten)(X, GAIN, WS),
            "vmap": lambda: jax.jit(jax.vmap(rewritten, (0, None, None)))(
                jnp.stack([X, 2 * X]), GAIN, WS
            ),
            "grad": lambda: jax.jit(jax.grad(loss, (0, 1)))(X, GAIN),
            "jvp": lambda: jax.jvp(lambda x: rewritten(x, GAIN, WS), (X,), (X,)),
            "explicit axes": lambda: jax.jit(rewritten)(*jax.device_put((X, GAIN, WS), replicated)),
        }
        return modes[mode]()

    inside = run()
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    jax.clear_caches()
    outside = run()
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        a, b = np.asarray(a, F32), np.asarray(b, F32)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def test_a_program_for_a_gpu_gives_the_call_the_gain() -> None:
    trace = jax.jit(jaxfp8.rewrite(heads)).trace(X, GAIN, WS)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "@jaxfp8_joint_dots" in line]
    assert "epsilon = " in line
    assert f"tensor<{K}xbf16>)" in line
    assert "rsqrt" not in text


def test_explain_says_that_the_norm_is_inside() -> None:
    report = jaxfp8.explain(heads)(X, GAIN, WS)
    note = "one launch with 2 more of its input; RMSNorm of its input is inside the launch"
    assert [site.note for site in report.sites] == [note] * 3
