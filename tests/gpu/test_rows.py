"""Rows that are produced and quantized by one kernel are those of float64, rounding aside."""

import jax
import jax.numpy as jnp
import numpy as np
import produced_rows as rows
import pytest

import jaxfp8
from jaxfp8._call.ops.produce_call import quantize_produced
from jaxfp8._value.dtypes import finite_range

CALL = "custom_call @jaxfp8_quantize_rows"
# One chunk, part of a warp, a warp of four chunks, more rows than one block, and the longest row.
SHAPES = [(1, 8), (3, 200), (5, 1024), (1100, 256), (3, 4096), (2, 14336), (2, 32768)]


def run(spec, *operands):
    call = jax.jit(lambda *xs: quantize_produced(*xs, spec=spec))
    arrays = [jnp.asarray(v) for v in operands]
    assert call.lower(*arrays).as_text().count(CALL) == 1
    first, again = call(*arrays), call(*arrays)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )
    wide = np.asarray(first[2])
    np.testing.assert_array_equal(np.asarray(first[1]), scales(wide, spec))
    return first[:2]


def scales(amax, spec):
    """The scales that the rule makes of the maxima."""
    highest = np.float32(finite_range(spec.dtype)[1])
    return np.maximum(amax, np.float32(rows.FLOOR)) * (np.float32(1) / highest)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", rows.NORMS)
def test_norms(name, shape):
    norm = rows.NORMS[name]
    x = rows.matrix(*shape)
    for dtype, vector in (("float8_e4m3fn", "bfloat16"), ("int8", "float32")):
        spec = rows.spec(dtype, norm)
        others = rows.vectors(norm, shape[1], jnp.dtype(vector))
        rows.assert_rows(*run(spec, x, *others), rows.expected(x, others, spec), spec)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_factor", [False, True], ids=["alone", "factor"])
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu_tanh", "gelu_erf"])
def test_activations_and_factors(activation, has_factor, narrow, dtype):
    spec = rows.spec(dtype, activation=activation, has_factor=has_factor)
    for shape in SHAPES[1:5]:
        x = (rows.matrix(*shape, np.float32) / 8).astype(jnp.dtype(narrow))
        others = [rows.matrix(*shape, jnp.dtype(narrow), seed=2)] if has_factor else []
        y = rows.expected(x, others, spec)
        rows.assert_rows(*run(spec, x, *others), y, spec, most=0 if activation == "none" else 2e-3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_zeros_infinities_and_nan_count_as_in_the_program(dtype):
    spec = rows.spec(dtype)
    x = rows.matrix(6, 64)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, np.nan, np.inf, -np.inf
    x[4, 1:3] = np.nan, np.inf
    codes, scale = run(spec, x)
    wide = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        amax = np.maximum(np.abs(wide).max(-1, keepdims=True), np.float32(rows.FLOOR))
        steps = wide / (amax * (np.float32(1) / (448 if dtype != "int8" else 127)))
    np.testing.assert_array_equal(np.isnan(scale), np.isnan(amax))
    np.testing.assert_array_equal(np.isinf(scale), np.isinf(amax))
    found = np.asarray(codes).astype(np.float32)
    exact = np.nan_to_num(steps) if dtype == "int8" else steps
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    assert np.all(found[0] == 0)
    assert np.all(found[2:4][~np.isnan(exact[2:4])] == 0)


def test_a_rewritten_step_quantizes_in_one_call():
    w = jaxfp8.quantize(jax.random.normal(jax.random.key(0), (4096, 256)), channelwise_axes=(1,))
    gain = jnp.asarray(rows.vectors(rows.NORMS["rms, gain"], 4096, jnp.bfloat16)[0])

    def layer(x):
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        y = ((wide * inverse).astype(x.dtype) * gain).astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(y).max(-1, keepdims=True), 1e-12) / 448
        codes = jnp.clip(y / scale, -448, 448).astype(jnp.float8_e4m3fn)
        total = jnp.dot(codes, w.qvalue, preferred_element_type=jnp.float32)
        return (total * scale * w.scale).astype(x.dtype)

    x = jnp.asarray(rows.matrix(300, 4096))
    rewritten = jax.jit(jaxfp8.rewrite(layer))
    assert rewritten.lower(x).as_text().count(CALL) == 1
    found, written = (np.asarray(f(x), np.float32) for f in (rewritten, jax.jit(layer)))
    assert np.linalg.norm(found - written) <= 0.02 * np.linalg.norm(written)
