"""Attention over a bfloat16 cache as one call on a GPU, and what stays as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rewrite.support import BF16, E4M3, F32, count, relative_l2
from rewrite.test_attention import (
    HOPPER,
    MASK,
    POSITIONS,
    QUERY,
    SEEN,
    TWO,
    B,
    D,
    G,
    H,
    T,
    normal,
    rewritten,
    softmax,
    spec_of,
)

import jaxfp8
from jaxfp8._bench import _decoder
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import attention
from jaxfp8._rewrite.plan import cached_products

KEYS, VALUES = normal(1, B, T, G, D, dtype=BF16), normal(2, B, T, G, D, dtype=BF16)
BY_HEAD = KEYS.swapaxes(1, 2), VALUES.swapaxes(1, 2)
PLAIN = QUERY, KEYS, VALUES


def of_jax(**more: Any) -> Callable[..., Any]:
    return lambda q, k, v, *xs: jax.nn.dot_product_attention(
        q, k, v, **dict(zip(more, xs, strict=True))
    )


def by_hand(q: Any, k: Any, v: Any, seen: Any, act: Any = jax.nn.softmax) -> Any:
    grouped = q[:, 0].reshape(B, G, -1, D)
    scores = jnp.einsum("bghd,bgtd->bght", grouped, k, preferred_element_type=F32) / np.sqrt(D)
    scores = jnp.where(jnp.arange(T) < seen[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bght,bgtd->bghd", act(scores).astype(BF16), v)


def transposed(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Of a cache [B, T, G, D]."""
    return by_hand(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen)


