"""Zero points that are known only when the program runs: right whatever they turn out to be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from rewrite.support import F32, Data, count, left_alone

import jaxfp8

INT32 = jnp.int32


def model(x: Any, q: Any, z: Any, s: Any) -> Any:
    return jax.nn.relu(x @ ((q.astype(INT32) - z).astype(F32) * s))


def _args(zero: int) -> tuple[Any, ...]:
    data = Data()
    z = jnp.arange(24, dtype=INT32).at[5].set(zero)
    return data.normal(5, 32), data.bits8(32, 24, dtype=jnp.int8), z, data.scale(24)


def _close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * float(np.max(np.abs(w))))


ZEROS = [3, -(2**15), 2**15, 70_000, 2**31 - 1, -(2**31)]
zeros = pytest.mark.parametrize("zero", ZEROS)


@zeros
def test_product_is_that_of_the_function(zero: int) -> None:
    args = _args(zero)
    assert count(jaxfp8.rewrite(model), *args) == 1
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


@zeros
def test_gradient_is_that_of_the_function(zero: int) -> None:
    args = _args(zero)

    def loss(fun: Any) -> Any:
        return jax.grad(lambda x, s: jnp.sum(jnp.sin(fun(x, args[1], args[2], s) * 1e-3)), (0, 1))

    _close(loss(jaxfp8.rewrite(model))(args[0], args[3]), loss(model)(args[0], args[3]))


def test_batch_of_zero_points_is_asked_one_by_one() -> None:
    x, q, _, s = _args(0)
    many = jnp.stack([_args(zero)[2] for zero in ZEROS])
    mapped = [jax.vmap(f, (None, None, 0, None)) for f in (jaxfp8.rewrite(model), model)]
    _close(*(f(x, q, many, s) for f in mapped))


def test_zero_points_of_layers_are_asked_inside_a_scan() -> None:
    def layers(x: Any, q: Any, z: Any, s: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(model(x, *w)), None), x, (q, z, s))[0]

    data = Data()
    q, s = data.bits8(3, 32, 32, dtype=jnp.int8), data.scale(3, 32) * 0.001
    z = jnp.asarray([[3], [80_000], [-7]], INT32) * jnp.ones((3, 32), INT32)
    args = data.normal(5, 32), q, z, s
    assert count(jaxfp8.rewrite(layers), *args) == 1
    _close(jaxfp8.rewrite(layers)(*args), jax.jit(layers)(*args))


def test_wide_array_is_not_made_where_zero_points_are_small() -> None:
    text = str(jax.make_jaxpr(jaxfp8.rewrite(model))(*_args(3)))
    before, _, branches = text.partition("cond[")
    assert "f32[32,24]" not in before
    assert "f32[32,24]" in branches


@pytest.mark.parametrize(
    ("bound", "zero"),
    [(lambda z: jnp.minimum(z, 100), -(2**31)), (lambda z: jnp.maximum(z, -100), 2**31 - 1)],
    ids=["above", "below"],
)
def test_zero_points_that_are_bounded_on_one_side_are_asked(bound: Any, zero: int) -> None:
    def bounded(x: Any, q: Any, z: Any, s: Any) -> Any:
        return model(x, q, bound(z), s)

    args = _args(zero)
    assert "cond[" in str(jax.make_jaxpr(jaxfp8.rewrite(bounded))(*args))
    _close(jaxfp8.rewrite(bounded)(*args), jax.jit(bounded)(*args))


@pytest.mark.parametrize("value", [np.nan, 0.5, 300.0])
def test_computed_float_zero_point_that_is_nan_gives_nan(value: float) -> None:
    def model(x: Any, q: Any, m: Any, s: Any) -> Any:
        return x @ ((q.astype(F32) - jnp.clip(jnp.round(m / s), -128, 127)) * s)

    x, q, _, s = _args(0)
    m = jnp.ones(24).at[7].set(value)
    assert count(jaxfp8.rewrite(model), x, q, m, s) == 1
    got, want = jaxfp8.rewrite(model)(x, q, m, s), jax.jit(model)(x, q, m, s)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


def test_float_argument_is_no_zero_point() -> None:
    x, q, _, s = _args(0)
    report = jaxfp8.explain(lambda x, q, z: x @ (q.astype(F32) - z))(x, q, s)
    assert "not known to be whole numbers" in report.missed[0].reason


@left_alone
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16])
def test_a_zero_point_that_a_narrow_float_changes_is_changed(dtype: Any) -> None:
    x, q, *_ = _args(0)
    zero = jnp.full((1, 24), 500, jnp.int16)

    def f(x, z):
        z = jnp.clip(z, -1000, 1000).astype(dtype).astype(jnp.float32)
        return x @ (q.astype(F32) - z)

    got, want = jaxfp8.rewrite(f)(x, zero), f(x, zero)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


@left_alone
@pytest.mark.parametrize("before", [True, False], ids=["sent wide", "sent in 8 bits"])
def test_devices_that_disagree_about_a_zero_point_do_not_wait_for_each_other(
    before: bool,
) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))

    def local(x, w, z):
        if before:
            wide = (w.astype(jnp.int32) - z).astype(jnp.float32)
            return x @ lax.all_gather(wide, "d", axis=1, tiled=True)
        whole = lax.all_gather(w, "d", axis=1, tiled=True)
        return x @ (whole.astype(jnp.int32) - z).astype(jnp.float32)

    rows, columns = PartitionSpec("d"), PartitionSpec(None, "d")
    f = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), columns, rows), out_specs=rows)
    _, q, *_ = _args(0)
    args = (jnp.ones((8, 32)), q, jnp.array([[0], [0], [0], [40000]], jnp.int32))
    np.testing.assert_allclose(jax.jit(jaxfp8.rewrite(f))(*args), jax.jit(f)(*args), rtol=1e-5)
