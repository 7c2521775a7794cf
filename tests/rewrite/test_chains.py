"""A gate and the product of its output: one call of two launches on a GPU, two calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, E4M3, F16, F32, count
from rewrite.test_gates import joint_calls
from rewrite.test_joint import K, Weights, dot, dynamic, hopper, normed, weight

import jaxfp8
from jaxfp8._call.gpu import xla_products
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint

pytestmark = pytest.mark.cuda_library
hopper = hopper  # the fixture

N = 192
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, K)), BF16)
WS = (weight(1, N), weight(2, N), weight(3, K, N))


def gate(x: jax.Array, ws: Weights) -> jax.Array:
    return jax.nn.silu(dot(x, ws[0])) * dot(x, ws[1])


def mlp(x: jax.Array, ws: Weights) -> jax.Array:
    return dot(gate(x, ws), ws[2])


def layers(x: jax.Array, ws: Weights) -> jax.Array:
    for _ in range(2):
        x = x + mlp(normed(x), ws)
    return x


CHAINED: dict[str, tuple[Callable[..., Any], int]] = {
    "alone": (mlp, 1),
    "residual": (lambda x, ws: x + mlp(normed(x), ws), 1),
    "bias": (lambda x, ws: mlp(x, ws) + ws[2][1], 1),
    "two layers": (layers, 2),
    "three axes": (lambda x, ws: mlp(x[:, None], ws), 1),
    "jitted parts": (lambda x, ws: dot(jax.jit(gate)(x, ws), ws[2]), 1),
    "in a scan": (
        lambda x, ws: jax.lax.scan(lambda c, _: (layers(c, ws), None), x, None, 2)[0],
        2,
    ),
}


@pytest.mark.parametrize("name", CHAINED)
def test_a_gate_and_the_product_of_it_are_one_call(name: str) -> None:
    fun, calls = CHAINED[name]
    rewritten = jaxfp8.rewrite(fun)
    found = joint_calls(rewritten, X, WS)
    assert [eqn.params["chained"] for eqn in found] == [True] * calls
    assert count(rewritten, X, WS) == 0
    expected = np.asarray(fun(X.astype(F32), WS), F32)
    out = np.asarray(rewritten(X, WS), F32)
    assert np.linalg.norm(out - expected) <= 2e-2 * np.linalg.norm(expected)


APART: dict[str, Callable[..., Any]] = {
    "the output of the gate is returned": lambda x, ws: (y := gate(x, ws), dot(y, ws[2])),
    "another product reads it": lambda x, ws: (
        dot(y := gate(x, ws), ws[2]),
        y.T @ ws[2][0].astype(BF16)[:3],
    ),
    "a step between": lambda x, ws: dot(jnp.sin(gate(x, ws)), ws[2]),
    "on the right side": lambda x, ws: ws[2][0].T.astype(BF16) @ gate(x, ws).T,
    "another shape": lambda x, ws: dot(gate(x, ws).reshape(9, 64), (ws[2][0][:64], ws[2][1])),
    "float weights": lambda x, ws: gate(x, ws) @ ws[2][1][:N, None],
    "a bias that waits for the gate": lambda x, ws: dot(y := gate(x, ws), ws[2]) + y[0, 0],
}


@pytest.mark.parametrize("name", APART)
def test_other_products_behind_a_gate_have_calls_of_their_own(name: str) -> None:
    found = joint_calls(jaxfp8.rewrite(APART[name]), X, WS)
    assert [eqn.params["chained"] for eqn in found] == [False]
    assert found[0].params["multiplied"]


def test_a_product_that_is_left_to_xla_is_in_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_products, "_MOST_WEIGHTS", K * N)  # gate and up have twice as many
    monkeypatch.setattr(ffi, "compute_capability", lambda: 90)
    (eqn,) = joint_calls(jaxfp8.rewrite(mlp), X, WS)
    assert eqn.params["multiplied"]
    assert not eqn.params["chained"]


def test_rows_that_are_quantised_between_are_in_no_chain() -> None:
    def fun(x: jax.Array, ws: Weights) -> jax.Array:
        return dynamic(gate(x, ws), ws[2])

    (eqn,) = joint_calls(jaxfp8.rewrite(fun), X, WS)
    assert not eqn.params["chained"]


def test_fp8_rows_of_a_gate_are_chained_too() -> None:
    def fun(x: jax.Array, scale: jax.Array, ws: Weights) -> jax.Array:
        sums = [jnp.dot(x.astype(BF16), q.astype(BF16), preferred_element_type=F32) for q, _ in ws]
        one, two = ((y * scale * s.astype(F32)).astype(BF16) for y, (_, s) in zip(sums, ws))  # noqa: B905
        return dot(jax.nn.silu(one) * two, WS[2])

    (eqn,) = joint_calls(jaxfp8.rewrite(fun), X.astype(E4M3), jnp.ones((3, 1)), WS[:2])
    assert eqn.params["chained"]


@pytest.mark.parametrize("wide", [BF16, F16], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "mode", ["eager", "jit", "vmap", "grad", "jvp", "remat", "shard_map", "explicit axes"]
)
def test_a_chain_has_the_bits_of_its_dots(
    monkeypatch: pytest.MonkeyPatch, mode: str, wide: Any
) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jaxfp8.rewrite(layers)(x, WS).astype(F32)))

    def run(x: jax.Array) -> Any:
        fun = jaxfp8.rewrite(layers)
        mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        explicit = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        modes: dict[str, Callable[[], Any]] = {
            "eager": lambda: fun(x, WS),
            "jit": lambda: jax.jit(fun)(x, WS),
            "vmap": lambda: jax.jit(jax.vmap(fun, (0, None)))(jnp.stack([x, 2 * x]), WS),
            "grad": lambda: jax.jit(jax.grad(loss))(x),
            "jvp": lambda: jax.jvp(lambda x: fun(x, WS), (x,), (x,)),
            "remat": lambda: jax.jit(jax.grad(jax.checkpoint(loss)))(x),
            "shard_map": lambda: jax.jit(
                jax.shard_map(
                    lambda x: fun(x, WS), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
                )
            )(jnp.concatenate([x, x])),
            "explicit axes": lambda: jax.jit(fun)(
                *jax.device_put((x, WS), jax.NamedSharding(explicit, jax.P()))
            ),
        }
        return modes[mode]()

    x = X.astype(wide)
    together = run(x)
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    jax.clear_caches()
    apart = run(x)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def lowered(platform: str) -> str:
    trace = jax.jit(jaxfp8.rewrite(CHAINED["residual"][0])).trace(X, WS)
    return trace.lower(lowering_platforms=(platform,)).as_text()


def test_a_program_for_a_gpu_holds_one_call_with_both_results() -> None:
    text = lowered("cuda")
    assert "@jaxfp8_scaled_dot" not in text
    (line,) = [line for line in text.splitlines() if "@jaxfp8_joint_dots" in line]
    assert "then_lhs_dtype" in line
    assert "dot2_" not in line
    given, _, results = line.rpartition("->")
    assert f"tensor<1x3x{N}xbf16>, tensor<1x3x{K}xbf16>" in results
    # Input, weight, scale; again; weight, scale, residual. The left side of the last is no operand.
    assert given.rpartition(" : ")[2].count("tensor<") == 9
    assert given.rpartition(" : ")[2].count(f"tensor<1x3x{N}xbf16>") == 0


def test_a_program_for_a_cpu_holds_a_call_for_each_product() -> None:
    text = lowered("cpu")
    assert "jaxfp8_joint_dots" not in text
    assert text.count("@jaxfp8_scaled_dot") == 3


def test_an_exported_program_holds_a_call_for_each_product() -> None:
    fun = jax.jit(jaxfp8.rewrite(mlp))
    checks = jaxfp8.ffi.export_checks()
    exported = jax.export.export(fun, platforms=("cuda",), disabled_checks=checks)(X, WS)
    assert "jaxfp8_joint_dots" not in exported.mlir_module()


def test_explain_says_what_shares_a_call() -> None:
    report = jaxfp8.explain(mlp)(X, WS)
    launch = "one launch with another of its input, and the product of both outputs"
    behind = f"{launch}; one call with the product behind it"
    assert [site.note for site in report.sites] == [
        behind,
        behind,
        "one call with the gate in front of it",
    ]
    assert [site.kernels["cuda"] for site in report.sites] == ["sm80_w8a16"] * 3
    again = jaxfp8.explain(jaxfp8.rewrite(mlp))(X, WS)
    assert [site.rhs.shape for site in again.calls] == [(K, N), (K, N), (N, K)]
