"""Two products of one input, multiplied: one launch on a GPU, and what they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, E4M3, F16, F32, count
from rewrite.test_joint import K, Weights, dot, dynamic, hopper, normed, weight

import jaxfp8
from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir import graph

pytestmark = pytest.mark.cuda_library
hopper = hopper  # the fixture

N = 192
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, K)), BF16)
WS = tuple(weight(i + 1, N) for i in range(3))


def silu(x: jax.Array, ws: Weights) -> jax.Array:
    return jax.nn.silu(dot(x, ws[0])) * dot(x, ws[1])


def by(act: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, ws: dot(x, ws[1]) * act(dot(x, ws[0]))


def in_float32(x: jax.Array, ws: Weights) -> jax.Array:
    gate, up = (dot(x, w).astype(F32) for w in ws[:2])
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def blocks(w: tuple[jax.Array, jax.Array], size: int) -> jax.Array:
    """A weight with other scales every `size` values of K."""
    scale = jnp.repeat(jnp.stack([w[1]] * (K // size)), size, 0)
    return w[0].astype(BF16) * scale


def heads(x: jax.Array, ws: Weights) -> jax.Array:
    """The products have another shape when they are multiplied."""
    gate, up = (dot(x, w).reshape(3, 4, -1) for w in ws[:2])
    return jax.nn.silu(gate) * up


GATED = {
    "silu": silu,
    "up first": lambda x, ws: dot(x, ws[1]) * jax.nn.silu(dot(x, ws[0])),
    "x sigmoid(x)": lambda x, ws: (g := dot(x, ws[0])) * jax.nn.sigmoid(g) * dot(x, ws[1]),
    "gelu": by(lambda g: jax.nn.gelu(g, approximate=False)),
    "gelu tanh": by(jax.nn.gelu),
    "relu": by(jax.nn.relu),
    "no activation": by(lambda g: g),
    "bias": lambda x, ws: jax.nn.silu(dot(x, ws[0]) + ws[0][1]) * (dot(x, ws[1]) + ws[1][1]),
    "float32": in_float32,
    "heads": heads,
    "three axes": lambda x, ws: silu(x[:, None], ws),
    "jitted": lambda x, ws: jax.jit(silu)(x, ws),
    "weights on the left": lambda x, ws: (
        jax.nn.silu(ws[0][0].T.astype(BF16) @ x.T) * (ws[1][0].T.astype(BF16) @ x.T)
    ),
    "blocks of K": lambda x, ws: jax.nn.silu(x @ blocks(ws[0], 128)) * (x @ blocks(ws[1], 128)),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_is_one_call_with_one_result(name: str) -> None:
    fun = GATED[name]
    rewritten = jaxfp8.rewrite(fun)
    (eqn,) = joint_calls(rewritten, X, WS)
    assert eqn.params["multiplied"] == "bfloat16"
    assert len(eqn.outvars) == 1
    assert count(rewritten, X, WS, name="mul") == 0
    assert count(rewritten, X, WS) == 0
    expected = np.asarray(fun(X.astype(F32), WS), F32)
    found = np.asarray(rewritten(X, WS), F32)
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


def joint_calls(fun: Callable[..., Any], *args: Any) -> list[Any]:
    every = graph.equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return [eqn for eqn in every if eqn.primitive.name == "joint_dots"]


KEPT: dict[str, Callable[..., Any]] = {
    "another reader of the gate": lambda x, ws: (
        (g := jax.nn.silu(dot(x, ws[0]))) * dot(x, ws[1]) + g
    ),
    "the output of a product is returned": lambda x, ws: ((u := dot(x, ws[1])) * dot(x, ws[0]), u),
    "another input": lambda x, ws: jax.nn.silu(dot(x, ws[0])) * dot(2 * x, ws[1]),
    "one product, squared": lambda x, ws: (y := dot(x, ws[0])) * y,
    "broadcast": lambda x, ws: dot(x, ws[0])[:1] * dot(x, ws[1]),
    "other blocks of K": lambda x, ws: (x @ blocks(ws[0], 128)) * (x @ blocks(ws[1], 64)),
    "a step between": lambda x, ws: jnp.sin(dot(x, ws[0])) * dot(x, ws[1]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_products_of_outputs_are_left_as_written(name: str) -> None:
    rewritten = jaxfp8.rewrite(KEPT[name])
    assert all(not eqn.params["multiplied"] for eqn in joint_calls(rewritten, X, WS))


def test_query_key_and_value_stay_a_launch_beside_a_gate() -> None:
    def layer(x: jax.Array, ws: Weights) -> Any:
        return silu(x, ws), dot(x, ws[2]), dot(x, ws[2])

    multiplied = [e.params["multiplied"] for e in joint_calls(jaxfp8.rewrite(layer), X, WS)]
    assert sorted(multiplied) == ["", "bfloat16"]


def test_rows_that_one_call_quantizes_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the activation and the factor are inside the call before the next product."""
    monkeypatch.setattr("jaxfp8._rewrite.plan.decide.platform", lambda: "cuda")

    def mlp(x: jax.Array, ws: Weights, down: tuple[jax.Array, jax.Array]) -> jax.Array:
        y = normed(x)
        return dynamic(jax.nn.silu(dynamic(y, ws[0])) * dynamic(y, ws[1]), down)

    rewritten, down = jaxfp8.rewrite(mlp), weight(9, K, N)
    assert count(rewritten, X, WS, down, name="quantize_produced") == 2
    (eqn,) = joint_calls(rewritten, X, WS, down)
    assert not eqn.params["multiplied"]


