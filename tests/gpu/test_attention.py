"""Attention of a decoding step as one kernel, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite import test_attention as programs
from rewrite import test_float_attention as float_programs

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import attention
from jaxfp8._call.ops.attention import AttentionSpec

CALL = "custom_call @jaxfp8_attention"
# texts, heads, rows, tokens, width. Few CTAs, one CTA, a cluster, more parts than a cluster.
SIZES = [
    (1, 1, 1, 1, 64),
    (2, 3, 5, 17, 64),
    (3, 2, 4, 700, 128),
    (2, 2, 8, 333, 256),
    (70, 8, 4, 40, 128),
    (1, 2, 12, 5000, 128),
    (1, 1, 4, 20000, 64),
]
TERMS = {
    "bare": {},
    "a scale": {"key_scale": "", "value_scale": ""},
    "scales of tokens": {"key_scale": "THt", "value_scale": "THt"},
    "a mask": {"value_scale": "H", "bias": "Trt"},
    "lengths": {"key_scale": "THt", "lengths": "T"},
    "lengths of rows": {"lengths": "Tr", "bias": "THrt"},
}
AXES = "THrt"


def spec_of(sizes, cache, by_token, terms, **more) -> AttentionSpec:
    texts, heads, rows, tokens, width = sizes
    full = dict(zip(AXES, (texts, heads, rows, tokens), strict=True))
    shapes = {n: tuple(full[a] if a in axes else 1 for a in AXES) for n, axes in terms.items()}
    return AttentionSpec(
        texts=texts,
        heads=heads,
        rows=rows,
        tokens=tokens,
        width=width,
        cache=cache,
        keys_by_token=by_token,
        values_by_token=by_token,
        scale=width**-0.5,
        **{**shapes, **more},
    )


def draw(seed, spec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (spec.texts, spec.heads, spec.tokens, spec.width)

    def cache(by_token):
        x = rng.normal(size=shape) * (30 if spec.cache == "int8" else 1)
        x = x.swapaxes(1, 2) if by_token else x
        return np.array(jnp.asarray(np.clip(np.round(x, 3), -120, 120)).astype(spec.cache))

    made = {
        "query": np.asarray(jnp.asarray(rng.normal(size=spec.query), jnp.bfloat16)),
        "keys": cache(spec.keys_by_token),
        "values": cache(spec.values_by_token),
    }
    usual = 0.03 if spec.cache == "int8" else 1.0
    for name in ("key_scale", "value_scale"):
        if (size := getattr(spec, name)) is not None:
            made[name] = (usual * rng.uniform(0.5, 2, size)).astype(np.float32)
    if spec.bias is not None:
        hidden = rng.random(spec.bias) < 0.3
        made["bias"] = np.where(hidden, -np.inf, rng.normal(size=spec.bias)).astype(np.float32)
        made["bias"][..., 0] = 0
    if spec.lengths is not None:
        made["lengths"] = rng.integers(1, spec.tokens + 1, spec.lengths).astype(np.int32)
    return made


def exact(spec, operands) -> np.ndarray:
    """Float64, by numpy."""
    x = {name: np.asarray(value, np.float64) for name, value in operands.items()}
    keys, values = (
        x[name].swapaxes(1, 2) if by_token else x[name]
        for name, by_token in (("keys", spec.keys_by_token), ("values", spec.values_by_token))
    )
    with np.errstate(invalid="ignore"):
        scores = np.einsum("bhrd,bhtd->bhrt", x["query"], keys) * spec.scale
        scores = scores * x.get("key_scale", 1.0)
        bias = np.broadcast_to(x.get("bias", 0.0), scores.shape)
        scores = np.where(bias <= spec.masked, bias, scores + bias)
        seen = np.arange(spec.tokens) < x.get("lengths", spec.tokens)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True) * x.get("value_scale", 1.0)
        return np.einsum("bhrt,bhtd->bhrd", weights, values)


def run(spec, operands) -> np.ndarray:
    """The outputs of the kernel, which has equal bits each time."""
    call = jax.jit(lambda **xs: attention.attend(spec, **xs))
    arrays = {name: jnp.asarray(value) for name, value in operands.items()}
    assert call.lower(**arrays).as_text().count(CALL) == 1
    first, again = (np.asarray(call(**arrays)) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint8), again.view(np.uint8))
    return first.astype(np.float64)


def assert_close(out, want) -> None:
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    out, want = np.nan_to_num(out), np.nan_to_num(want)
    assert np.linalg.norm(out - want) <= 6e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("by_token", [True, False], ids=["BTHD", "BHTD"])
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8", "bfloat16"])
def test_outputs(cache, by_token, terms, sizes):
    if cache == "int8" and "key_scale" not in TERMS[terms]:
        terms = "a scale"
    spec = spec_of(sizes, cache, by_token, TERMS[terms])
    operands = draw(1, spec)
    assert_close(run(spec, operands), exact(spec, operands))


def test_outputs_may_be_float32():
    spec = spec_of(SIZES[2], "float8_e4m3fn", True, TERMS["bare"], out_dtype="float32")
    operands = draw(2, spec)
    assert_close(run(spec, operands), exact(spec, operands))


@pytest.mark.parametrize("array", ["keys", "values"])
@pytest.mark.parametrize("sizes", SIZES[2:4], ids=str)
def test_nan_stays_in_its_text_and_head(sizes, array):
    spec = spec_of(sizes, "float8_e4m3fn", True, TERMS["scales of tokens"])
    operands = draw(3, spec)
    operands[array].view(np.uint8)[1, spec.tokens // 2, 1, 5] = 0xFF
    out = run(spec, operands)
    assert_close(out, exact(spec, operands))
    assert np.isnan(out).sum() == spec.rows * (spec.width if array == "keys" else 1)


def test_a_masked_token_may_hold_nan_as_its_key():
    spec = spec_of(SIZES[2], "float8_e4m3fn", True, {"bias": "Tt"})
    operands = draw(4, spec)
    operands["keys"].view(np.uint8)[0, 40, 0, 5] = 0x7F
    operands["bias"][0, ..., 40] = -np.inf
    want = exact(spec, operands)
    assert np.isfinite(want).all()
    assert_close(run(spec, operands), want)


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0])
def test_special_scales(scale):
    spec = spec_of(SIZES[2], "float8_e4m3fn", True, TERMS["scales of tokens"])
    operands = draw(5, spec)
    operands["key_scale"][0, 1, 0, 33] = scale
    assert_close(run(spec, operands), exact(spec, operands))


@pytest.mark.parametrize("equal", [True, False])
def test_a_text_of_length_0(equal):
    spec = spec_of(SIZES[2], "float8_e4m3fn", False, TERMS["lengths"], equal_if_empty=equal)
    operands = draw(6, spec)
    operands["lengths"][1] = 0
    out = run(spec, operands)
    assert np.isnan(out[1]).all() != equal
    if equal:
        mean = np.asarray(operands["values"][1], np.float64).mean(1)
        assert np.linalg.norm(out[1] - mean[:, None]) < 0.02 * np.linalg.norm(mean)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs(name):
    fun, args, _ = programs.PROGRAMS[name]
    call = jax.jit(jaxfp8.rewrite(fun))
    assert call.lower(*args).as_text().count(CALL) == 1
    (want,) = programs.float64(fun, *args)
    out = np.asarray(call(*args), np.float64)
    assert np.linalg.norm(out - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("name", float_programs.PROGRAMS)
def test_programs_of_floats(name):
    fun, args, _ = float_programs.PROGRAMS[name]
    call = jax.jit(jaxfp8.rewrite(fun))
    assert call.lower(*args).as_text().count(CALL) == 1
    for out, want in zip(*(jax.tree.leaves(f(*args)) for f in (call, jax.jit(fun))), strict=True):
        out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(out - want) <= 1e-2 * np.linalg.norm(want)


# The call itself


def call(spec, operands, **changed):
    results = [
        jax.ShapeDtypeStruct(spec.query, spec.out_dtype),
        jax.ShapeDtypeStruct((attention.scratch_bytes(spec),), np.uint8),
    ]
    ffi.ensure_registered("cuda")
    attributes = {**spec.attributes(), **changed}
    arrays = [jnp.asarray(operands[name]) for name in spec.operand_names()]
    return jax.ffi.ffi_call(ffi.ATTENTION_TARGET, results)(*arrays, **attributes)[0]


WRONG = {
    "`keys` is float8_e4m3fn": {"cache": "int8"},
    "`keys` is": {"keys_by_token": False},
    "but its attributes ask for 3": {"key_scale": False, "lengths": False},
    "attribute `scale` has another type": {"scale": np.int64(1)},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_say_what_is_wrong(message):
    spec = spec_of(SIZES[2], "float8_e4m3fn", True, TERMS["lengths"])
    with pytest.raises(Exception, match=r"jaxfp8_attention.*" + message):
        jax.block_until_ready(call(spec, draw(8, spec), **WRONG[message]))


def test_shapes_of_terms_are_checked():
    spec = spec_of(SIZES[2], "float8_e4m3fn", True, {"bias": "t"})
    operands = draw(9, spec)
    operands["bias"] = operands["bias"][..., :7]
    wrong = dataclasses.replace(spec, bias=operands["bias"].shape)
    with pytest.raises(Exception, match=r"jaxfp8_attention.*`bias` has shape"):
        jax.block_until_ready(call(wrong, operands))