def as_rows(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Of a cache [B, T, G * D]."""
    return transposed(q, *(x.reshape(B, T, G, D) for x in (k, v)), seen)


def by_positions(q: Any, k: Any, v: Any, positions: Any) -> Any:
    """As examples/llama has it."""
    grouped = q.reshape(B, -1, G, H // G, D)
    scores = jnp.einsum("bsghd,bgtd->bgsht", grouped, k, preferred_element_type=F32)
    scores = scores * D**-0.5 * jnp.ones((), BF16)
    seen = jnp.arange(T) <= positions[..., None]
    scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
    weights = (jax.nn.softmax(scores) * jnp.ones((), BF16)).astype(BF16)
    return jnp.einsum("bgsht,bgtd->bsghd", weights, v)


SIZES = _decoder.Sizes(width=128, hidden=64, heads=H, kv_heads=G, head=D)
LAYER = _decoder.random_layers(SIZES, 1, lambda w: w.astype(BF16))


def decoder(x: Any, k: Any, v: Any) -> Any:
    """A layer of the benchmark, with the cache written."""
    weights, place = [(k, v)], jnp.int32(20)
    return _decoder.forward((x, place), LAYER, weights, sizes=SIZES, dot=lambda x, w: x @ w.T)


ROWS = tuple(x.reshape(B, T, G * D) for x in (KEYS, VALUES))
# The function, its arguments, and what the spec says.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": (of_jax(), PLAIN, {"lengths": None, "bias": None}),
    "lengths": (of_jax(key_value_seq_lengths=0), (*PLAIN, SEEN), {"lengths": (B, 1, 1, 1)}),
    "mask": (of_jax(mask=0), (*PLAIN, MASK), {"bias": (B, 1, 1, T)}),
    "by hand": (by_hand, (QUERY, *BY_HEAD, SEEN), {"keys_by_token": False, "scale": 0.125}),
    "softmax by hand": (
        lambda *xs: by_hand(*xs, act=softmax),
        (QUERY, *BY_HEAD, SEEN),
        {"values_by_token": False},
    ),
    "transposed": (transposed, (*PLAIN, SEEN), {"keys_by_token": True, "values_by_token": True}),
    "rows": (as_rows, (QUERY, *ROWS, SEEN), {"keys_by_token": True}),
    "positions": (
        by_positions,
        (TWO, *BY_HEAD, POSITIONS),
        {"lengths": (B, 1, 2 * H // G, 1), "rows": 2 * H // G},
    ),
    "a layer": (
        decoder,
        (normal(3, B, 1, 128, dtype=BF16), *BY_HEAD),
        {"lengths": (1, 1, 1, 1), "keys_by_token": False},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_is_one_call(name: str) -> None:
    fun, args, says = PROGRAMS[name]
    spec = spec_of(fun, *args)
    assert {key: getattr(spec, key) for key in says} == says
    assert (spec.cache, spec.key_scale, spec.value_scale) == ("bfloat16", None, None)


@pytest.mark.parametrize("name", ["lengths", "rows", "positions"])
def test_it_computes_what_the_function_does(name: str) -> None:
    fun, args, _ = PROGRAMS[name]
    y, want = (np.asarray(jax.jit(f)(*args), np.float64) for f in (rewritten(fun), fun))
    assert relative_l2(y, want) < 0.01


@pytest.mark.parametrize("target", [jaxfp8.Target("cpu"), jaxfp8.Target("cuda", 75), None], ids=str)
@pytest.mark.parametrize("name", ["lengths", "a layer"])
def test_elsewhere_the_function_itself_is_called(name: str, target: Any) -> None:
    fun, args, _ = PROGRAMS[name]
    rewrite = jaxfp8.rewrite(fun, target=target)
    assert str(jax.make_jaxpr(rewrite)(*args)) == str(jax.make_jaxpr(fun)(*args))


def test_the_report_names_the_call_and_no_dot() -> None:
    fun, args, _ = PROGRAMS["lengths"]
    report = jaxfp8.explain(fun, target=HOPPER)(*args)
    (one,) = report.attentions
    assert (one.dtype, one.shape, report.sites, report.others) == ("bfloat16", KEYS.shape, (), 2)
    assert f"{one.line}: attention over bf16[2,40,2,64], one call with the softmax" in str(report)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_the_report_names_no_call_on_a_mesh_that_splits_it(kind: Any) -> None:
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    args = jax.device_put(PLAIN, NamedSharding(mesh, PartitionSpec("a")))
    with jax.set_mesh(mesh):
        assert not jaxfp8.explain(of_jax(), target=HOPPER)(*args).attentions
        assert count(rewritten(of_jax()), *args, name="attention") == 0


# Regions


def in_a_jit(q: Any, k: Any, v: Any, seen: Any) -> Any:
    def many(q: Any) -> Any:
        for _ in range(40):  # a short one would be entered whatever it holds
            q = q + 0
        return by_hand(q, k, v, seen)

    return jax.jit(many)(q)


def in_a_scan(q: Any, k: Any, v: Any, seen: Any) -> Any:
    def body(q: Any, kv: Any) -> Any:
        return by_hand(q, *kv, seen).reshape(q.shape), None

    return jax.lax.scan(body, q, (jnp.stack([k, k]), jnp.stack([v, v])))[0]


def in_a_loop(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, q: by_hand(q, k, v, seen).reshape(q.shape), q)


@pytest.mark.parametrize("fun", [in_a_jit, in_a_scan, in_a_loop])
def test_regions_without_8_bit_data_are_entered(fun: Callable[..., Any]) -> None:
    args = QUERY, *BY_HEAD, SEEN
    assert count(rewritten(fun), *args, name="attention") == 1
    assert len(jaxfp8.explain(fun, target=HOPPER)(*args).attentions) == 1


# What stays as written


def read_twice(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bghd,bgtd->bght", q[:, 0].reshape(B, G, -1, D), k).astype(F32)
    return jnp.einsum("bght,bgtd->bghd", jax.nn.softmax(scores).astype(BF16), v), scores


def many_rows(q: Any, k: Any, v: Any) -> Any:
    q = jnp.tile(q[:, 0].reshape(B, G, -1, D), (1, 1, 5, 1))
    scores = jnp.einsum("bghd,bgtd->bght", q, k).astype(F32)
    return jnp.einsum("bght,bgtd->bghd", jax.nn.softmax(scores).astype(BF16), v)


def repeated(q: Any, k: Any, v: Any) -> Any:
    """Heads of the cache are repeated; a call would have them stored so."""
    k, v = (jnp.repeat(x, H // G, 1).swapaxes(1, 2) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v)


def depth_first(q: Any, k: Any, v: Any) -> Any:
    """Keys are stored [B, G, D, T]."""
    return by_hand(q, k.reshape(B, G, D, T).swapaxes(2, 3), v, SEEN)


def of_other_floats(dtype: Any) -> Callable[..., Any]:
    return lambda *xs: by_hand(*(x.astype(dtype) for x in xs), SEEN)


def mixed(q: Any, k: Any, v: Any) -> Any:
    """Keys are in 8 bits, and values are not."""
    return by_hand(q, k.astype(E4M3).astype(BF16), v, SEEN)


MISSES = {
    "scores are read": read_twice,
    "rows": many_rows,
    "repeated heads": repeated,
    "keys of another order": depth_first,
    "float32": of_other_floats(F32),
    "float16": of_other_floats(jnp.float16),
    "8-bit keys": mixed,
}


@pytest.mark.parametrize("name", MISSES)
def test_it_stays_as_written(name: str) -> None:
    args = QUERY, *BY_HEAD
    assert count(rewritten(MISSES[name]), *args, name="attention") == 0
    assert jaxfp8.explain(MISSES[name], target=HOPPER)(*args).attentions == ()


def test_symbolic_sizes_are_no_few_rows() -> None:
    rows, tokens = jax.export.symbolic_shape("rows, tokens")
    query = jax.ShapeDtypeStruct((B, G, rows, D), BF16)
    cache = jax.ShapeDtypeStruct((B, G, tokens, D), BF16)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bgrd,bgtd->bgrt", q, k, preferred_element_type=F32)
        return jnp.einsum("bgrt,bgtd->bgrd", jax.nn.softmax(scores).astype(BF16), v)

    assert not cached_products.may_be_in(jax.make_jaxpr(attend)(query, cache, cache).jaxpr)


def test_a_derivative_has_the_products_of_the_function() -> None:
    fun, args, _ = PROGRAMS["by hand"]

    def gradient(q: Any) -> Any:
        return jax.grad(lambda q: rewritten(fun)(q, *args[1:]).astype(F32).sum())(q)

    assert count(gradient, args[0], name="attention") == 0
    assert count(gradient, args[0], name="dot_general") > 2


def test_under_vmap_it_is_the_same() -> None:
    fun, args, _ = PROGRAMS["lengths"]
    batched = jax.jit(jax.vmap(rewritten(fun), (0, None, None, None)))
    (y,) = batched(args[0][None], *args[1:])
    assert relative_l2(y, np.asarray(jax.jit(fun)(*args), np.float64)) < 0.01


# Lowering


def test_a_program_for_a_gpu_holds_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "runs_here", lambda: True)
    monkeypatch.setattr(ffi, "why_unavailable", lambda platform: None)
    fun, args, _ = PROGRAMS["transposed"]
    text = jax.jit(rewritten(fun)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "@jaxfp8_attention" in line]
    assert f"tensor<{B}x{T}x{G}x{D}xbf16>" in line and 'cache = "bfloat16"' in line
    assert "dot_general" not in text


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_elsewhere_it_is_lowered_to_two_products(platform: str) -> None:
    """A CPU multiplies float32; on a GPU nothing widens the cache."""
    fun, args, _ = PROGRAMS["transposed"]
    text = jax.jit(rewritten(fun)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert "@jaxfp8_attention" not in text and text.count("dot_general") == 2
    assert (f"tensor<{B}x{T}x{G}x{D}xf32>" in text) == (platform == "cpu")
