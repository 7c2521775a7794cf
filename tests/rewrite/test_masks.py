"""Zeros put over dequantized values by a mask that is data: derivatives, batches, and the guard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import F32, Data, count, relative_l2, specs

import jaxfp8

SHAPES = {"one scale": (), "by column": (24,), "along k": (32, 1)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def masked(x: Any, q: Any, s: Any, keep: Any) -> Any:
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


def _args(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    data = Data()
    keep = data.normal(32, 24) > 0
    return data.normal(5, 32), data.bits8(32, 24), data.scale(*shape), keep.at[:, 3].set(False)


@shapes
def test_gradient_is_that_of_the_function(shape: tuple[int, ...]) -> None:
    x, q, s, keep = _args(shape)

    def gradients(fun: Any) -> Any:
        return jax.grad(lambda x, s: (fun(x, q, s, keep) ** 2).sum(), (0, 1))(x, s)

    for got, want in zip(gradients(jaxfp8.rewrite(masked)), gradients(masked), strict=True):
        assert relative_l2(got, np.asarray(want)) < 1e-6


@shapes
def test_batch_of_masks_is_captured(shape: tuple[int, ...]) -> None:
    x, q, s, keep = _args(shape)
    keeps = jnp.stack([keep, ~keep, keep & False])
    f = jax.vmap(masked, (None, None, None, 0))
    assert count(jaxfp8.rewrite(f, strict=True), x, q, s, keeps) == 1
    got, want = jaxfp8.rewrite(f)(x, q, s, keeps), f(x, q, s, keeps)
    assert relative_l2(got, np.asarray(want)) < 1e-6
    got = jax.vmap(jaxfp8.rewrite(masked), (None, None, None, 0))(x, q, s, keeps)
    assert relative_l2(got, np.asarray(want)) < 1e-6


def test_tiles_are_cut_where_that_keeps_them_few() -> None:
    (spec,) = specs(jaxfp8.rewrite(masked), *_args(()))
    assert spec.rhs.tiles == (32, 1)


@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_scales_that_cannot_be_cut_are_asked_whether_they_are_finite(bad: float | None) -> None:
    x, q, s, keep = _args((32, 1))
    s = s if bad is None else s.at[4].set(bad)
    (spec,) = specs(jaxfp8.rewrite(masked), x, q, s, keep)
    assert spec.rhs.tiles == (1, 24)
    assert count(jaxfp8.rewrite(masked), x, q, s, keep, name="cond") == 1
    got, want = jaxfp8.rewrite(masked)(x, q, s, keep), masked(x, q, s, keep)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
