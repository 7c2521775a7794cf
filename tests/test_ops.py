"""dot_general, matmul and einsum: shapes, dtypes, epilogues, transformations and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import QArray

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(5, 24)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(24, 16)), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=16), jnp.float32)
QW = jaxfp8.quantize(W, channelwise_axes=(1,))
DW = jaxfp8.dequantize(QW)
MATMUL = (((1,), (0,)), ((), ()))


def close(got, want, tolerance=1e-5):
    scale = float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), atol=tolerance * scale, rtol=0
    )


class TestShapes:
    @pytest.mark.parametrize(
        ("lhs", "rhs"),
        [
            ((5, 24), (24, 16)),
            ((24,), (24, 16)),
            ((5, 24), (24,)),
            ((24,), (24,)),
            ((3, 5, 24), (24, 16)),
            ((5, 24), (3, 24, 16)),
            ((2, 1, 5, 24), (3, 24, 16)),
            ((3, 24), (2, 3, 24, 1)),
            ((24,), (3, 24, 16)),
            ((3, 5, 24), (24,)),
            ((0, 24), (24, 16)),
            ((5, 0), (0, 16)),
            ((1, 5, 24), (0, 24, 16)),
        ],
    )
    def test_matmul_has_the_shapes_of_numpy(self, lhs, rhs) -> None:
        x = jnp.asarray(RNG.normal(size=lhs), jnp.float32)
        q = jaxfp8.quantize(jnp.asarray(RNG.normal(size=rhs), jnp.float32))
        want = jnp.matmul(x, jaxfp8.dequantize(q))
        got = jaxfp8.matmul(x, q)
        assert got.shape == want.shape
        if want.size:
            close(got, want)

    @pytest.mark.parametrize(
        ("subscripts", "lhs", "rhs"),
        [
            ("mk,kn->mn", (5, 8), (8, 6)),
            ("mk,kn->nm", (5, 8), (8, 6)),
            ("btd,hkd->bhtk", (2, 3, 8), (4, 5, 8)),
            ("bthk,hkd->btd", (2, 3, 4, 5), (4, 5, 6)),
            ("bmk,bkn->bmn", (2, 3, 4), (2, 4, 5)),
            ("...k,kn->...n", (2, 3, 4), (4, 5)),
            ("...mk,...kn->...mn", (2, 3, 4), (3, 4, 5)[1:]),
            ("...mk,...kn->...mn", (2, 3, 4), (1, 4, 5)),
            ("m,n->nm", (3,), (4,)),
            ("mk,nk", (3, 4), (5, 4)),
            ("k,k->", (4,), (4,)),
        ],
    )
    def test_einsum_agrees_with_numpy(self, subscripts, lhs, rhs) -> None:
        x = jnp.asarray(RNG.normal(size=lhs), jnp.float32)
        q = jaxfp8.quantize(jnp.asarray(RNG.normal(size=rhs), jnp.float32), jnp.float8_e5m2)
        want = jnp.einsum(subscripts, x, jaxfp8.dequantize(q))
        got = jaxfp8.einsum(subscripts, x, q)
        assert got.shape == want.shape
        close(got, want)

    def test_einsum_aligns_the_bias_with_its_output(self) -> None:
        bias = jnp.arange(5.0)
        got = jaxfp8.einsum("mk,kn->nm", X, QW, bias=bias)
        close(got, (X @ DW).T + bias)


class TestDtypes:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    def test_default_output_is_the_float_side(self, dtype) -> None:
        assert jaxfp8.matmul(X.astype(dtype), QW).dtype == dtype
        assert jaxfp8.matmul(QArray(QW.qvalue.T, QW.scale.T), X.astype(dtype).T).dtype == dtype

    def test_default_output_of_two_qarrays_is_the_promoted_scale(self) -> None:
        half = QArray(QW.qvalue, QW.scale.astype(jnp.bfloat16))
        qx = jaxfp8.quantize(X, scale_dtype=jnp.bfloat16)
        assert jaxfp8.matmul(qx, half).dtype == jnp.bfloat16
        assert jaxfp8.matmul(qx, QW).dtype == jnp.float32

    def test_unscaled_integers_sum_exactly_in_int32(self) -> None:
        a = RNG.integers(-128, 128, (7, 300)).astype(np.int8)
        b = RNG.integers(0, 256, (300, 9)).astype(np.uint8)
        got = jaxfp8.matmul(a, b)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))

    def test_eight_bit_output_is_a_qarray(self) -> None:
        got = jaxfp8.matmul(X, QW, out_dtype=jnp.float8_e4m3fn, out_scale=0.05)
        assert got.qvalue.dtype == jnp.float8_e4m3fn
        close(jaxfp8.dequantize(got), X @ DW, 0.07)

    def test_out_scale_by_row_is_kept_as_the_scale(self) -> None:
        y = X @ DW
        out_scale = jnp.max(jnp.abs(y), axis=1, keepdims=True) / 127
        got = jaxfp8.matmul(X, QW, out_dtype=jnp.int8, out_scale=out_scale)
        np.testing.assert_array_equal(got.scale, out_scale)
        close(jaxfp8.dequantize(got), y, 0.005)

    def test_amax_is_taken_after_the_activation_and_before_out_scale(self) -> None:
        q, amax = jaxfp8.matmul(
            X, QW, activation="relu", out_dtype=jnp.int8, out_scale=9.0, return_amax=True
        )
        assert isinstance(q, QArray)
        assert amax.shape == ()
        close(amax, jnp.max(jax.nn.relu(X @ DW)))

    def test_out_scale_gets_the_rank_of_the_output(self) -> None:
        got = jaxfp8.matmul(X, QW, out_dtype=jnp.int8, out_scale=jnp.full((16,), 0.1))
        assert got.scale.shape == (1, 16)
        close(jaxfp8.dequantize(got), X @ DW, 0.02)

    @pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "silu"])
    def test_activations_of_special_values_are_those_of_jax(self, activation) -> None:
        x = jnp.asarray([[-jnp.inf], [jnp.inf], [jnp.nan], [-3e38], [3e38], [-0.0]])
        one = jnp.ones((1, 1), jnp.float8_e4m3fn)
        want = {
            "relu": jax.nn.relu,
            "gelu_tanh": jax.nn.gelu,
            "gelu_erf": lambda y: jax.nn.gelu(y, approximate=False),
            "silu": jax.nn.silu,
        }[activation](x)
        np.testing.assert_array_equal(jaxfp8.matmul(x, one, activation=activation), want)


class TestInfiniteScales:
    """A scale follows the sum of the terms that share it."""

    CODES = jnp.asarray([[1, 2, -1], [-2, 0, 1], [0, 1, 0], [0, 1, 0]])
    WANT = (-np.inf, np.inf, np.nan)  # of sums -1, 4 and 0

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("x", [jnp.float32, jnp.bfloat16, jnp.int8])
    def test_a_product_has_the_sign_of_the_sum(self, x, dtype) -> None:
        w = jaxfp8.QArray(self.CODES.astype(dtype), jnp.full((1, 3), jnp.inf))
        x = jnp.ones((2, 4), x)
        got = jaxfp8.matmul(x, w, preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(got, [self.WANT] * 2)

    def test_a_code_of_0_is_dequantised_to_nan(self) -> None:
        w = jaxfp8.QArray(self.CODES.astype(jnp.int8), jnp.full((1, 3), jnp.inf))
        np.testing.assert_array_equal(np.isnan(jaxfp8.dequantize(w)), self.CODES == 0)


class TestTransformations:
    def test_gradients_agree_with_the_dequantised_product(self) -> None:
        def ours(x, scale, bias, residual):
            q = QArray(QW.qvalue, scale)
            y = jaxfp8.matmul(x, q, bias=bias, residual=residual, activation="gelu_tanh")
            return jnp.sum(jnp.sin(y))

        def plain(x, scale, bias, residual):
            w = QW.qvalue.astype(jnp.float32) * scale
            return jnp.sum(jnp.sin(jax.nn.gelu(x @ w + bias + residual)))

        args = (X, QW.scale, BIAS, 0.1 * (X @ DW))
        every = (0, 1, 2, 3)
        for got, want in zip(
            jax.grad(ours, every)(*args), jax.grad(plain, every)(*args), strict=True
        ):
            close(got, want)

    def test_gradient_of_either_side_in_any_layout(self) -> None:
        q = jaxfp8.quantize(jnp.asarray(RNG.normal(size=(3, 6, 4)), jnp.float32), tiled_axes={1: 4})
        x = jnp.asarray(RNG.normal(size=(4, 5, 3)), jnp.float32)

        def loss(product):
            return lambda x: jnp.sum(jnp.cos(product(x)))

        for got, want in [
            (
                lambda x: jaxfp8.einsum("kmb,bnk->bmn", x, q),
                lambda x: jnp.einsum("kmb,bnk->bmn", x, jaxfp8.dequantize(q)),
            ),
            (
                lambda x: jaxfp8.einsum("bnk,kmb->bnm", q, x),
                lambda x: jnp.einsum("bnk,kmb->bnm", jaxfp8.dequantize(q), x),
            ),
        ]:
            close(jax.grad(loss(got))(x), jax.grad(loss(want))(x))

    def test_hessian_vector_product(self) -> None:
        def ours(x):
            return jnp.sum(jnp.tanh(jaxfp8.matmul(x, QW)))

        def plain(x):
            return jnp.sum(jnp.tanh(x @ DW))

        def hvp(f):
            return jax.jvp(jax.grad(f), (X,), (jnp.ones_like(X),))[1]

        close(hvp(ours), hvp(plain), 1e-4)

    def test_amax_is_differentiable(self) -> None:
        got = jax.grad(lambda x: jaxfp8.matmul(x, QW, return_amax=True)[1])(X)
        close(got, jax.grad(lambda x: jnp.max(jnp.abs(x @ DW)))(X))

    def test_gradient_keeps_the_dtype_of_the_float_side(self) -> None:
        x = X.astype(jnp.bfloat16)
        grad = jax.grad(lambda x: jnp.sum(jaxfp8.matmul(x, QW).astype(jnp.float32)))(x)
        assert grad.dtype == jnp.bfloat16

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 1)])
    def test_vmap(self, axes) -> None:
        x = jnp.asarray(RNG.normal(size=(3, 5, 24)), jnp.float32)
        w = jnp.asarray(RNG.normal(size=(3, 24, 16)), jnp.float32)
        q = jax.vmap(lambda w: jaxfp8.quantize(w, channelwise_axes=(1,)))(w)
        dq = jax.vmap(jaxfp8.dequantize)(q)

        def place(tree, axis):
            if axis is None:
                return jax.tree.map(lambda a: a[0], tree)
            return jax.tree.map(lambda a: jnp.moveaxis(a, 0, axis), tree)

        got = jax.vmap(jaxfp8.matmul, axes)(place(x, axes[0]), place(q, axes[1]))
        want = jax.vmap(jnp.matmul, axes)(place(x, axes[0]), place(dq, axes[1]))
        close(got, want)

    def test_vmap_shares_an_unbatched_weight(self) -> None:
        x = jnp.ones((3, 5, 24))
        jaxpr = jax.make_jaxpr(jax.vmap(lambda x: jaxfp8.matmul(x, QW)))(x)
        (dot,) = [e for e in jaxpr.eqns if e.primitive.name == "scaled_dot"]
        assert dot.invars[1].aval.shape == (1, 24, 16)
        assert dot.outvars[0].aval.shape == (3, 5, 16)

    def test_vmap_over_scales_alone(self) -> None:
        scales = jnp.stack([QW.scale, 2 * QW.scale])
        got = jax.vmap(lambda s: jaxfp8.matmul(X, QArray(QW.qvalue, s)))(scales)
        close(got, jnp.stack([X @ DW, 2 * (X @ DW)]))

    def test_vmap_over_the_epilogue_alone(self) -> None:
        got = jax.vmap(lambda b: jaxfp8.matmul(X, QW, bias=b))(jnp.stack([BIAS, -BIAS]))
        close(got, jnp.stack([X @ DW + BIAS, X @ DW - BIAS]))

    def test_vmap_gives_an_amax_per_element(self) -> None:
        x = jnp.stack([X, 3 * X])
        _, amax = jax.vmap(lambda x: jaxfp8.matmul(x, QW, return_amax=True))(x)
        largest = jnp.max(jnp.abs(X @ DW))
        close(amax, jnp.stack([largest, 3 * largest]))

    def test_vmap_of_grad_and_grad_of_vmap(self) -> None:
        x = jnp.stack([X, 3 * X])

        def loss(x):
            return jnp.sum(jnp.sin(jaxfp8.matmul(x, QW)))

        want = jnp.cos(x @ DW) @ DW.T
        close(jax.vmap(jax.grad(loss))(x), want)
        close(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(x), want)

    def test_scan_over_a_stack_of_weights(self) -> None:
        w = jnp.asarray(RNG.normal(size=(3, 24, 24)), jnp.float32) / 5
        stack = jax.vmap(lambda w: jaxfp8.quantize(w, channelwise_axes=(1,)))(w)
        got, _ = jax.lax.scan(lambda x, q: (jaxfp8.matmul(x, q), None), X, stack)
        want = X
        for layer in jax.vmap(jaxfp8.dequantize)(stack):
            want = want @ layer
        close(got, want)

    def test_jaxpr_is_readable(self) -> None:
        text = str(jax.make_jaxpr(lambda x: jaxfp8.matmul(x, QW, activation="relu"))(X))
        assert "scaled_dot" in text
        assert "float8_e4m3fn" in text
        assert "relu" in text

    def test_vmap_over_an_eight_bit_output_gives_a_qarray(self) -> None:
        x = jnp.stack([X, 3 * X])
        got = jax.vmap(lambda x: jaxfp8.matmul(x, QW, out_dtype=jnp.int8, out_scale=0.5))(x)
        close(jaxfp8.dequantize(got), x @ DW, 0.02)

    def test_without_jit(self) -> None:
        with jax.disable_jit():
            close(jaxfp8.matmul(X, QW), X @ DW)

    def test_export(self) -> None:
        exported = jax.export.export(
            jax.jit(jaxfp8.matmul), disabled_checks=jaxfp8.export_checks()
        )(X, QW)
        close(exported.call(X, QW), X @ DW)


class TestShardMap:
    """Inside shard_map, with its check of what varies along the mesh."""

    @staticmethod
    def on_shards(function, in_specs, out_specs):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    def test_product(self) -> None:
        x = jnp.concatenate([X, X, X])[:8]
        rows = jax.P("d")
        close(self.on_shards(lambda x: jaxfp8.matmul(x, QW), rows, rows)(x), x @ DW)

    def test_gradients(self) -> None:
        x = jnp.concatenate([X, X, X])[:8]
        rows = jax.P("d")

        def loss(x, scale):
            y = jaxfp8.matmul(x, QArray(QW.qvalue, scale), bias=BIAS, activation="silu")
            return jax.lax.psum(jnp.sum(y), "d")

        def plain(x, scale):
            return jnp.sum(jax.nn.silu(x @ (QW.qvalue.astype(jnp.float32) * scale) + BIAS))

        sharded = self.on_shards(loss, (rows, jax.P()), jax.P())
        for got, want in zip(
            jax.grad(sharded, (0, 1))(x, QW.scale),
            jax.grad(plain, (0, 1))(x, QW.scale),
            strict=True,
        ):
            close(got, want)

    def test_carry_of_a_scan(self) -> None:
        q = jaxfp8.quantize(jnp.eye(24))

        def loop(x):
            return jax.lax.scan(lambda c, _: (jaxfp8.matmul(c, q), None), x, None, length=3)[0]

        x = jnp.concatenate([X, X, X])[:8]
        close(self.on_shards(loop, jax.P("d"), jax.P("d"))(x), x)


class TestMesh:
    @pytest.mark.parametrize("spec", [("x", None), (None, "y"), ("x", "y")])
    @pytest.mark.parametrize("weight_spec", [(None, "y"), ("x", None), ("y", "x")])
    def test_plain_jit_on_sharded_operands_is_right(self, spec, weight_spec) -> None:
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def put(array, spec):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            return jax.device_put(array, sharding)

        q = QArray(put(QW.qvalue, weight_spec), put(QW.scale, (None, weight_spec[1])))
        close(jax.jit(jaxfp8.matmul)(put(X[:4], spec), q), X[:4] @ DW)


ERRORS = [
    ("no operand is 8-bit", lambda: jaxfp8.matmul(X, W), TypeError, "one of them has to be 8-bit"),
    (
        "f64-like operand",
        lambda: jaxfp8.matmul(jnp.ones((5, 24), int), QW),
        TypeError,
        "`lhs` is a",
    ),
    ("not an array", lambda: jaxfp8.matmul("x", QW), TypeError, "`lhs` is of type str"),
    ("contraction", lambda: jaxfp8.matmul(X.T, QW), ValueError, "their sizes have to be equal"),
    (
        "batch",
        lambda: jaxfp8.matmul(jnp.ones((2, 5, 24)), jaxfp8.quantize(jnp.ones((3, 24, 4)))),
        ValueError,
        "leading axes have to be equal or 1",
    ),
    ("scalar", lambda: jaxfp8.matmul(1.0, QW), ValueError, "is a scalar"),
    ("axis", lambda: jaxfp8.dot_general(X, QW, (((2,), (0,)), ((), ()))), ValueError, "axis 2"),
    (
        "axis twice",
        lambda: jaxfp8.dot_general(X, QW, (((1,), (0,)), ((1,), (0,)))),
        ValueError,
        "once",
    ),
    (
        "scale shape",
        lambda: jaxfp8.matmul(X, QArray(QW.qvalue, jnp.ones((4, 64)))),
        ValueError,
        "scale",
    ),
    ("scale rank", lambda: jaxfp8.matmul(X, QArray(QW.qvalue, jnp.ones(16))), ValueError, "scale"),
    (
        "scale dtype",
        lambda: jaxfp8.matmul(X, QArray(QW.qvalue, jnp.ones((1, 16), int))),
        TypeError,
        "scale",
    ),
    (
        "zero point on FP8",
        lambda: jaxfp8.matmul(X, QArray(QW.qvalue, QW.scale, jnp.zeros((1, 16), jnp.int8))),
        TypeError,
        "zero_point",
    ),
    ("activation", lambda: jaxfp8.matmul(X, QW, activation="gelu"), ValueError, "'gelu_tanh'"),
    (
        "out_dtype alone",
        lambda: jaxfp8.matmul(X, QW, out_dtype=jnp.int8),
        ValueError,
        "`out_scale` is missing",
    ),
    (
        "out_scale alone",
        lambda: jaxfp8.matmul(X, QW, out_scale=1.0),
        ValueError,
        "`out_scale` is given",
    ),
    (
        "out dtype",
        lambda: jaxfp8.matmul(X, QW, preferred_element_type=jnp.complex64),
        TypeError,
        "complex64",
    ),
    (
        "bias shape",
        lambda: jaxfp8.matmul(X, QW, bias=jnp.ones(5)),
        ValueError,
        "`bias` has shape (5,)",
    ),
    ("bias dtype", lambda: jaxfp8.matmul(X, QW, bias=jnp.ones(16, int)), TypeError, "`bias`"),
    (
        "int32 with scale",
        lambda: jaxfp8.matmul(X, QW, preferred_element_type=jnp.int32),
        TypeError,
        "int32",
    ),
    (
        "int32 overflow",
        lambda: jaxfp8.matmul(jnp.ones((1, 140000), jnp.int8), jnp.ones((140000, 1), jnp.int8)),
        ValueError,
        "may reach",
    ),
    (
        "dimension numbers",
        lambda: jaxfp8.dot_general(X, QW, (1, 0)),
        TypeError,
        "`dimension_numbers` is (1, 0)",
    ),
    (
        "fractional axis",
        lambda: jaxfp8.dot_general(X, QW, (((1.0,), (0,)), ((), ()))),
        TypeError,
        "1.0",
    ),
    ("no subscripts", lambda: jaxfp8.einsum(3, X, QW), ValueError, "a string is needed"),
    ("operand None", lambda: jaxfp8.matmul(None, QW), TypeError, "`lhs` is of type NoneType"),
    ("bias text", lambda: jaxfp8.matmul(X, QW, bias="a"), TypeError, "`bias` is of type str"),
    (
        "abstract",
        lambda: jaxfp8.matmul(X, QW, bias=jax.ShapeDtypeStruct((16,), jnp.float32)),
        TypeError,
        "ShapeDtypeStruct",
    ),
    ("no dtype", lambda: jaxfp8.matmul(X, QW, preferred_element_type="foo"), TypeError, "foo"),
    (
        "two dtypes",
        lambda: jaxfp8.matmul(
            X, QW, preferred_element_type=jnp.float32, out_dtype=jnp.int8, out_scale=1.0
        ),
        ValueError,
        "leave one of them out",
    ),
    (
        "out_scale of 0",
        lambda: jaxfp8.matmul(X, QW, out_dtype=jnp.int8, out_scale=0.0),
        ValueError,
        "`out_scale` is 0.0",
    ),
    (
        "three precisions",
        lambda: jaxfp8.matmul(X, QW, precision=(None,) * 3),
        ValueError,
        "`precision`",
    ),
    ("precision", lambda: jaxfp8.matmul(X, QW, precision="best"), ValueError, "`precision`"),
    ("three operands", lambda: jaxfp8.einsum("a,b,c->abc", X, QW), ValueError, "two operands"),
    ("diagonal", lambda: jaxfp8.einsum("kk,kn->n", jnp.ones((24, 24)), QW), ValueError, "diagonal"),
    ("lone sum", lambda: jaxfp8.einsum("mk,kn->n", X, QW), ValueError, "one operand alone"),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_bad_input_is_named_and_jax_goes_on(call, error, text) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
    assert "`jaxfp8." in str(caught.value)
    close(jax.jit(jaxfp8.matmul)(X, QW), X @ DW)


def test_fp8_values_have_no_gradient_and_no_nan() -> None:
    grad = jax.grad(lambda q: jnp.sum(jaxfp8.matmul(1e4 * X, q)))(QW)
    assert not grad.qvalue.astype(jnp.float32).any()
    close(grad.scale[0], jnp.sum(1e4 * X, 0) @ QW.qvalue.astype(jnp.float32))


def gradients(dtype, function, *small):
    """Those with respect to arrays of `dtype`, and of the same numbers in float32."""
    narrow = [jnp.asarray(x).astype(dtype) for x in small]
    of = jax.grad(function, argnums=tuple(range(len(small))))
    return of(*narrow), of(*(x.astype(jnp.float32) for x in narrow))


def assert_rounded_once(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        np.testing.assert_allclose(g.astype(jnp.float32), w, rtol=2**-7)


ROWS = 8192


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("dtype", "factor"), [(jnp.bfloat16, 1e5), (jnp.float16, 1e-8)])
def test_gradients_of_a_narrow_bias_and_residual_are_summed_in_float32(dtype, activation, factor):
    x = jnp.ones((ROWS, 16))
    w = jaxfp8.quantize(jnp.ones((16, 4)), channelwise_axes=(1,))

    def loss(bias, residual):
        y = jaxfp8.matmul(x, w, bias=bias, residual=residual, activation=activation)
        return (y * factor).sum()

    got, want = gradients(dtype, loss, np.ones(4), np.ones((1, 4)))
    assert_rounded_once(got, want, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_scales_are_summed_in_float32(dtype):
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-9, 100, (64, ROWS)), jnp.int8)
    zeros = jnp.asarray(rng.integers(-9, 0, (1, ROWS)), jnp.int8)
    x = jnp.ones((2, 64))

    def of_one(scale):
        y = jaxfp8.matmul(x, jaxfp8.QArray(codes, scale, zeros))
        return y.astype(jnp.float32).sum() / ROWS

    def of_each(scale):
        def one(zero):
            return jaxfp8.matmul(x, jaxfp8.QArray(codes[:, :8], scale, zero)).astype(jnp.float32)

        return jax.vmap(one)(zeros.reshape(-1, 1, 8)).sum() / ROWS

    for function, shape in ((of_one, ()), (of_one, (1, 1)), (of_each, (1, 8))):
        got, want = gradients(dtype, function, np.full(shape, 0.5))
        assert_rounded_once(got, want, dtype)
