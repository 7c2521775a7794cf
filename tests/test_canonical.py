"""The form in which a scaled dot reaches a GPU, computed by the CPU's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8._call import canonical as _canonical
from jaxfp8._call import primitive
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec
from specs import draw_operands, draw_spec

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def numbers(x: jax.Array, dtype: str) -> np.ndarray:
    x = np.asarray(x)
    return np.float64(x.view(np.dtype(dtype)) if dtypes.is_float8(dtype) else x)


def both_ways(spec, operands):
    """The outputs of a problem and of its canonical form."""
    form = _canonical.canonical(spec)
    named = {name: jnp.asarray(x) for name, x in operands.items()}
    direct = primitive._bind(spec, "", named)
    return direct, form.results(primitive._bind(form.spec, "", form.operands(named)))


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_mean_the_same_in_canonical_form(seed):
    rng = np.random.default_rng(1000 + seed)
    spec = draw_spec(rng)
    while _canonical.is_empty(spec):
        spec = draw_spec(rng)
    outputs = both_ways(spec, draw_operands(rng, spec))
    for direct, canonical in zip(*outputs, strict=True):
        assert direct.shape == canonical.shape
        dtype = spec.epilogue.out_dtype if direct is outputs[0][0] else "float32"
        a, b = numbers(direct, dtype), numbers(canonical, dtype)
        if dtypes.is_eight_bit(dtype):  # a sum at the border between two codes
            assert np.mean(a != b) < 0.02
        else:
            np.testing.assert_allclose(a, b, rtol=TOLERANCE.get(dtype, 0), atol=1e-3)


def side(shape, contracting, batch=(), tiles=None, dtype="float8_e4m3fn") -> OperandSpec:
    return OperandSpec(
        dtype=dtype,
        shape=shape,
        contracting=contracting,
        batch=batch,
        tiles=tiles or shape,
        scale=tiles is not None,
        zero_point=False,
    )


def canonical_of(lhs, rhs) -> ScaledDotSpec:
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
    return _canonical.canonical(spec).spec


ACTIVATIONS = side((6, 64), (1,), dtype="bfloat16")


def test_a_weight_with_its_contracted_axis_first_stays_so_beside_wide_activations():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(64, 1, 1))).rhs
    assert (rhs.shape, rhs.contracting, rhs.tiles) == ((1, 64, 32), (1,), (1, 64, 1))


def test_a_weight_with_its_contracted_axis_last_stays_so():
    rhs = canonical_of(ACTIVATIONS, side((4, 8, 64), (2,), tiles=(1, 1, 64))).rhs
    assert (rhs.shape, rhs.contracting) == ((1, 32, 64), (2,))


def test_tensor_cores_get_both_8_bit_sides_with_the_contracted_axis_last():
    spec = canonical_of(side((6, 64), (1,)), side((64, 32), (0,), tiles=(64, 1)))
    assert (spec.rhs.shape, spec.rhs.tiles) == ((1, 32, 64), (1, 1, 64))


def test_a_weight_that_a_batch_shares_is_one_matrix():
    lhs = side((5, 6, 64), (2,), (0,), dtype="bfloat16")
    spec = canonical_of(lhs, side((1, 64, 32), (1,), (0,)))
    assert spec.lhs.shape == (1, 30, 64)
    assert spec.rhs.shape == (1, 64, 32)


def test_activations_that_a_batch_shares_are_one_matrix():
    lhs = side((1, 6, 64), (2,), (0,), dtype="bfloat16")
    spec = canonical_of(lhs, side((5, 64, 32), (1,), (0,)))
    assert spec.lhs.shape == (1, 6, 64)
    assert spec.out_shape == (1, 6, 160)


def test_blocks_of_an_axis_that_is_split_in_two_are_blocks_of_the_whole():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(16, 1, 8))).rhs
    assert rhs.tiles == (1, 16, 8)


def test_a_scale_that_repeats_along_joined_axes_is_given_for_each_index():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(64, 4, 1))).rhs
    assert rhs.tiles == (1, 64, 1)