@pytest.mark.parametrize("wide", [BF16, F16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("mode", ["eager", "jit", "vmap", "grad", "jvp", "scan", "explicit axes"])
def test_a_gated_call_has_the_bits_of_its_dots(
    monkeypatch: pytest.MonkeyPatch, mode: str, wide: Any
) -> None:
    codes = [q for q, _ in WS[:2]]

    def loss(x: jax.Array, scales: Any) -> jax.Array:
        y = jaxfp8.rewrite(silu)(x, tuple(zip(codes, scales, strict=True)))
        return jnp.sum(jnp.tanh(y.astype(F32)))

    def run(x: jax.Array) -> Any:
        fun = jaxfp8.rewrite(silu)
        explicit = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        replicated = jax.NamedSharding(explicit, jax.P())
        scales = [s for _, s in WS[:2]]
        modes: dict[str, Callable[[], Any]] = {
            "eager": lambda: fun(x, WS),
            "jit": lambda: jax.jit(fun)(x, WS),
            "vmap": lambda: jax.jit(jax.vmap(fun, (0, None)))(jnp.stack([x, 2 * x]), WS),
            "grad": lambda: jax.jit(jax.grad(loss, (0, 1)))(x, scales),
            "jvp": lambda: jax.jvp(lambda x: fun(x, WS), (x,), (x,)),
            "scan": lambda: jax.jit(
                lambda x: jax.lax.scan(lambda c, _: (c, fun(c, WS)), x, None, 2)[1]
            )(x),
            "explicit axes": lambda: jax.jit(fun)(*jax.device_put((x, WS), replicated)),
        }
        return modes[mode]()

    x = X.astype(wide)
    together = run(x)
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    jax.clear_caches()
    apart = run(x)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def test_a_program_for_a_gpu_holds_one_call_with_one_result() -> None:
    text = jax.jit(jaxfp8.rewrite(silu)).trace(X, WS).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxfp8_scaled_dot" not in text
    (line,) = [line for line in text.splitlines() if "@jaxfp8_joint_dots" in line]
    assert 'multiplied = "bfloat16"' in line
    assert line.partition("->")[2].count("tensor<") == 1


def test_without_such_a_gpu_the_product_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    assert count(jaxfp8.rewrite(silu), X, WS) == 2


def test_explain_says_what_the_launch_holds() -> None:
    report = jaxfp8.explain(silu)(X, WS)
    note = "one launch with another of its input, and the product of both outputs"
    assert [site.note for site in report.sites] == [note] * 2
    assert [site.kernels["cuda"] for site in report.sites] == ["sm80_w8a16"] * 2


def test_fp8_rows_are_multiplied_too() -> None:
    """Codes and a scale that the function is given."""

    def fun(x: jax.Array, scale: jax.Array, ws: Weights) -> jax.Array:
        sums = [jnp.dot(x.astype(BF16), q.astype(BF16), preferred_element_type=F32) for q, _ in ws]
        gate, up = ((y * scale * s.astype(F32)).astype(BF16) for y, (_, s) in zip(sums, ws))  # noqa: B905
        return jax.nn.silu(gate) * up

    x, scale = X.astype(E4M3), jnp.ones((3, 1))
    (eqn,) = joint_calls(jaxfp8.rewrite(fun), x, scale, WS[:2])
    assert eqn.params["multiplied"] == "bfloat16"
