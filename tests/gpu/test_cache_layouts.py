"""Caches [B, T, H, D] and [B, H, T, D]: few rows by weights whose batch is two axes, (B, H)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import ACCUMULATION, draw, run

import jaxfp8
import oracle
from jaxfp8._call.gpu import asked, canonical
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import lowering
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

PATH = "sm80_w8a16"
E4M3 = "float8_e4m3fn"
# B, H, rows, T, D: multiples of tiles and not; lines aligned to 16, 4 and 1 bytes.
SIZES = [(1, 2, 1, 37, 64), (3, 8, 4, 130, 128), (2, 3, 17, 517, 36), (5, 2, 3, 129, 33)]
ORDERS = ("BTHD", "TBHD", "HTBD")


def attention_product(sizes, order, part, rows="bfloat16", cache=E4M3, **more) -> ScaledDotSpec:
    """Rows [B, H, M, K] by a cache of some order: `scores` sum over D, `outputs` over T.

    Scales are for each token and head, of keys along the columns; values have one for each head.
    """
    size = dict(zip("BHMTD", sizes, strict=True))
    contracted = "D" if part == "scores" else "T"
    free = "T" if part == "scores" else "D"
    shared = {"D", contracted}
    right = OperandSpec(
        dtype=cache,
        shape=tuple(size[axis] for axis in order),
        contracting=(order.index(contracted),),
        batch=(order.index("B"), order.index("H")),
        tiles=tuple(size[axis] if axis in shared else 1 for axis in order),
        scale=True,
        zero_point=more.get("zero_points", False),
    )
    left = OperandSpec(
        dtype=rows,
        shape=(*(size[axis] for axis in "BHM"), size[contracted]),
        contracting=(3,),
        batch=(0, 1),
        tiles=(1, 1, 1, size[contracted]),
        scale=rows == E4M3,
        zero_point=False,
    )
    bias = (1, size["H"], 1, size[free]) if more.get("bias") else None
    return ScaledDotSpec(lhs=left, rhs=right, epilogue=EpilogueSpec(out_dtype="float32", bias=bias))


def in_order(operands, order):
    """Operands of a cache [B, H, T, D] with the axes of the cache in another order."""
    axes = ["BHTD".index(axis) for axis in order]
    return {n: x.transpose(axes) if n.startswith("rhs") else x for n, x in operands.items()}


CASES = [
    ("bfloat16", E4M3, {}),
    ("float16", "float8_e5m2", {"bias": True}),
    ("bfloat16", "int8", {"zero_points": True}),
    ("float16", "uint8", {"zero_points": True}),
    (E4M3, E4M3, {}),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("part", ["scores", "outputs"])
@pytest.mark.parametrize(("rows", "cache", "more"), CASES, ids=str)
def test_any_order_has_the_bits_of_a_cache_by_head(rows, cache, more, part, sizes):
    if rows == E4M3 and sizes[2] > 16:
        sizes = (*sizes[:2], 16, *sizes[3:])
    spec = attention_product(sizes, "BHTD", part, rows, cache, **more)
    operands = draw(1, spec)
    expected, _, ran = run(spec, operands)
    assert ran == [PATH]
    oracle.assert_within_bound(spec, operands, expected, slack=ACCUMULATION[PATH])
    for order in ORDERS:
        apart = attention_product(sizes, order, part, rows, cache, **more)
        out, _, ran = run(apart, in_order(operands, order))
        assert ran == [PATH]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("part", ["scores", "outputs"])
def test_zero_points_beyond_their_type_count_in_full(part):
    spec, apart = (
        attention_product(SIZES[1], order, part, "bfloat16", "int8", zero_points=True)
        for order in ("BHTD", "BTHD")
    )
    operands = draw(2, spec)
    operands["rhs_zero_point"] = operands["rhs_zero_point"] * 3
    expected, _, _ = run(spec, operands)
    oracle.assert_within_bound(spec, operands, expected, slack=ACCUMULATION[PATH])
    np.testing.assert_array_equal(run(apart, in_order(operands, "BTHD"))[0], expected)


@pytest.mark.parametrize("part", ["scores", "outputs"])
@pytest.mark.parametrize("lhs", ["float32", "int8"])
def test_the_fallback_reads_two_batch_axes(lhs, part):
    """It is asked for them by callers of the library alone."""
    spec = attention_product(SIZES[2], "BTHD", part, "bfloat16", "int8", zero_points=True)
    form = canonical.canonical(spec, PATH)
    assert form.spec.rhs.batch == (0, 2)
    wide = dataclasses.replace(form.spec, lhs=dataclasses.replace(form.spec.lhs, dtype=lhs))
    operands = draw(3, wide)
    scratch = asked.workspace_bytes(wide, "general")
    results = [*lowering.result_types(wide), jax.ShapeDtypeStruct((scratch,), np.uint8)]
    ffi.ensure_registered("cuda")
    call = jax.ffi.ffi_call(ffi.TARGET, results)
    arrays = (jnp.asarray(operands[name]) for name in wide.operand_names())
    out, _ = call(*arrays, **wide.attributes(), kernel="general")
    oracle.assert_within_bound(wide, operands, np.asarray(out))


@pytest.mark.parametrize("part", ["scores", "outputs"])
def test_nan_stays_in_its_text_and_head(part):
    spec = attention_product((2, 3, 4, 150, 64), "BTHD", part)
    operands = draw(4, spec)
    operands["rhs"][1, 70, 2, 5] = 0x7F
    out, _, _ = run(spec, operands)
    assert np.isnan(out[1, 2]).any()
    assert np.isfinite(np.delete(out.reshape(6, -1), 5, 0)).all()


def attend(query, k, of_k, v, of_v, seen):
    keys, values = (
        c.astype(query.dtype) * s.astype(query.dtype) for c, s in ((k, of_k), (v, of_v))
    )
    return jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=seen)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8], ids=["e4m3", "int8"])
def test_attention_over_a_cache_by_token_copies_no_codes(dtype, batch, tokens):
    """Four heads share one of the cache; texts have lengths of their own."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    query = normal(0, batch, tokens, 8, 64).astype(jnp.bfloat16)
    cache = [
        jaxfp8.quantize(normal(i, batch, 201, 2, 64), dtype, channelwise_axes=(0, 1, 2))
        for i in (1, 2)
    ]
    seen = jnp.arange(batch, dtype=jnp.int32) * 12 + 7
    args = query, *(x for c in cache for x in (c.qvalue, c.scale)), seen
    compiled = jax.jit(jaxfp8.rewrite(attend, strict=True)).lower(*args).compile()
    wide = [query.astype(jnp.float32), *(jaxfp8.dequantize(c, jnp.float32) for c in cache)]
    exact = exact_attention(*wide, seen)
    out = np.asarray(compiled(*args), np.float64)
    assert np.linalg.norm(out - exact) <= 2e-2 * np.linalg.norm(exact)
    made = re.findall(
        r"= (?:f8e4m3fn|s8|u8)\S* (?!parameter|bitcast|get-tuple)\S+\(", compiled.as_text()
    )
    assert not made


def exact_attention(query, keys, values, seen) -> np.ndarray:
    """Float64, by numpy."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, keys, values))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = np.einsum("bskgd,btkd->bkgst", q, k) / np.sqrt(q.shape[-1])
    hidden = np.arange(k.shape[1]) >= np.asarray(seen)[:, None]
    scores = np.where(hidden[:, None, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bkgst,btkd->bskgd", weights, v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])
