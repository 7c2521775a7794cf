"""A rewritten function under `vmap`, as one primitive with a derivative rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rewrite.support import F32, Data

import jaxfp8

DATA = Data()
X, Q, SCALE = DATA.normal(3, 4, 16), DATA.bits8(16, 8), DATA.scale(8)


def product(x: Any) -> Any:
    return x @ (Q.astype(F32) * SCALE)


def test_an_output_of_nothing_that_is_mapped_is_not_mapped() -> None:
    f = jaxfp8.rewrite(lambda x, y: (product(x), product(y)))
    y = X[0]

    def value_and_tangent(x: Any, t: Any) -> Any:
        return jax.jvp(lambda x: f(x, y), (x,), (t,))[0]

    for of in (f, lambda x, y: value_and_tangent(x, x)):
        mapped, alone = jax.jit(jax.vmap(of, in_axes=(0, None), out_axes=(0, None)))(X, y)
        np.testing.assert_allclose(mapped, product(X), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(alone, product(y), rtol=1e-4, atol=1e-4)


def test_derivative_of_a_mapped_function_leaves_out_what_does_not_move() -> None:
    f = jax.vmap(jaxfp8.rewrite(lambda x, y: product(x) * product(y)), in_axes=(0, None))
    got = jax.jit(jax.grad(lambda x: f(x, X[0]).sum()))(X)
    want = jax.grad(lambda x: (product(x) * product(X[0])).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_sum_over_a_mapped_axis_of_what_is_not_mapped() -> None:
    f = jaxfp8.rewrite(lambda x: jax.lax.psum(product(x), "i"))
    of_index = jax.vmap(lambda i: f(X[0]) + i, axis_name="i", axis_size=3)
    got = jax.jit(of_index)(jnp.zeros(3))
    want = jnp.broadcast_to(3 * product(X[0]), got.shape)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
