"""Values that one kernel produces and encodes are those of the definition."""

import encoded
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.ops.produce_call import quantize_produced

CALL = "custom_call @jaxfp8_encode"
# A chunk, part of a tile, one more row than a tile, rows of 16 and not, and many tiles.
SHAPES = [(1, 8), (3, 200), (129, 136), (144, 256), (1000, 1032)]


def run(spec, arrays):
    call = jax.jit(lambda *xs: quantize_produced(*xs, spec=spec))
    assert call.lower(*arrays).as_text().count(CALL) == 1
    found, again = call(*arrays), call(*arrays)
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", encoded.NORMS)
def test_norms(name, shape):
    for narrow, vector in (("bfloat16", "float32"), ("float16", "float16")):
        spec = encoded.spec(narrow=narrow, norm=encoded.NORMS[name])
        arrays = encoded.operands(spec, shape, vector)
        encoded.assert_encoded(spec, arrays, run(spec, arrays), most=2e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_rounded_values_have_the_bits_of_the_definition(narrow, dtype, shape):
    for first in (None, 1):
        spec = encoded.spec(dtype, narrow, transpose_from=first, scales=4)
        arrays = encoded.operands(spec, shape)
        encoded.assert_encoded(spec, arrays, run(spec, arrays))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_the_definition(shape):
    spec = encoded.spec("float8_e5m2", has_factor=True)
    arrays = encoded.operands(spec, shape)
    encoded.assert_encoded(spec, arrays, run(spec, arrays))


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh", "gelu_erf"])
def test_activations(activation):
    for shape in SHAPES[1:4]:
        for has_factor in (False, True):
            spec = encoded.spec(activation=activation, has_factor=has_factor, scales=1)
            arrays = encoded.operands(spec, shape)
            encoded.assert_encoded(spec, arrays, run(spec, arrays), most=2e-2)


def test_scales_out_of_range_divide_as_any():
    spec = encoded.spec(scales=4)
    arrays = encoded.operands(spec, (40, 64))[:1]
    scales = [np.full((1, 1), s, np.float32) for s in (0.0, 1e-30, 1e30, 2e-38)]
    arrays += [jnp.asarray(s) for s in scales]
    encoded.assert_encoded(spec, arrays, run(spec, arrays))


def test_a_rewritten_training_step_has_the_gradients_of_the_step():
    recipe = jaxfp8.DelayedScaling(amax_history_length=4)
    numbers = (((1,), (0,)), ((), ()))
    x = jax.random.normal(jax.random.key(0), (256, 128), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (128, 128)) / 8

    def loss(w, state, x):
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        y, narrow = y.astype(x.dtype), w.astype(x.dtype)
        a, b = (jaxfp8.fp8_dot_general(y, narrow, numbers, s, recipe=recipe) for s in state)
        return jnp.square((jax.nn.silu(a) * b).astype(jnp.float32)).mean()

    step = jax.grad(loss, (0, 1))
    state = [jaxfp8.ScalingState.init(recipe) for _ in range(2)]
    rewritten = jax.jit(jaxfp8.rewrite(step))
    assert rewritten.lower(w, state, x).as_text().count(CALL) >= 2
    (found, new), (wanted, old) = rewritten(w, state, x), jax.jit(step)(w, state, x)
    assert np.linalg.norm(found - wanted) <= 0.02 * np.linalg.norm(wanted)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02)
