"""Attention of a decoding step as one call on a GPU, and what stays two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rewrite.support import BF16, E4M3, F32, count, float64, relative_l2

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import attention
from jaxfp8._call.ops.attention import AttentionSpec
from jaxfp8._value import compat

HOPPER = jaxfp8.Target("cuda", 90)
B, S, H, G, T, D = 2, 1, 8, 2, 40, 64
ONE_MORE = 1.5  # weights are rounded before their sum is known


def normal(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def cache(seed: int, *shape: int, dtype: Any = E4M3) -> tuple[jax.Array, jax.Array]:
    q = jaxfp8.quantize(normal(seed, *shape), dtype, channelwise_axes=(0, 1, 2))
    return q.qvalue, q.scale


QUERY = normal(0, B, S, H, D, dtype=BF16)
KEYS, VALUES = cache(1, B, T, G, D), cache(2, B, T, G, D)
BY_HEAD = cache(1, B, G, T, D), cache(2, B, G, T, D)
SEEN = jnp.array([7, 33], jnp.int32)
MASK = jnp.asarray(np.random.default_rng(3).random((B, 1, S, T)) < 0.7)


def wide(x: tuple[jax.Array, jax.Array], dtype: Any = BF16) -> jax.Array:
    return x[0].astype(dtype) * x[1].astype(dtype)


def of_jax(**more: Any) -> Callable[..., Any]:
    """`jax.nn.dot_product_attention` of dequantized keys and values."""
    return lambda q, k, v, *xs: jax.nn.dot_product_attention(
        q, wide(k), wide(v), **dict(zip(more, xs, strict=True))
    )


def softmax(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(
    q: Any, k: Any, v: Any, seen: Any, act: Any = jax.nn.softmax, low: Any = -jnp.inf
) -> Any:
    """Codes are multiplied, and scales follow."""
    (k, of_k), (v, of_v) = k, v
    grouped = q[:, 0].reshape(B, G, -1, D)
    scores = jnp.einsum("bghd,bgtd->bght", grouped, k.astype(BF16), preferred_element_type=F32)
    scores = scores * of_k[..., 0][:, :, None] * D**-0.5
    scores = jnp.where(jnp.arange(T) < seen[:, None, None, None], scores, low)
    weights = act(scores) * of_v[..., 0][:, :, None]
    return jnp.einsum("bght,bgtd->bghd", weights.astype(BF16), v.astype(BF16))


def by_positions(q: Any, k: Any, v: Any, positions: Any) -> Any:
    """Several new tokens, each with a position; codes are held as bytes."""
    (k, of_k), (v, of_v) = k, v
    k, v = (jax.lax.bitcast_convert_type(x, E4M3).astype(BF16) for x in (k, v))
    grouped = q.reshape(B, -1, G, H // G, D)
    scores = jnp.einsum("bsghd,bgtd->bgsht", grouped, k, preferred_element_type=F32)
    scores = scores * D**-0.5 * of_k[:, :, None, None, :, 0]
    seen = jnp.arange(T) <= positions[..., None]
    scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
    weights = (jax.nn.softmax(scores) * of_v[:, :, None, None, :, 0]).astype(BF16)
    return jnp.einsum("bgsht,bgtd->bsghd", weights, v)


def per_tensor(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k[0].astype(BF16) * 0.01, v[0].astype(BF16) * 0.02)


def one_text(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """[T, H, D], without a batch."""
    q, k, v = q[0], wide((k[0][0], k[1][0])), wide((v[0][0], v[1][0]))
    scores = jnp.einsum("sghd,tgd->gsht", q.reshape(S, G, -1, D), k, preferred_element_type=F32)
    scores = jnp.where(jnp.arange(T) < seen[0], scores / 8.0, -1e30)
    return jnp.einsum("gsht,tgd->sghd", jax.nn.softmax(scores).astype(BF16), v)


def as_bytes(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jax.lax.bitcast_convert_type(x[0], jnp.uint8), x[1]


TWO = normal(0, B, 2, H, D, dtype=BF16)
POSITIONS = SEEN[:, None] + jnp.arange(2)
INT8 = cache(1, B, T, G, D, dtype=jnp.int8), cache(2, B, T, G, D, dtype=jnp.int8)
BIAS = normal(5, B, H, S, T)

# The function, its arguments, and what the spec says.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": (of_jax(), (QUERY, KEYS, VALUES), {"lengths": None, "bias": None}),
    "lengths": (
        of_jax(key_value_seq_lengths=0),
        (QUERY, KEYS, VALUES, SEEN),
        {"lengths": (B, 1, 1, 1), "bias": None, "equal_if_empty": True, "scale": 0.125},
    ),
    "mask": (of_jax(mask=0), (QUERY, KEYS, VALUES, MASK), {"bias": (B, 1, 1, T)}),
    "bias": (of_jax(bias=0), (QUERY, KEYS, VALUES, BIAS), {"bias": (B, G, H // G, T)}),
    "two tokens": (
        of_jax(key_value_seq_lengths=0),
        (TWO, KEYS, VALUES, SEEN),
        {"rows": 2 * H // G, "lengths": (B, 1, 1, 1)},
    ),
    "int8": (of_jax(), (QUERY, *INT8), {"cache": "int8"}),
    "by hand": (
        by_hand,
        (QUERY, *BY_HEAD, SEEN),
        {"lengths": (B, 1, 1, 1), "keys_by_token": False, "equal_if_empty": False},
    ),
    "softmax by hand": (
        lambda *xs: by_hand(*xs, act=softmax),
        (QUERY, *BY_HEAD, SEEN),
        {"value_scale": (B, G, 1, T)},
    ),
    "positions": (
        by_positions,
        (TWO, *map(as_bytes, BY_HEAD), POSITIONS),
        {"lengths": (B, 1, 2 * H // G, 1), "key_scale": (B, G, 1, T)},
    ),
    "one scale": (per_tensor, (QUERY, KEYS, VALUES), {"key_scale": None}),
    "one text": (one_text, (QUERY, KEYS, VALUES, SEEN), {"texts": 1, "lengths": (1, 1, 1, 1)}),
    "a mild mask": (
        lambda *xs: by_hand(*xs, low=-1e5),
        (QUERY, *BY_HEAD, SEEN),
        {"lengths": None, "bias": (B, 1, 1, T), "masked": -1e5},
    ),
}


def rewritten(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jaxfp8.rewrite(fun, target=HOPPER)


def spec_of(fun: Callable[..., Any], *args: Any) -> AttentionSpec:
    """The problem of the one call of attention in a function."""
    (spec,) = _specs(compat.open_jaxpr(jax.make_jaxpr(rewritten(fun))(*args)))
    return spec


def _specs(jaxpr: Any) -> list[AttentionSpec]:
    found = [e.params["spec"] for e in jaxpr.eqns if e.primitive.name == "attention"]
    inside = (inner for e in jaxpr.eqns for inner in compat.subjaxprs(e))
    return found + [spec for inner in inside for spec in _specs(inner)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_is_one_call(name: str) -> None:
    fun, args, says = PROGRAMS[name]
    spec = spec_of(fun, *args)
    assert {key: getattr(spec, key) for key in says} == says
    assert count(rewritten(fun), *args) == 0
    assert spec.keys_by_token == (args[1][0].shape[1] == T)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_what_the_function_does(name: str) -> None:
    fun, args, _ = PROGRAMS[name]
    (exact,) = float64(fun, *args)
    written = relative_l2(jax.jit(fun)(*args), exact)
    assert relative_l2(jax.jit(rewritten(fun))(*args), exact) <= ONE_MORE * written


def test_the_report_names_the_call() -> None:
    fun, args, _ = PROGRAMS["lengths"]
    report = jaxfp8.explain(fun, target=HOPPER)(*args)
    assert len(report.matched) == 2
    assert all("one call with the softmax between" in site.note for site in report.matched)


@pytest.mark.parametrize("target", [jaxfp8.Target("cpu"), None], ids=str)
def test_elsewhere_it_stays_two_products(target: jaxfp8.Target | None) -> None:
    fun, args, _ = PROGRAMS["lengths"]
    assert count(jaxfp8.rewrite(fun, target=target), *args, name="attention") == 0


def test_each_layer_has_a_call_and_so_has_the_body_of_a_scan() -> None:
    fun, (query, *cache, seen), _ = PROGRAMS["lengths"]

    def two_layers(q: Any) -> Any:
        return fun(fun(q, *cache, seen), *cache, seen)

    def scanned(q: Any, caches: Any) -> Any:
        return jax.lax.scan(lambda q, kv: (fun(q, *kv, seen), None), q, caches)[0]

    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    assert count(rewritten(two_layers), query, name="attention") == 2
    assert count(rewritten(scanned), query, caches, name="attention") == 1


# What stays two products


def read_twice(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bghd,bgtd->bght", q[:, 0].reshape(B, G, -1, D), wide(k))
    scores = scores.astype(F32)
    return jnp.einsum("bght,bgtd->bghd", jax.nn.softmax(scores).astype(BF16), wide(v)), scores


def in_16_bits(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bghd,bgtd->bght", q[:, 0].reshape(B, G, -1, D), wide(k))
    return jnp.einsum("bght,bgtd->bghd", jax.nn.softmax(scores), wide(v))


def capped(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bghd,bgtd->bght", q[:, 0].reshape(B, G, -1, D), wide(k)).astype(F32)
    weights = jax.nn.softmax(30 * jnp.tanh(scores / 30)).astype(BF16)
    return jnp.einsum("bght,bgtd->bghd", weights, wide(v))


def over_heads(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bghd,bgtd->bght", q[:, 0].reshape(B, G, -1, D), wide(k)).astype(F32)
    weights = jax.nn.softmax(scores, axis=2).astype(BF16)
    return jnp.einsum("bght,bgtd->bghd", weights, wide(v))


def many_rows(q: Any, k: Any, v: Any) -> Any:
    q = jnp.tile(q[:, 0].reshape(B, G, -1, D), (1, 1, 5, 1))
    scores = jnp.einsum("bghd,bgtd->bght", q, wide(k)).astype(F32)
    return jnp.einsum("bght,bgtd->bghd", jax.nn.softmax(scores).astype(BF16), wide(v))


NARROW = tuple((q[..., :48], s) for q, s in BY_HEAD)
MISSES = {
    "scores are read": (read_twice, BY_HEAD, "something else reads the scores"),
    "16 bits": (in_16_bits, BY_HEAD, "its softmax is in bfloat16"),
    "a cap": (capped, BY_HEAD, "tanh lies between the scores and the softmax"),
    "over heads": (over_heads, BY_HEAD, ""),
    "rows": (many_rows, BY_HEAD, "20 rows share a head of the cache"),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_says_why(name: str) -> None:
    fun, args, reason = MISSES[name]
    assert count(rewritten(fun), QUERY, *args, name="attention") == 0
    report = jaxfp8.explain(fun, target=HOPPER)(QUERY, *args)
    assert len(report.matched) == 2
    assert reason in "; ".join(site.note for site in report.matched)


def test_heads_of_another_size_stay_two_products() -> None:
    fun = PROGRAMS["plain"][0]
    args = QUERY[..., :48], *((q[..., :48], s) for q, s in (KEYS, VALUES))
    report = jaxfp8.explain(fun, target=HOPPER)(*args)
    assert "its heads have 48 values" in report.matched[1].note
    assert count(rewritten(fun), *args, name="attention") == 0


# Transforms


def test_gradients_are_those_of_the_function() -> None:
    fun, args, _ = PROGRAMS["by hand"]

    def gradient(f: Callable[..., Any]) -> jax.Array:
        return jax.grad(lambda q: (f(q, *args[1:]).astype(F32) ** 2).sum())(args[0])

    want = np.asarray(gradient(fun), np.float64)
    assert relative_l2(gradient(rewritten(fun)), want) < 0.03


def test_under_vmap_it_is_the_same() -> None:
    fun, args, _ = PROGRAMS["lengths"]
    queries = jnp.stack([args[0], -args[0]])
    y = jax.vmap(lambda q: rewritten(fun)(q, *args[1:]))(queries)
    for one, query in zip(y, queries, strict=True):
        assert relative_l2(one, np.asarray(fun(query, *args[1:]), np.float64)) < 0.02


def test_a_text_of_length_0_has_what_the_function_has() -> None:
    for name in ("lengths", "by hand"):
        fun, args, _ = PROGRAMS[name]
        args = *args[:3], jnp.array([0, 5], jnp.int32)
        y, want = (np.asarray(f(*args), np.float64) for f in (rewritten(fun), fun))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
        np.testing.assert_allclose(y, want, atol=0.05)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_a_mesh_may_split_the_texts(kind: Any) -> None:
    fun, args, _ = PROGRAMS["lengths"]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    placed = jax.device_put(args, NamedSharding(mesh, PartitionSpec("a")))
    with jax.set_mesh(mesh):
        y = jax.jit(rewritten(fun))(*placed)
    assert relative_l2(y, np.asarray(fun(*args), np.float64)) < 0.02
    report = jaxfp8.explain(fun, target=HOPPER)(*placed)
    assert "one call with the softmax" not in str(report)


def test_the_report_says_that_a_mesh_leaves_it_two_products() -> None:
    mesh, (fun, args, _) = (
        jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,)),
        PROGRAMS["bias"],
    )
    placed = jax.device_put(args, NamedSharding(mesh, PartitionSpec("a")))
    report = jaxfp8.explain(fun, target=HOPPER)(*placed)
    assert "not one call with its softmax: its mesh has automatic axes" in report.matched[1].note
    assert count(rewritten(fun), *placed) == 2


def in_shards(fun: Callable[..., Any], *, check_vma: bool) -> Callable[..., Any]:
    """A function of half of the texts on each of two devices."""
    mesh, split = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,)), PartitionSpec("a")
    specs: dict[str, Any] = {"in_specs": split, "out_specs": split, "check_vma": check_vma}
    return lambda *args: jax.shard_map(fun, mesh=mesh, **specs)(*args)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", ["lengths", "mask", "one scale"])
def test_inside_shard_map_it_is_one_call(name: str, check_vma: bool) -> None:
    fun, args, _ = PROGRAMS[name]
    sharded = in_shards(fun, check_vma=check_vma)
    assert spec_of(sharded, *args).texts == B // 2
    y, want = jax.jit(rewritten(sharded))(*args), jax.jit(sharded)(*args)
    assert relative_l2(y, np.asarray(want, np.float64)) < 0.02


# Lowering


def lowered(platform: str, name: str = "lengths") -> str:
    fun, args, _ = PROGRAMS[name]
    trace = jax.jit(rewritten(fun)).trace(*args)
    return trace.lower(lowering_platforms=(platform,)).as_text()


def test_a_program_for_a_gpu_holds_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "runs_here", lambda: True)
    monkeypatch.setattr(ffi, "why_unavailable", lambda platform: None)
    text = lowered("cuda")
    assert "@jaxfp8_scaled_dot" not in text
    (line,) = [line for line in text.splitlines() if "@jaxfp8_attention" in line]
    takes, gives = line.rsplit(" : ", 1)[1].split(" -> ")
    assert takes.count("tensor<") == 6  # query, keys, values, two scales, lengths
    assert f"tensor<{B}x{T}x{G}x{D}xf8E4M3FN>" in takes
    assert f"tensor<{B}x{G}x{H // G}x{D}xbf16>" in gives
    for attribute in ("keys_by_token = true", "lengths = true", "bias = false", "scale = 1.25"):
        assert attribute in line


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_elsewhere_it_is_lowered_to_two_products(platform: str) -> None:
    """Nothing is known of a GPU that is not here."""
    assert "@jaxfp8_attention" not in lowered(platform)
