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
# Half of the largest FP8 code is a tie in int8, which a fused division may round either way. The
# second rounding itself costs .01 and more.
CLOSE = 5e-3


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
    narrow = jaxfp8.matmul(
        x, w, compute="int8", **after, preferred_element_type=E4M3, out_scale=0.1
    )
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


def in_floats(x, q, s):
    return jax.nn.relu(x @ (q.astype(x.dtype) * s) + 1)


def with_outliers(*shape, seed=1):
    w = normal(*shape, seed=seed)
    return jnp.where(jax.random.uniform(jax.random.key(2), shape) < 0.003, 30 * w, w)


class TestRecipe:
    """`FP8_AS_INT8`: weights held in FP8, activations in int8, products computed in int8."""

    def test_product_is_that_of_dot_general(self):
        x, w = normal(6, 96), jaxfp8.FP8_AS_INT8.quantize_weight(normal(96, 16, seed=1), (0,))
        assert w.qvalue.dtype == E4M3
        got = jaxfp8.recipe_dot_general(x, w, MATRIX, jaxfp8.FP8_AS_INT8)
        np.testing.assert_array_equal(got, jaxfp8.matmul(x, w, compute="int8"))

    def test_gradient_reads_the_weight_as_it_is_stored(self):
        x, w = normal(6, 96), jaxfp8.FP8_AS_INT8.quantize_weight(normal(96, 16, seed=1), (0,))

        def loss(x):
            return jaxfp8.recipe_dot_general(x, w, MATRIX, jaxfp8.FP8_AS_INT8).sum()

        want = jnp.ones((6, 16)) @ jaxfp8.dequantize(w).T
        np.testing.assert_allclose(jax.grad(loss)(x), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=np.dtype)
    def test_quantize_dots_computes_in_int8(self, dtype):
        w, x = normal(96, 16, seed=1).astype(dtype), normal(6, 96).astype(dtype)
        g = jaxfp8.quantize_dots(lambda w, x: jax.nn.relu(x @ w + 1), jaxfp8.FP8_AS_INT8)
        q = jaxfp8.FP8_AS_INT8.quantize_weight(w, (0,))
        after = {"bias": jnp.ones(16), "activation": "relu"}
        want = jaxfp8.matmul(x, q, compute="int8", **after)
        assert off(g(w, x), want) < CLOSE
        (row,) = g.explain(w, x).matched
        assert (row.lhs.dtype, row.rhs.dtype) == ("int8", "int8")
        assert "float8_e4m3fn rounded once more, to int8" in row.note
        ahead = g.quantize_weights(w, x)
        assert ahead.qvalue.dtype == E4M3 and off(g(ahead, x), want) < 0.02

    def test_quantize_dots_has_straight_through_gradients(self):
        w, x, ct = normal(96, 16, seed=1), normal(6, 96), normal(6, 16, seed=2)
        g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.FP8_AS_INT8)
        d_w, d_x = jax.vjp(g, w, x)[1](ct)
        right = Rounded.of(jaxfp8.dequantize(jaxfp8.FP8_AS_INT8.quantize_weight(w, (0,))), 0)
        left = Rounded.of(x, 1)
        assert off(d_x, np.asarray(ct) @ (right.codes * right.scale).T) < CLOSE
        assert off(d_w, (left.codes * left.scale).T @ np.asarray(ct)) < CLOSE

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: (jnp.ones((133145, 1)), jnp.ones((1, 133145))), "holds the sum of 133144"),
            (lambda: (jnp.ones((8, 2), E4M3), jnp.ones((3, 8), E4M3)), "bare FP8 codes"),
        ],
        ids=["long sums", "bare codes"],
    )
    def test_quantize_dots_leaves_what_int8_cannot_compute(self, make, reason):
        def product(w, x):
            return jax.lax.dot_general(x, w, MATRIX, preferred_element_type=jnp.float32)

        report = jaxfp8.quantize_dots(product, jaxfp8.FP8_AS_INT8).explain(*make())
        assert reason in report.missed[0].reason

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"compute": "int4"}, r"`compute` is 'int4'"),
            ({"compute": "int8", "weight": None}, "an operand that is held in 8 bits"),
            ({"terms": 3, "compute": "int8", "weight": None}, "an operand that is held in 8 bits"),
        ],
    )
    def test_fields_that_contradict_each_other_are_refused(self, fields, text):
        with pytest.raises(ValueError, match=text):
            jaxfp8.Recipe(name="mine", **fields)


