"""Scales that are known when the function is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from rewrite.scales import (
    arguments,
    close,
    exact,
)
from rewrite.support import F32, Data, count, left_alone

import jaxfp8


@left_alone
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("calls", [1, 0], ids=["known", "by device"])
def test_an_index_inside_shard_map_is_known_unless_it_depends_on_the_device(
    calls: int, check_vma: bool
) -> None:
    def local(x: Any, q: Any, scale: Any) -> Any:
        index = jnp.arange(32) // 16
        if not calls:
            index = index * jax.lax.axis_index("a")
        return x @ (q.astype(F32) * scale[index])

    columns = PartitionSpec(None, "a")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    specs: Any = {"in_specs": (PartitionSpec(), columns, columns), "out_specs": columns}
    sharded = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    data = Data()
    args = data.normal(5, 32), data.bits8(32, 24), data.scale(2, 24)
    assert count(jaxfp8.rewrite(sharded), *args) == calls
    np.testing.assert_allclose(
        jax.jit(jaxfp8.rewrite(sharded))(*args), sharded(*args), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda: jnp.ones((32, 1), jnp.bfloat16) * jnp.bfloat16(1.6),
        lambda: jnp.full((32, 1), 1.6, jnp.bfloat16) / 3,
        lambda: 3 / jnp.full((32, 1), 1.6, jnp.bfloat16),
        lambda: (jnp.full((32, 1), 1.6) * 3).astype(jnp.bfloat16),
    ],
)
def test_scales_that_are_numbers_are_known_as_rounded(scale_of: Any) -> None:
    """Zeros put beside values need such scales."""

    def model(x: Any, q: Any) -> Any:
        wide = jnp.pad(q.astype(jnp.bfloat16) * scale_of(), ((0, 0), (0, 8)))
        return jax.lax.dot(x, wide, preferred_element_type=F32)

    x, q, _ = arguments()
    x = x.astype(jnp.bfloat16)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    want = exact(x, np.pad(np.asarray(q), ((0, 0), (0, 8))), scale_of())
    close(jaxfp8.rewrite(model)(x, q), want)


@pytest.mark.parametrize("how", ["jit", "directly"])
@pytest.mark.parametrize("number", [2, np.full((32, 1), 2, np.float32)])
def test_an_index_that_is_known_is_computed_whatever_guards_the_function(
    how: str, number: Any
) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        nans = jnp.isnan(jnp.zeros(32) / jnp.zeros(32))
        return x @ (q.astype(F32) * number * s[jnp.where(nans, jnp.arange(32) // 8, 0)])

    x, q, _ = arguments()
    s = Data().scale(4 * 24).reshape(4, 24)
    want = jax.jit(model)(x, q, s)
    rewritten = jaxfp8.rewrite(model)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        got = (jax.jit(rewritten) if how == "jit" else rewritten)(x, q, s)
    close(got, want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "scaled",
    [
        lambda wide: wide / jnp.zeros((32, 1)),
        lambda wide: wide * jnp.float32(np.inf) * 0.0,
        lambda wide: wide / 1e-39,
        lambda wide: wide * jnp.full((32, 1), 1e6).astype(jnp.float16).astype(F32),
    ],
)
def test_known_scales_warn_of_nothing(scaled: Any) -> None:
    def model(x: Any, q: Any) -> Any:
        return x @ scaled(q.astype(F32))

    x, q, _ = arguments()
    want = jax.jit(model)(x, q)
    np.testing.assert_array_equal(np.isfinite(jaxfp8.rewrite(model)(x, q)), np.isfinite(want))


def test_known_scales_ask_no_device_and_raise_nothing() -> None:
    def model(a: Any, q: Any, s: Any) -> Any:
        unused = jnp.zeros((5, 1), F32).astype(jnp.bfloat16) / jnp.bfloat16(0)
        wide = a.astype(jnp.bfloat16) * jnp.full((5, 1), 1.0039).astype(jnp.bfloat16)
        y = jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)
        return y + jnp.where(s > 0, 0, unused.astype(F32))

    data = Data()
    args = data.bits8(5, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8), jnp.ones((5, 1))
    want = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        got = jax.jit(jaxfp8.rewrite(model))(*args)
    close(got, want)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_constants_of_no_size_are_left(shape: tuple[int, ...]) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        return x @ (q.astype(F32) * s), (jnp.full(shape, 1.3) * 2).astype(jnp.bfloat16)

    args = arguments()
    assert count(jaxfp8.rewrite(model), *args) == 1
    assert jaxfp8.rewrite(model)(*args)[1].shape == shape
