"""Products under jit, vmap, grad and other transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from products.samples import BIAS, DW, QW, RNG, X, close

import jaxfp8
from jaxfp8 import QArray


class TestTransformations:
    def test_gradients_agree_with_the_dequantized_product(self) -> None:
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
        got = jax.vmap(
            lambda x: jaxfp8.matmul(x, QW, preferred_element_type=jnp.int8, out_scale=0.5)
        )(x)
        close(jaxfp8.dequantize(got), x @ DW, 0.02)

    def test_without_jit(self) -> None:
        with jax.disable_jit():
            close(jaxfp8.matmul(X, QW), X @ DW)

    def test_export(self) -> None:
        exported = jax.export.export(
            jax.jit(jaxfp8.matmul), disabled_checks=jaxfp8.ffi.export_checks()
        )(X, QW)
        close(exported.call(X, QW), X @ DW)
