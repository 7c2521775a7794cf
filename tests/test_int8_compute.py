"""`compute="int8"`: FP8 and float operands rounded once more, and multiplied in int8."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._ops import int8_compute

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MATRIX = (((1,), (0,)), ((), ()))


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@dataclasses.dataclass
class Rounded:
    """The definition in numpy: int8 codes and the scale of each line along `axis`.

    A quotient that lies on a tie up to its last bits may be rounded either way: `near` says which.
    """

    codes: np.ndarray
    scale: np.ndarray
    near: np.ndarray

    @classmethod
    def of(cls, x, axis):
        x = np.asarray(x).astype(np.float32)
        finite = np.where(np.isfinite(x), np.abs(x), 0)
        amax = finite.max(axis, keepdims=True, initial=0)
        scale = np.where(amax > 0, amax * np.float32(1 / 127), np.float32(1)).astype(np.float32)
        with np.errstate(invalid="ignore"):
            steps = np.nan_to_num(np.clip(x / scale, -128, 127), nan=0.0)
        near = np.abs(np.abs(steps % 1) - 0.5) < 1e-5
        return cls(np.rint(steps).astype(np.float64), scale.astype(np.float64), near)


def defined(x, w):
    """The product of two matrices of values by the definition, and how far a result may be off."""
    left, right = Rounded.of(x, 1), Rounded.of(w, 0)
    scales = left.scale * right.scale
    most = np.abs(left.codes) @ right.near + left.near @ (np.abs(right.codes) + right.near)
    y = (left.codes @ right.codes) * scales
    return y, most * scales + 3e-7 * np.abs(y)


def check(got, x, w):
    want, allowed = defined(x, w)
    assert np.shape(got) == want.shape
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= allowed)
    assert np.mean(allowed > 0.01 * np.abs(want).max()) < 0.1  # it says something


def off(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


WEIGHTS = {
    "per channel": {"channelwise_axes": (1,)},
    "per tensor": {},
    "blocks": {"tiled_axes": {0: 128, 1: 16}},
    "partial blocks along K": {"tiled_axes": {0: 100}},
    "e8m0 scales of 32": {"tiled_axes": {0: 32, 1: 1}, "scale_dtype": jnp.float8_e8m0fnu},
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=np.dtype)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_product_is_the_definition(kind, dtype):
    x, w = normal(7, 257).astype(dtype), jaxfp8.quantize(normal(257, 33, seed=1), **WEIGHTS[kind])
    got = jaxfp8.matmul(x, w, compute="int8", preferred_element_type=jnp.float32)
    check(got, x, jaxfp8.dequantize(w, jnp.float32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=np.dtype)
def test_all_codes_of_an_fp8_line_are_rounded_as_the_definition_says(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    w = jaxfp8.QArray(jnp.asarray(codes)[:, None], jnp.full((1, 1), 0.75))
    got = jaxfp8.matmul(jnp.eye(256), w, compute="int8")
    check(got, np.eye(256), codes.astype(np.float32)[:, None] * np.float32(0.75))


def test_bare_fp8_codes_are_operands():
    x, w = normal(5, 64).astype(E4M3), normal(64, 6, seed=1).astype(E4M3)
    got = jaxfp8.matmul(x, w, compute="int8")
    check(got, x, w)


def test_nan_counts_as_zero_and_an_infinity_as_the_largest_of_its_line():
    x = normal(4, 40).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf).at[3, 0].set(-jnp.inf)
    w = jaxfp8.quantize(normal(40, 8, seed=1).at[7, 2].set(jnp.nan), channelwise_axes=(1,))
    got = jaxfp8.matmul(x, w, compute="int8")
    assert np.isnan(jaxfp8.matmul(x, w)).any() and np.isfinite(got).all()
    zeroed = x.at[1, 3].set(0)
    np.testing.assert_array_equal(got[1], jaxfp8.matmul(zeroed, w, compute="int8")[1])
    check(got, x, jaxfp8.dequantize(w))


def test_infinite_e5m2_code_counts_as_the_largest_of_its_line():
    w = jnp.asarray([[jnp.inf], [1.0], [-2.0]], E5M2)
    got = jaxfp8.matmul(jnp.eye(3), w, compute="int8")
    np.testing.assert_allclose(got, [[2.0], [1.008], [-2.0]], atol=0.01)


@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
def test_layouts_and_batches_have_the_lines_of_their_sums(transposed):
    x, w = normal(3, 5, 48), normal(3, 48, 9, seed=1)
    q = jaxfp8.quantize(w.swapaxes(1, 2) if transposed else w)
    q = q.mT if transposed else q
    got = jaxfp8.matmul(x, q, compute="int8")
    for y, a, b in zip(got, x, jaxfp8.dequantize(q), strict=True):
        check(y, a, b)


def test_einsum_over_two_axes_is_the_matrix_product_of_the_merged_axes():
    x, w = normal(4, 3, 20), jaxfp8.quantize(normal(3, 20, 7, seed=1))
    got = jaxfp8.einsum("mab,abn->mn", x, w, compute="int8")
    flat = jaxfp8.QArray(w.qvalue.reshape(60, 7), w.scale.reshape(1, 1))
    np.testing.assert_array_equal(got, jaxfp8.matmul(x.reshape(4, 60), flat, compute="int8"))


def test_epilogue_follows_the_exact_sum():
    x, w = normal(6, 96), jaxfp8.quantize(normal(96, 16, seed=1), channelwise_axes=(1,))
    bias, residual = normal(16, seed=2), normal(6, 16, seed=3)
    after = {"bias": bias, "residual": residual, "activation": "relu"}
    got, amax = jaxfp8.matmul(x, w, compute="int8", **after, return_amax=True)
    total, allowed = defined(x, jaxfp8.dequantize(w))
    want = np.maximum(total + bias + residual, 0)
    assert np.all(np.abs(got - want) <= allowed + 1e-5)
    assert amax == got.max()
    half = jaxfp8.matmul(x.astype(jnp.bfloat16), w, compute="int8")
    assert half.dtype == jnp.bfloat16
    narrow = jaxfp8.matmul(x, w, compute="int8", **after, out_dtype=E4M3, out_scale=0.1)
    assert off(jaxfp8.dequantize(narrow), want) < 0.05


def test_integer_operands_stay_as_they_are():
    x = jaxfp8.quantize(normal(6, 96) + 1, jnp.int8, channelwise_axes=(0,), zero_point=True)
    w = jaxfp8.quantize(normal(96, 16, seed=1), jnp.int8, channelwise_axes=(1,))
    np.testing.assert_array_equal(jaxfp8.matmul(x, w, compute="int8"), jaxfp8.matmul(x, w))
    wide = jaxfp8.matmul(normal(6, 96), x.T, compute="int8")
    left = Rounded.of(normal(6, 96), 1)
    want = left.codes * left.scale @ np.asarray(jaxfp8.dequantize(x).T, np.float64)
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-5)


def test_prepared_weight_gives_what_it_was_made_of():
    x, w = normal(6, 96), jaxfp8.quantize(normal(96, 64, seed=1), channelwise_axes=(1,))
    got = jaxfp8.matmul(x, jaxfp8.prepare(w), compute="int8")
    np.testing.assert_array_equal(got, jaxfp8.matmul(x, w, compute="int8"))


@pytest.mark.parametrize("shapes", [((0, 5), (5, 3)), ((2, 0), (0, 3)), ((2, 5), (5, 0))])
def test_empty_operands_give_zeros(shapes):
    x, w = jnp.ones(shapes[0]), jaxfp8.QArray(jnp.ones(shapes[1], E4M3), jnp.ones(()))
    got = jaxfp8.matmul(x, w, compute="int8")
    assert got.shape == (shapes[0][0], shapes[1][1]) and not got.any()


def test_vmap_has_lines_of_each_element():
    x, w = normal(3, 5, 48), jax.vmap(jaxfp8.quantize)(normal(3, 48, 9, seed=1))
    got = jax.vmap(lambda x, w: jaxfp8.matmul(x, w, compute="int8"))(x, w)
    np.testing.assert_array_equal(got, jaxfp8.matmul(x, w, compute="int8"))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_derivatives_are_those_of_the_product_without_it(activation):
    x, w = normal(6, 96), jaxfp8.quantize(normal(96, 16, seed=1), channelwise_axes=(1,))

    def loss(x, scale, compute):
        q = jaxfp8.QArray(w.qvalue, scale)
        after = {"activation": activation, "bias": jnp.ones(16)}
        return jnp.sin(0.1 * jaxfp8.matmul(x, q, compute=compute, **after)).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    got, want = (gradient(x, w.scale, compute) for compute in ("int8", None))
    assert all(off(a, b) < 0.02 for a, b in zip(got, want, strict=True))
    tangent = jax.jvp(lambda x: loss(x, w.scale, "int8"), (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, got[0].sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("factor", "fp8", "int8_weight", "both"), [(1, 0.026, 0.0275, 0.029), (20, 0.025, 0.062, 0.062)]
)
def test_error_is_what_the_docstring_says(factor, fp8, int8_weight, both):
    x, w = normal(32, 4096), normal(4096, 64, seed=1)
    w = jnp.where(jax.random.uniform(jax.random.key(2), w.shape) < 0.001, factor * w, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    q = jaxfp8.quantize(w, channelwise_axes=(1,))
    codes, scale = int8_compute.rounded(jaxfp8.dequantize(q), (0,))
    errors = (
        off(jaxfp8.matmul(x, q), exact),
        off(jaxfp8.matmul(x, jaxfp8.QArray(codes, scale)), exact),
        off(jaxfp8.matmul(x, q, compute="int8"), exact),
    )
    assert errors == pytest.approx((fp8, int8_weight, both), rel=0.05)


def test_lost_is_the_share_of_a_lines_values_that_become_zero():
    x = jnp.asarray([[127.0, 0.4, -0.4, 0.6, 0.0], [1.0, 1.0, 1.0, 1.0, jnp.nan]])
    np.testing.assert_allclose(int8_compute.lost(x, (1,)), [0.5, 0.0])


class TestErrors:
    """What `compute="int8"` cannot mean."""

    def test_other_names(self):
        with pytest.raises(ValueError, match=r'`compute` is \'int4\', but None or "int8"'):
            jaxfp8.matmul(normal(2, 8), jaxfp8.quantize(normal(8, 3)), compute="int4")

    def test_integers_whose_scale_changes_along_the_sum(self):
        w = jaxfp8.quantize(normal(64, 8), jnp.int8, tiled_axes={0: 16})
        with pytest.raises(ValueError, match=r"`rhs` is int8 with a scale .* contracted axis"):
            jaxfp8.matmul(normal(2, 64), w, compute="int8")

    @pytest.mark.parametrize(("size", "fits"), [(133144, True), (133145, False)])
    def test_sums_that_an_int32_may_not_hold(self, size, fits):
        x, w = jnp.ones((1, size)), jnp.ones((size, 1), E4M3)
        if fits:  # all codes are 127: the largest sum there is
            assert jaxfp8.matmul(x, w, compute="int8") == pytest.approx(size)
            return
        with pytest.raises(ValueError, match=r"the contracted axis has 133145 terms.*133144"):
            jaxfp8.matmul(x, w, compute="int8")

    def test_an_int32_output_of_operands_that_are_rounded(self):
        with pytest.raises(TypeError, match="int32"):
            x, w = normal(2, 8).astype(E4M3), normal(8, 3).astype(E4M3)
            jaxfp8.matmul(x, w, compute="int8", preferred_element_type=jnp.int32)