class TestRewrite:
    """`rewrite(f, compute="int8")` and what `explain` says of it."""

    w = jaxfp8.quantize(normal(96, 16, seed=1), channelwise_axes=(1,))

    def test_captured_dots_are_computed_in_int8(self):
        x = normal(6, 96)
        after = {"bias": jnp.ones(16), "activation": "relu"}
        want = jaxfp8.matmul(x, self.w, compute="int8", **after)
        f = jaxfp8.rewrite(in_floats, compute="int8")
        for g in (f, jax.jit(f)):
            assert off(g(x, self.w.qvalue, self.w.scale), want) < CLOSE

    def test_value_is_the_same_with_and_without_derivatives(self):
        x = normal(6, 96)
        f = jaxfp8.rewrite(in_floats, compute="int8")

        def loss(x):
            return f(x, self.w.qvalue, self.w.scale).sum()

        value, gradient = jax.value_and_grad(loss)(x)
        assert value == loss(x) == jax.jvp(loss, (x,), (x,))[0]
        mask = f(x, self.w.qvalue, self.w.scale) > 0
        want = mask.astype(jnp.float32) @ jaxfp8.dequantize(self.w).T
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)

    def test_dots_in_a_scan_are_computed_in_int8(self):
        stack = jax.vmap(lambda w: jaxfp8.quantize(w, channelwise_axes=(1,)))(normal(3, 32, 32))
        x = normal(4, 32)

        def layers(x, q, s):
            return jax.lax.scan(lambda c, w: (c @ (w[0].astype(c.dtype) * w[1]), None), x, (q, s))

        got, _ = jaxfp8.rewrite(layers, compute="int8")(x, stack.qvalue, stack.scale)
        want = x
        for i in range(3):
            want = jaxfp8.matmul(want, stack[i], compute="int8")
        assert off(got, want) < CLOSE

    def test_explain_names_the_int8_kernel_and_the_cost(self):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (self.w.qvalue, self.w.scale)]
        (row,) = jaxfp8.explain(in_floats, compute="int8")(normal(6, 96), *shapes).matched
        assert row.rhs.dtype == "float8_e4m3fn" and "relative error of .028" in row.note
        (plain,) = jaxfp8.explain(in_floats)(normal(6, 96), *shapes).matched
        assert plain.note == "" and plain.kernels["cpu"] != row.kernels["cpu"]

    def test_explain_speaks_of_the_axes_of_the_function(self):
        w = jaxfp8.quantize(normal(96, 16, seed=1), channelwise_axes=(1,))
        (row,) = jaxfp8.explain(in_floats, compute="int8")(normal(6, 96), w.qvalue, w.scale).matched
        (plain,) = jaxfp8.explain(in_floats)(normal(6, 96), w.qvalue, w.scale).matched
        assert row.rhs == plain.rhs
        assert "contracted axis" not in row.note

    def test_group_scaled_integers_are_missed_with_the_reason(self):
        def product(x, q, s):
            return x @ (q.astype(x.dtype).reshape(4, 24, 16) * s).reshape(96, 16)

        arguments = normal(6, 96), jnp.ones((96, 16), jnp.int8), jnp.ones((4, 1, 16))
        (row,) = jaxfp8.explain(product, compute="int8")(*arguments).missed
        assert "changes along a contracted axis" in row.reason
        assert "leave `compute` out" in row.remedy

    def test_other_names_are_refused(self):
        for function in (jaxfp8.rewrite, jaxfp8.explain):
            with pytest.raises(ValueError, match='None or "int8" is needed'):
                function(in_floats, compute="fp4")


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
