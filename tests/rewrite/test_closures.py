"""Weights that an inner function closes over are found as arguments are; so is every miss there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewrite.support import F32, Data, left_alone

import jaxfp8

DATA = Data()
Q, S = DATA.bits8(32, 32), DATA.scale(1, 32) / 16
NUMPY = np.asarray(Q)


def product(x: Any, q: Any = Q, s: Any = S) -> Any:
    return x @ (jnp.asarray(q).astype(x.dtype) * s)


class Layer:
    def __init__(self) -> None:
        self.q, self.s = Q, S

    @functools.partial(jax.jit, static_argnums=0)
    def forward(self, x: Any) -> Any:
        return product(x, self.q, self.s)


@jax.custom_jvp
def custom(x: Any) -> Any:
    return product(x)


custom.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))

_inner = jax.jit(lambda x: product(x))


def _loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, _inner(c[1])), (0, x))[1]


def _sum(x: Any) -> Any:
    return jnp.sum(_inner(x) ** 2)


CLOSURES: dict[str, tuple[Callable[..., Any], int]] = {
    "jit": (_inner, 1),
    "jit inside": (lambda x: _inner(x) + 1, 1),
    "method": (Layer().forward, 1),
    "scale is an argument": (lambda x: jax.jit(lambda x, s: product(x, Q, s))(x, S), 1),
    "data is an argument": (lambda x: jax.jit(lambda x, q: product(x, q, S))(x, Q), 1),
    "numpy": (jax.jit(lambda x: product(x, NUMPY, np.asarray(S))), 1),
    "jit in jit": (jax.jit(lambda x: jax.jit(_inner)(x)), 1),
    "grad": (jax.grad(_sum), 2),
    "jit of grad": (jax.jit(jax.grad(_sum)), 2),
    "scan": (jax.jit(lambda x: lax.scan(lambda c, _: (_inner(c), None), x, None, 2)[0]), 1),
    "cond": (jax.jit(lambda x: lax.cond(x[0, 0] > -9, _inner, lambda x: x, x)), 1),
    "while": (jax.jit(_loop), 1),
    "remat": (jax.jit(jax.checkpoint(lambda x: product(x))), 1),
    "custom_jvp": (jax.jit(custom), 1),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closed_over_weight_is_captured(name: str) -> None:
    fun, number = CLOSURES[name]
    x = DATA.normal(4, 32)
    report = jaxfp8.explain(fun)(x)
    assert (len(report.matched), len(report.missed), report.others) == (number, 0, 0)
    got = jaxfp8.rewrite(fun, strict=True)(x)
    np.testing.assert_allclose(got, fun(x), rtol=1e-4, atol=1e-4)


def test_gradient_of_a_rewritten_closure_is_that_of_the_function() -> None:
    x = DATA.normal(4, 32)
    got = jax.grad(jaxfp8.rewrite(_sum))(x)
    np.testing.assert_allclose(got, jax.grad(_sum)(x), rtol=1e-4, atol=1e-4)


def _missed(fun: Callable[..., Any], *args: Any) -> Any:
    """The one missed row of a function, which strict refuses."""
    report = jaxfp8.explain(fun)(*args)
    assert (len(report.sites), len(report.missed)) == (1, 1)
    with pytest.raises(ValueError, match="strict, but 1 of 1 8-bit dots"):
        jaxfp8.rewrite(fun, strict=True)(*args)
    return report.missed[0]


def test_miss_on_a_closed_over_weight_is_reported() -> None:
    fun = jax.jit(lambda x: x @ jnp.tanh(Q.astype(F32) * S))
    assert "`tanh`" in _missed(fun, DATA.normal(4, 32)).reason


def test_dot_in_the_condition_of_a_while_is_missed() -> None:
    def f(x: Any) -> Any:
        def condition(c: Any) -> Any:
            return (jnp.sum(product(c[1])) < 3) & (c[0] < 2)

        return lax.while_loop(condition, lambda c: (c[0] + 1, c[1]), (0, x))

    assert "condition of a `while`" in _missed(f, DATA.normal(4, 32)).reason


# Mutable arrays


@left_alone
def test_ref_as_an_argument_is_written_as_without_rewrite() -> None:
    def f(r: Any, x: Any) -> Any:
        r[...] = r[...] + product(x)
        return x

    x, r = DATA.normal(4, 32), jax.new_ref(jnp.zeros((4, 32)))
    assert "mutable array" in _missed(f, r, x).reason
    jaxfp8.rewrite(f)(r, x)
    np.testing.assert_allclose(r[...], product(x), rtol=1e-5, atol=1e-5)


@left_alone
def test_ref_that_is_closed_over_is_written_as_without_rewrite() -> None:
    x, r = DATA.normal(4, 32), jax.new_ref(jnp.zeros((4, 32)))

    def f(x: Any) -> Any:
        r[...] = r[...] + product(x)
        return x

    rewritten = jaxfp8.rewrite(f)
    rewritten(x), rewritten(x)
    np.testing.assert_allclose(r[...], 2 * product(x), rtol=1e-5, atol=1e-5)


@left_alone
def test_ref_made_and_frozen_inside_works_under_jit_too() -> None:
    def f(x: Any) -> Any:
        r = jax.new_ref(x)
        r[...] = product(r[...])
        return jax.freeze(r)

    x = DATA.normal(4, 32)
    for fun in (jaxfp8.rewrite(f), jax.jit(jaxfp8.rewrite(f)), jaxfp8.rewrite(jax.jit(f))):
        np.testing.assert_allclose(fun(x), product(x), rtol=1e-5, atol=1e-5)
