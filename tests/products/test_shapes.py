"""Shapes of `matmul`, `einsum` and `dot_general` are those of NumPy and JAX."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from products.samples import DW, QW, RNG, X, close

import jaxfp8


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
