"""Cotangents of one array in two dtypes are an error that names them, as in JAX outside a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rewrite.support import E4M3, F32

import jaxfp8


@jax.custom_vjp
def linear(x: Any, w: Any) -> Any:
    """A product whose rule gives FP8 weights a float32 cotangent."""
    return x @ w.astype(F32)


linear.defvjp(
    lambda x, w: (linear(x, w), (x, w)),
    lambda kept, ct: (ct @ kept[1].astype(F32).T, kept[0].T @ ct),
)


def both(first: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: first(x, w).sum() + (x @ w.astype(F32)).sum()


FORMS = {
    "gradient of a rewrite": jax.grad(jaxfp8.rewrite(both(linear))),
    "rewrite of a gradient": jaxfp8.rewrite(jax.grad(both(linear))),
    "explain": jaxfp8.explain(jax.grad(both(linear))),
    "rewrite in a rewrite": jax.grad(jaxfp8.rewrite(both(jaxfp8.rewrite(linear)))),
    "quantize_dots": jax.grad(jaxfp8.quantize_dots(both(linear), jaxfp8.FP8_W8A16)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_cotangents_of_two_dtypes_are_named(form: Callable[..., Any]) -> None:
    text = (
        r"cotangents of one array of shape \(16, 8\) are float\w+ and float\w+, but JAX adds "
        r"cotangents of one dtype only; have the `custom_vjp` return"
    )
    with pytest.raises(TypeError, match=text):
        form(jnp.ones((16, 8), E4M3), jnp.ones((4, 16)))


def test_an_assertion_of_the_function_stays() -> None:
    def refuses(x: Any) -> Any:
        raise AssertionError("of the user")

    with pytest.raises(AssertionError, match="of the user"):
        jaxfp8.rewrite(refuses)(jnp.ones(3))
