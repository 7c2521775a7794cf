"""Products of one input as one launch on a GPU: which join, and what they are elsewhere."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, E4M3, E5M2, F16, F32, count

import jaxfp8
from jaxfp8._call.gpu import xla_products
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint

pytestmark = pytest.mark.cuda_library

SCHEDULE = pathlib.Path(__file__).parents[2] / "ffi/cuda/kernels/sm80_w8a16/schedule.h"
K = 256
COLUMNS = (256, 64, 60)
Weights = tuple[tuple[jax.Array, jax.Array], ...]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that computes several products at once."""
    monkeypatch.setattr(joint, "runs_here", lambda: True)
    jax.clear_caches()


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32)


def weight(seed: int, n: int, k: int = K, dtype: Any = E4M3) -> tuple[jax.Array, jax.Array]:
    q = jaxfp8.quantize(random(seed, k, n), dtype, channelwise_axes=(1,))
    return q.qvalue, q.scale[0].astype(BF16)


def dot(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    return x @ (w[0].astype(x.dtype) * w[1].astype(x.dtype))


def heads(x: jax.Array, ws: Weights) -> list[jax.Array]:
    return [dot(x, w) for w in ws]


X = random(0, 3, K).astype(BF16)
WS = tuple(weight(i + 1, n) for i, n in enumerate(COLUMNS))


def split(ws: Weights, mesh: jax.sharding.Mesh) -> Weights:
    """Columns split over a mesh."""
    codes, scales = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((None, "i"), ("i",)))
    return tuple((jax.device_put(q, codes), jax.device_put(s, scales)) for q, s in ws)


