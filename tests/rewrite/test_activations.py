"""An activation that the function quantizes itself becomes one call, if it has the known form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized

import jaxfp8

W = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (64, 32)), jnp.int8, channelwise_axes=(1,))
W8 = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (64, 32)), channelwise_axes=(1,))
X = jax.random.normal(jax.random.key(2), (6, 64)) * jnp.exp2(jnp.arange(6.0))[:, None]
ENCODE, AMAX = "custom_call @jaxfp8_quantize", "custom_call @jaxfp8_amax"


def row_max(x, axis=-1):
    return jnp.maximum(jnp.abs(x).max(axis, keepdims=True), 1e-12)


def int8_dot(codes, scale):
    total = jnp.dot(codes, W.qvalue, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * scale * W.scale


def fp8_dot(codes, scale):
    wide = codes.astype(jnp.bfloat16)
    total = jnp.dot(wide, W8.qvalue.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return total * scale * W8.scale


def per_token(x):
    scale = row_max(x) / 127
    codes = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def per_tensor(x):
    scale = row_max(x, (0, 1)) / 127
    codes = jnp.round(jnp.clip(x / scale, -128, 127)).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def unguarded(x):
    scale = jnp.abs(x).max(-1) / 448
    codes = jnp.clip(x / scale[:, None], -448, 448).astype(jnp.float8_e4m3fn)
    return fp8_dot(codes, scale[:, None]), codes


def guarded_by_where(x):
    amax = jnp.abs(x).max(-1, keepdims=True)
    scale = jnp.where(amax == 0, 1.0, amax * (1 / 57344))
    codes = jax.lax.clamp(-57344.0, x / scale, 57344.0).astype(jnp.float8_e5m2)
    return fp8_dot(codes, scale), codes


def wide_first(x):
    return per_token(x.astype(jnp.float32))


def given_scale(x):
    codes = jnp.clip(jnp.round(x / 0.25), -128, 127).astype(jnp.int8)
    return int8_dot(codes, jnp.float32(0.25)), codes


def by_a_factor(x):  # as Keras spells it
    factor = 127 / (jnp.abs(x).max(-1, keepdims=True) + 1e-7)
    codes = jnp.clip(jnp.round(x * factor), -127, 127).astype(jnp.int8)
    return int8_dot(codes, 1 / factor), codes


def saturated_by_the_cast(x):  # as qwix does
    scale = jnp.abs(x).max(-1, keepdims=True) / 128  # the maximum is no code
    scale = jnp.where(scale < 1e-19, 1.0, scale)
    codes = jnp.round(x / scale).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def clipped_to_a_fraction(x):  # as AQT does
    scale = jnp.abs(x).max(-1, keepdims=True)
    scale = jnp.where(scale == 0, 1.0, scale) / 127.5
    codes = jnp.round(jnp.clip(x * (1 / scale), -127.49, 127.49)).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def clipped_twice(x):
    scale = row_max(x) / 127
    codes = jnp.round(jnp.clip(x / scale, -127.5, 127.5))
    codes = jnp.clip(codes, -127, 127).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def by_a_number(x):
    codes = jnp.minimum(jnp.round(4 * x), 127).astype(jnp.int8)
    return int8_dot(codes, jnp.float32(0.25)), codes


def fp8_by_a_factor(x):
    factor = 448 / row_max(x)
    codes = jnp.clip(x * factor, -448, 448).astype(jnp.float8_e4m3fn)
    return fp8_dot(codes, 1 / factor), codes


FORMS = {
    "per token": (per_token, X, 1),
    "per tensor": (per_tensor, X, 1),
    "unguarded": (unguarded, X, 1),
    "where": (guarded_by_where, X, 1),
    "bfloat16": (wide_first, X.astype(jnp.bfloat16), 1),
    "given scale": (given_scale, X, 0),
    "three axes": (per_token, X.reshape(2, 3, 64), 1),
    "factor": (by_a_factor, X, 1),
    "no clip": (saturated_by_the_cast, X, 1),
    "fraction": (clipped_to_a_fraction, X, 1),
    "two clips": (clipped_twice, X, 1),
    "number": (by_a_number, X, 0),
    "FP8 factor": (fp8_by_a_factor, X, 1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.same_bits
def test_the_form_is_computed_in_calls_with_the_same_codes(form):
    fun, x, maxima = FORMS[form]
    run = jax.jit(jaxfp8.rewrite(fun))
    text = run.lower(x).as_text()
    assert (text.count(ENCODE), text.count(AMAX)) == (1, maxima)
    y, codes = run(x)
    exact, same = fun(x)  # operation by operation, so with plain divisions
    quantized.assert_same_codes(codes, same)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf, 3e38], ids=str)
@pytest.mark.parametrize(
    "form", ["per token", "per tensor", "unguarded", "where", "factor", "no clip", "fraction"]
)
@pytest.mark.same_bits
def test_zeros_infinities_and_nan_keep_their_meaning(form, value):
    fun, x, _ = FORMS[form]
    x = x.at[2].set(0).at[2, 5].set(value)
    quantized.assert_same_codes(jax.jit(jaxfp8.rewrite(fun))(x)[1], fun(x)[1])


def floor(x):
    scale = row_max(x) / 127
    codes = jnp.clip(jnp.floor(x / scale), -127, 127).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def narrower(x):
    scale = row_max(x) / 7
    codes = jnp.clip(jnp.round(x / scale), -7, 7).astype(jnp.int8)
    return int8_dot(codes, scale), codes


def unclipped_fp8(x):  # past its range such a cast gives NaN
    scale = row_max(x) / 448
    codes = (x / scale).astype(jnp.float8_e4m3fn)
    return fp8_dot(codes, scale), codes


def by_column(x):
    scale = row_max(x, 0) / 127
    codes = jnp.clip(jnp.round(x * (1 / scale)), -127, 127).astype(jnp.int8)
    return int8_dot(codes, 1.0), codes


def in_bfloat16(x):
    return per_token(x.astype(jnp.bfloat16))


def cut_off(x):
    scale = row_max(x) / 127
    codes = jnp.clip(x / scale, -127, 127).astype(jnp.int8)
    return int8_dot(codes, scale), codes


@pytest.mark.parametrize("fun", [floor, narrower, by_column, in_bfloat16, cut_off, unclipped_fp8])
def test_a_near_miss_stays_as_written(fun):
    run = jax.jit(jaxfp8.rewrite(fun))
    assert ENCODE not in run.lower(X).as_text()
    assert jaxfp8.explain(fun)(X).matched[0].lhs.quantized == "as written"
    quantized.assert_same_codes(run(X)[1], jax.jit(fun)(X)[1])


def test_without_a_captured_dot_nothing_changes():
    def alone(x):
        return per_token(x)[1]

    assert ENCODE not in jax.jit(jaxfp8.rewrite(alone)).lower(X).as_text()


def test_explain_says_that_it_is_one_call():
    (row,) = jaxfp8.explain(per_token)(X).matched
    assert (row.lhs.quantized, row.rhs.quantized) == ("one call", "")
    assert str(row.lhs).endswith("quantized in one call)")


@pytest.mark.parametrize("form", ["per token", "per tensor", "unguarded"])
def test_under_vmap_scan_and_remat(form):
    fun, x, _ = FORMS[form]
    many = jnp.stack([x, 2 * x + 1, -x])
    rewritten = jaxfp8.rewrite(fun)
    _, scanned = jax.lax.scan(lambda c, x: (c, rewritten(x)[1]), 0, many)
    inside = jaxfp8.rewrite(lambda xs: jax.lax.scan(lambda c, x: (c, fun(x)[1:]), 0, xs)[1])
    for codes in (jax.vmap(rewritten)(many)[1], scanned, inside(many)[0]):
        for one, expected in zip(codes, many, strict=True):
            quantized.assert_same_codes(one, fun(expected)[1])
    quantized.assert_same_codes(jaxfp8.rewrite(jax.checkpoint(fun))(x)[1], fun(x)[1])


@pytest.mark.parametrize("form", ["per token", "unguarded", "where"])
@pytest.mark.same_bits
def test_the_gradient_is_that_of_the_function(form):
    fun, x, _ = FORMS[form]
    wanted = jax.grad(lambda x: jnp.sin(fun(x)[0]).sum())(x)
    found = jax.jit(jax.grad(lambda x: jnp.sin(jaxfp8.rewrite(fun)(x)[0]).sum()))(x)
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=1e-3 * np.abs(wanted).max())


def test_under_shard_map_each_device_has_its_own_rows():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def local(x, kernel):
        scale = row_max(x) / 127
        codes = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
        return jnp.dot(codes, kernel, preferred_element_type=jnp.int32) * scale, codes

    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, whole), out_specs=(rows, rows))
    text = jax.jit(jaxfp8.rewrite(run)).lower(X, W.qvalue).as_text()
    assert "tensor<3x64xf32>" in text
    assert ENCODE in text
    codes = jax.jit(jaxfp8.rewrite(run))(X, W.qvalue)[1]
    quantized.assert_same_codes(codes, per_token(X)[1])
