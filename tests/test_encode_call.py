"""Values that are produced and encoded in one call: the definition, and what JAX makes of it."""

import encoded
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8._call.ops.produce_call import quantize_produced, why_no_given_kernel

CALL = "custom_call @jaxfp8_encode"
SHAPE = (6, 200)
NORM = encoded.spec(norm=encoded.NORMS["layer, rounded"])
SPECS = {
    "a norm": NORM,
    "a gate": encoded.spec(activation="silu", has_factor=True),
    "a rounding": encoded.spec("float8_e5m2"),
}


def call(spec):
    return jax.jit(lambda *operands: quantize_produced(*operands, spec=spec))


@pytest.mark.parametrize("name", SPECS)
def test_codes_are_those_of_the_values_that_jax_makes(name):
    spec = SPECS[name]
    arrays = encoded.operands(spec, SHAPE)
    encoded.assert_encoded(spec, arrays, call(spec)(*arrays), most=5e-3)


def test_infinities_and_nan_do_not_count_in_the_amax():
    spec = encoded.spec()
    arrays = encoded.operands(spec, SHAPE)
    codes, _, _, _, amax = call(spec)(*arrays)
    assert amax == np.float32(arrays[0][-1, -1].astype(jnp.bfloat16))
    assert np.array_equal(np.asarray(codes, np.float32)[0, 1:3], [448, -448])
    assert np.isnan(np.asarray(codes, np.float32)[0, 0])


@pytest.mark.parametrize("name", SPECS)
def test_for_a_gpu_it_is_one_call_and_on_a_cpu_none(name):
    arrays = encoded.operands(SPECS[name], SHAPE)
    traced = call(SPECS[name]).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count(CALL) == 1
    assert CALL not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize(
    ("shape", "narrow", "dtype", "first", "why"),
    [
        ((3, 64), np.float32, "float8_e4m3fn", 1, "has dtype float32"),
        ((3, 64), jnp.bfloat16, "int8", 1, "have dtype int8"),
        ((3, 20), jnp.bfloat16, "float8_e4m3fn", None, "rows of 20 values"),
        ((0, 64), jnp.bfloat16, "float8_e4m3fn", 1, "it has no rows"),
        ((3, 2, 12), jnp.float16, "float8_e5m2", 1, None),
    ],
)
def test_what_the_kernel_does_not_take_has_a_reason(shape, narrow, dtype, first, why):
    found = why_no_given_kernel(shape, np.dtype(narrow), np.dtype(dtype), first)
    assert found is None if why is None else why in found


def test_vmap_is_the_definition_of_each():
    spec = encoded.spec()
    first, second = (encoded.operands(spec, SHAPE, seed=seed) for seed in (0, 1))
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    found = jax.vmap(call(spec))(*stacked)
    encoded.assert_encoded(spec, second, [y[1] for y in found])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_mesh_splits_it_and_gathers_nothing(axis, kind):
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])
    arrays = encoded.operands(NORM, SHAPE)
    split = [
        jax.P(*("x" if i == v.ndim - 2 + axis and v.shape[i] > 1 else None for i in range(v.ndim)))
        for v in arrays
    ]
    placed = [
        jax.device_put(v, jax.sharding.NamedSharding(mesh, spec))
        for v, spec in zip(arrays, split, strict=True)
    ]
    compiled = call(NORM).lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
    encoded.assert_encoded(NORM, arrays, compiled(*placed), most=5e-3)
