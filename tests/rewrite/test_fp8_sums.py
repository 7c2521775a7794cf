"""A dot whose output dtype is FP8: float32 sums, and one cast, which does not saturate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewrite.support import E4M3, E5M2, F32, Data, count

import jaxfp8

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("lhs", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rhs", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out", DTYPES.values(), ids=DTYPES)
@pytest.mark.same_bits
def test_sums_are_rounded_once_to_the_nearest_code(lhs: Any, rhs: Any, out: Any) -> None:
    data = Data()
    x, w = data.bits8(33, 64, dtype=lhs), data.bits8(64, 48, dtype=rhs)
    f = jaxfp8.rewrite(lambda x, w: lax.dot(x, w, preferred_element_type=out), strict=True)
    assert count(f, x, w) == 1
    exact = (_wide(x) @ _wide(w)).astype(np.float32)  # 64 products of 8 bits are exact, or nearly
    assert np.mean(_wide(f(x, w)) != _wide(exact.astype(out))) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sum_beyond_the_range_is_what_the_function_makes_of_it(dtype: Any) -> None:
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([[largest, 0], [-largest, 0], [1, 0], [np.nan, 1]], dtype)
    w = jnp.asarray([[1, 1.5, 2], [0, 0, 0]], dtype)

    def f(x: Any, w: Any) -> Any:
        return lax.dot(x, w, preferred_element_type=dtype)

    assert count(jaxfp8.rewrite(f), x, w) == 1
    np.testing.assert_array_equal(_wide(jaxfp8.rewrite(f)(x, w)), _wide(jax.jit(f)(x, w)))


@pytest.mark.same_bits
def test_step_behind_the_cast_is_not_taken_before_it() -> None:
    def f(x: Any, w: Any) -> Any:
        y = lax.dot(x, w, preferred_element_type=E4M3)
        return jax.nn.relu(y.astype(F32) * 0.3 + 1.0)

    data = Data()
    x, w = data.bits8(5, 32), data.bits8(32, 24)
    (site,) = jaxfp8.explain(f)(x, w).matched
    assert site.epilogue == "-> float32"
    codes = (_wide(x) @ _wide(w)).astype(np.float32).astype(E4M3)
    want = np.maximum(codes.astype(np.float32) * np.float32(0.3) + 1, 0)
    np.testing.assert_allclose(jaxfp8.rewrite(f)(x, w), want, rtol=1e-6)