def launches(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """How many joint calls a rewritten function holds, and how many others."""
    rewritten = jaxfp8.rewrite(fun)
    return count(rewritten, *args, name="joint_dots"), count(rewritten, *args)


def gated(x: jax.Array, ws: Weights) -> jax.Array:
    return jax.nn.silu(dot(x, ws[1])) * dot(x, ws[1])


def with_bias(x: jax.Array, ws: Weights) -> list[jax.Array]:
    return [dot(x, ws[0]) + ws[0][1], jax.nn.relu(dot(x, ws[1]))]


def batched(x: jax.Array, ws: Weights) -> list[jax.Array]:
    codes = [jnp.stack([q, q]) for q, _ in ws]
    return [jnp.einsum("bmk,bkn->bmn", x, q.astype(BF16)) for q in codes]


def two_layers(x: jax.Array, ws: Weights) -> list[jax.Array]:
    first = heads(x, ws)
    return [*first, *heads(first[0], ws)]


def two_layers_in_fp8(x: jax.Array, ws: Weights) -> list[jax.Array]:
    first = heads(rounded(x), ws)
    return [*first, *heads(rounded(first[0]), ws)]


def rounded(x: jax.Array) -> jax.Array:
    """Each row in e4m3."""
    wide = x.astype(F32)
    scale = jnp.max(abs(wide), axis=-1, keepdims=True) / 448
    codes = jnp.clip(wide / scale, -448, 448).astype(E4M3)
    return codes.astype(BF16) * scale.astype(BF16)


JOINED = {
    "three heads": (heads, (1, 0)),
    "epilogues of their own": (with_bias, (1, 0)),
    "gate and up": (gated, (1, 0)),
    "two layers": (two_layers, (2, 0)),
    "two layers in FP8": (two_layers_in_fp8, (2, 0)),
    "in a scan": (
        lambda x, ws: jax.lax.scan(lambda c, _: (heads(c, ws)[0], heads(c, ws)[1]), x, None, 2),
        (1, 0),
    ),
    "five, of which four": (lambda x, ws: [*heads(x, ws), *heads(x, ws[1:])], (1, 1)),
}


@pytest.mark.parametrize("name", JOINED)
def test_products_of_one_input_are_one_call(name: str) -> None:
    fun, expected = JOINED[name]
    assert launches(fun, X, WS) == expected


def test_products_of_rows_that_one_call_quantizes_are_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Query, key and value, gate and up of two layers. Each has a view of the scale of its own."""
    monkeypatch.setattr("jaxfp8._rewrite.plan.decide.platform", lambda: "cuda")
    layers = [{n: weight(i, K) for i, n in enumerate(_LAYER)} for _ in range(2)]

    def step(x: jax.Array, layers: Any) -> jax.Array:
        for layer in layers:
            y = normed(x)
            query, key, value = (dynamic(y, layer[name]) for name in ("query", "key", "value"))
            x = x + dynamic(jax.nn.softmax(query * key) * value, layer["out"])
            y = normed(x)
            gate = jax.nn.silu(dynamic(y, layer["gate"]))
            x = x + dynamic(gate * dynamic(y, layer["up"]), layer["down"])
        return x

    assert count(jaxfp8.rewrite(step), X, layers, name="quantize_produced") > 0
    assert launches(step, X, layers)[0] == 4


_LAYER = ("query", "key", "value", "out", "gate", "up", "down")


def normed(x: jax.Array) -> jax.Array:
    """RMSNorm."""
    wide = x.astype(F32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def dynamic(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rows in e4m3, each with a scale, times a weight with a scale by column."""
    wide = x.astype(F32)
    scale = jnp.maximum(jnp.abs(wide).max(-1, keepdims=True), 1e-12) / 448
    codes = jnp.clip(wide / scale, -448, 448).astype(E4M3)
    sums = jnp.dot(codes.astype(BF16), w[0].astype(BF16), preferred_element_type=F32)
    return (sums * scale * w[1].astype(F32)).astype(BF16)


def test_of_more_products_than_a_launch_computes_the_rest_has_one_of_its_own() -> None:
    many = tuple(weight(i, 8 * i) for i in range(1, 7))
    assert launches(heads, X, many) == (2, 0)
    assert launches(heads, X, many[:5]) == (1, 1)


APART = {
    "other inputs": lambda x, ws: [dot(x, ws[0]), dot(x + 1, ws[1])],
    "the input of one is the output of the other": lambda x, ws: dot(dot(x, ws[0]), ws[1]),
    "a residual of one is the output of the other": lambda x, ws: (
        dot(x, ws[0])[:, :64] + dot(x, ws[1])
    ),
    "many rows": lambda x, ws: heads(jnp.tile(x, (22, 1)), ws),
    "a batch": lambda x, ws: batched(jnp.stack([x, x]), ws),
    "weights of one column": lambda x, ws: [x @ w[0][:, 0].astype(BF16) for w in ws],
    "float32 inputs": lambda x, ws: heads(1.5 * x.astype(F32), ws),
}


@pytest.mark.parametrize("name", APART)
def test_other_products_are_calls_of_their_own(name: str) -> None:
    assert launches(APART[name], X, WS)[0] == 0


@pytest.mark.parametrize("other", [E5M2, jnp.int8], ids=str)
def test_weights_of_other_types_are_calls_of_their_own(other: Any) -> None:
    assert launches(heads, X, (WS[0], weight(5, 64, dtype=other))) == (0, 2)


def test_weights_of_other_layouts_are_calls_of_their_own() -> None:
    def fun(x: jax.Array, ws: Weights) -> list[jax.Array]:
        return [
            dot(x, ws[0]),
            jax.lax.dot_general(x, ws[1][0].astype(BF16), (((1,), (1,)), ((), ()))),
        ]

    nk = (WS[1][0].T, WS[1][1])
    assert launches(fun, X, (WS[0], nk)) == (0, 2)


def test_a_product_with_an_amax_is_a_call_of_its_own() -> None:
    def fun(x: jax.Array, ws: Weights) -> list[jax.Array]:
        y = dot(x, ws[0])
        return [y, jnp.max(jnp.abs(y)), dot(x, ws[1]), dot(x, ws[2])]

    assert launches(fun, X, WS) == (1, 1)


@pytest.mark.parametrize(("limit", "expected"), [(5, (1, 0)), (6, (0, 3))])
def test_products_that_are_small_together_are_left_to_xla(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: tuple[int, int]
) -> None:
    """Each of them has fewer values than the limit alone."""
    small = tuple(weight(i, 2 * K) for i in range(3))  # six squares of K
    monkeypatch.setattr(xla_products, "_MOST_WEIGHTS", limit * K * K)
    monkeypatch.setattr(ffi, "compute_capability", lambda: 90)
    assert launches(heads, X, small) == expected


def test_a_launch_computes_as_many_products_as_the_kernel_has_arguments_for() -> None:
    text = SCHEDULE.read_text()
    (most,) = re.findall(r"kMaxParts = (\d+);", text)
    assert int(most) == joint.MOST


def test_without_such_a_gpu_no_products_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    assert launches(heads, X, WS) == (0, 3)


@pytest.mark.parametrize("wide", [BF16, F16], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "mode", ["eager", "jit", "vmap", "grad", "jvp", "shard_map", "automatic axes", "explicit axes"]
)
def test_a_joint_call_has_the_bits_of_its_dots(
    monkeypatch: pytest.MonkeyPatch, mode: str, wide: Any
) -> None:
    def loss(x: jax.Array, ws: Weights) -> jax.Array:
        return sum(jnp.sum(jnp.tanh(y.astype(F32))) for y in jaxfp8.rewrite(heads)(x, ws))

    def run(x: jax.Array, ws: Weights) -> Any:
        rewritten = jaxfp8.rewrite(heads)
        codes = [q for q, _ in ws]
        by_scales = lambda x, scales: loss(x, tuple(zip(codes, scales, strict=True)))  # noqa: E731
        scales = [s for _, s in ws]
        mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        explicit = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        rows = jax.P("i")
        modes: dict[str, Callable[[], Any]] = {
            "eager": lambda: rewritten(x, ws),
            "automatic axes": lambda: jax.jit(rewritten)(x, split(ws, mesh)),
            "explicit axes": lambda: jax.jit(rewritten)(
                jax.device_put(x, jax.NamedSharding(explicit, jax.P())), split(ws, explicit)
            ),
            "jit": lambda: jax.jit(rewritten)(x, ws),
            "vmap": lambda: jax.jit(jax.vmap(rewritten, (0, None)))(jnp.stack([x, 2 * x]), ws),
            "grad": lambda: jax.jit(jax.grad(by_scales, (0, 1)))(x, scales),
            "jvp": lambda: jax.jvp(lambda x: rewritten(x, ws), (x,), (x,)),
            "shard_map": lambda: jax.jit(
                jax.shard_map(lambda x: rewritten(x, ws), mesh=mesh, in_specs=rows, out_specs=rows)
            )(jnp.concatenate([x, x])),
        }
        return modes[mode]()

    x = X.astype(wide)
    together = run(x, WS)
    monkeypatch.setattr(joint, "runs_here", lambda: False)
    jax.clear_caches()
    apart = run(x, WS)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def test_on_a_cpu_each_product_is_a_call_of_the_library() -> None:
    fun = jax.jit(jaxfp8.rewrite(heads))
    fun(X, WS)
    ffi.reset_kernel_calls()
    jax.block_until_ready(fun(X, WS))
    assert sum(ffi.kernel_calls().values()) == 3


def lowered(platform: str) -> str:
    trace = jax.jit(jaxfp8.rewrite(heads)).trace(X, WS)
    return trace.lower(lowering_platforms=(platform,)).as_text()


def test_a_program_for_a_gpu_holds_one_call_with_the_attributes_of_each_product() -> None:
    text = lowered("cuda")
    assert "@jaxfp8_scaled_dot" not in text
    (line,) = [line for line in text.splitlines() if "@jaxfp8_joint_dots" in line]
    for i, n in enumerate(COLUMNS):
        assert f"dot{i}_lhs_dtype" in line
        assert f"tensor<1x3x{n}xbf16>" in line.partition("->")[2]
    operands = re.search(r"@jaxfp8_joint_dots\(([^)]*)\)", line)
    assert operands is not None
    assert len(operands[1].split(", ")) == 3 * len(COLUMNS)  # input, weight, scale


def test_a_program_for_a_cpu_holds_a_call_for_each_product() -> None:
    text = lowered("cpu")
    assert "jaxfp8_joint_dots" not in text
    assert text.count("@jaxfp8_scaled_dot") in (1, 2, 3)  # alike ones share a function


def test_an_exported_program_holds_a_call_for_each_product() -> None:
    """Nothing is known of the GPU that it will run on."""
    fun = jax.jit(jaxfp8.rewrite(heads))
    checks = jaxfp8.ffi.export_checks()
    exported = jax.export.export(fun, platforms=("cuda",), disabled_checks=checks)(X, WS)
    assert "jaxfp8_joint_dots" not in exported.mlir_module()


def test_explain_says_what_shares_a_launch() -> None:
    report = jaxfp8.explain(lambda x, ws: [*heads(x, ws), dot(x + 1, ws[0])])(X, WS)
    notes = [site.note for site in report.sites]
    assert notes == ["one launch with 2 more of its input"] * 3 + [""]
    assert [site.kernels["cuda"] for site in report.sites] == ["sm80_w8a16"] * 3 + [""]


def test_explain_counts_each_product_of_a_call_that_a_function_holds() -> None:
    report = jaxfp8.explain(jaxfp8.rewrite(heads))(X, WS)
    assert report.scaled == 3
    assert [site.rhs.shape for site in report.calls] == [(K, n) for n in COLUMNS]
