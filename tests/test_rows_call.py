"""Rows that are produced and quantized in one call: the definition, and what JAX makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import produced_rows as rows
import pytest

from jaxfp8._call.ops.produce_call import quantize_produced, why_no_rows_kernel
from jaxfp8._call.reference.produce_reference import ProduceSpec, RowScale

CALL = "custom_call @jaxfp8_quantize_rows"
NORM = rows.NORMS["layer, rounded"]
SPEC = rows.spec("float8_e4m3fn", NORM)
X = rows.matrix(6, 200)
VECTORS = rows.vectors(NORM, 200, jnp.bfloat16)


def call(spec=SPEC):
    return jax.jit(lambda *operands: quantize_produced(*operands, spec=spec))


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )


@pytest.mark.parametrize("name", rows.NORMS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.same_bits
def test_norms_are_those_of_float64(name, dtype):
    norm = rows.NORMS[name]
    spec = rows.spec(dtype, norm)
    others = rows.vectors(norm, 200, np.float32)
    rows.assert_rows(*call(spec)(X, *others)[:2], rows.expected(X, others, spec), spec, most=5e-3)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["none", "silu", "gelu_tanh", "gelu_erf", "relu"])
@pytest.mark.same_bits
def test_activations_and_factors_are_those_of_float64(activation, narrow):
    x, factor = (rows.matrix(6, 200, jnp.dtype(narrow), seed) for seed in (0, 1))
    x = np.maximum(x, -2).astype(x.dtype)  # where the curves of JAX are exact
    spec = rows.spec("float8_e5m2", activation=activation, has_factor=True)
    y = rows.expected(x, [factor], spec)
    most = 0 if activation == "none" else 5e-3
    rows.assert_rows(*call(spec)(x, factor)[:2], y, spec, most=most)


def test_zeros_and_nan_have_the_scales_of_the_rule():
    rule = RowScale(amax_floor=1e-3, of_zeros=2.0, of_nan=3.0)
    spec = ProduceSpec(dtype=np.dtype("int8"), rule=rule)
    x = X.copy()
    x[0], x[1, 3], x[2], x[3, 5] = 0, np.nan, 1e-6, np.inf
    codes, scale, amax = call(spec)(x)
    np.testing.assert_array_equal(amax, np.abs(x.astype(np.float32)).max(-1, keepdims=True))
    floor = np.float32(1e-3) * (np.float32(1) / np.float32(127))
    np.testing.assert_array_equal(np.asarray(scale)[:4, 0], np.float32([2, 3, floor, np.inf]))
    assert not np.any(np.asarray(codes)[[0, 3]])


def test_a_scale_of_zero_makes_nan_in_fp8():
    spec = ProduceSpec(dtype=np.dtype("float8_e4m3fn"), rule=RowScale())
    codes, scale, _ = call(spec)(np.zeros_like(X))
    assert np.all(np.isnan(np.asarray(codes, np.float32)))
    assert not np.any(scale)


def test_for_a_gpu_it_is_one_call_and_on_a_cpu_none():
    traced = call().trace(X, *VECTORS)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count(CALL) == 1
    assert CALL not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((3, 64), np.float32, "has dtype float32"),
        ((3, 20), jnp.bfloat16, "rows of 20 values"),
        ((3, 32776), jnp.bfloat16, "rows of 32776 values"),
        ((0, 64), jnp.bfloat16, "it has no rows"),
        ((3, 32768), np.float16, None),
    ],
)
def test_what_the_kernel_does_not_take_has_a_reason(shape, dtype, why):
    found = why_no_rows_kernel(shape, np.dtype(dtype))
    assert found is None if why is None else why in found


def test_vmap_is_one_call_of_more_rows():
    many = jnp.stack([X, 2 * X])
    mapped = jax.jit(jax.vmap(call(), (0, None, None)))
    text = mapped.trace(many, *VECTORS).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 1
    for index in range(2):
        one = [y[index] for y in mapped(many, *VECTORS)]
        assert_equal(one, call()(many[index], *VECTORS))


def test_vmap_over_a_gain_is_that_of_the_definition():
    gains = jnp.stack([VECTORS[0], VECTORS[0] * 2])
    found = jax.vmap(call(), (None, 0, None))(X, gains, VECTORS[1])
    assert_equal([y[1] for y in found], call()(X, gains[1], VECTORS[1]))


def test_the_scale_has_the_derivative_of_its_definition():
    spec = rows.spec("int8", activation="silu")
    x = jnp.asarray(X, jnp.float16)
    slope = jax.grad(lambda x: call(spec)(x)[1].sum())(x)
    wanted = jax.grad(lambda x: (jnp.abs(jax.nn.silu(x.astype(np.float32))).max(-1) / 127).sum())(x)
    np.testing.assert_allclose(slope, wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["layer, rounded", "a factor"])
def test_rows_that_a_mesh_splits_are_not_gathered(name, kind):
    norm = rows.NORMS.get(name)
    spec = rows.spec("int8", norm, has_factor=norm is None)
    others = rows.vectors(norm, 200, jnp.bfloat16) if norm else [rows.matrix(6, 200, seed=1)]
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])
    x, *others = (
        jax.device_put(v, jax.sharding.NamedSharding(mesh, jax.P(*[None] * (v.ndim - 1), "x")))
        for v in (X, *others)
    )
    compiled = call(spec).lower(x, *others).compile()
    assert "all-gather" not in compiled.as_text()
    y = rows.expected(*map(np.asarray, (x,)), list(map(np.asarray, others)), spec)
    rows.assert_rows(*compiled(x, *others)[:2], y, spec, most=5e-3 if norm else 0)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_splits_rows_and_sends_nothing(kind):
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])
    rows_of_x = jax.sharding.NamedSharding(mesh, jax.P("x"))
    x = jax.device_put(X, rows_of_x)
    vectors = jax.device_put(VECTORS, jax.sharding.NamedSharding(mesh, jax.P()))
    compiled = call().lower(x, *vectors).compile()
    assert "all-gather" not in compiled.as_text()
    found = compiled(x, *vectors)
    assert found[0].sharding.is_equivalent_to(rows_of_x, 2)
    assert_equal(found, call()(X, *VECTORS))
