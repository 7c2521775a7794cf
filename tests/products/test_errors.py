"""What products refuse, and how they say so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from products.samples import DW, QW, W, X, close

import jaxfp8
from jaxfp8 import QArray

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
        "8 bits alone",
        lambda: jaxfp8.matmul(X, QW, preferred_element_type=jnp.int8),
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
        "out_scale of 0",
        lambda: jaxfp8.matmul(X, QW, preferred_element_type=jnp.int8, out_scale=0.0),
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
