"""Ways to get a wrong number out of the rewrite that were found by trying; each is closed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from rewrite.support import left_alone

import jaxfp8
import jaxfp8.testing

KEYS = jax.random.split(jax.random.key(0), 4)
CODES = jax.random.randint(KEYS[0], (64, 32), -128, 128).astype(jnp.int8)
X = jax.random.normal(KEYS[1], (8, 64))
SCALE = jax.random.uniform(KEYS[2], (1, 32))
DIRECTION = jax.random.normal(KEYS[3], (8, 64))


def close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(b))))


def stopped(s):
    return lax.stop_gradient(CODES.astype(jnp.float32) * s)


@jax.custom_jvp
def bent(s):
    return CODES.astype(jnp.float32) * s


bent.defjvp(lambda p, d: (bent(*p), 0.5 * d[0] * CODES.astype(jnp.float32)))


@jax.custom_vjp
def bent_back(s):
    return CODES.astype(jnp.float32) * s


def _bent_back(_, cotangent):
    return (0.5 * jnp.sum(cotangent * CODES.astype(jnp.float32), 0, keepdims=True),)


bent_back.defvjp(lambda s: (bent_back(s), None), _bent_back)


def curvature(loss):
    """A Hessian-vector product, in the activations and in the scales."""
    along = lambda x, s: jnp.vdot(jax.grad(loss)(x, s), DIRECTION)  # noqa: E731
    return jax.grad(along, (0, 1))(X, SCALE)


@pytest.mark.parametrize("weight", [stopped, bent, bent_back], ids=lambda w: w.__name__)
class TestGradientsThatAreCut:
    def loss(self, weight):
        return lambda x, s: jnp.sum((x @ weight(s)) ** 2)

    def test_the_first_derivative_is_that_of_the_function(self, weight):
        loss = self.loss(weight)
        got = jax.grad(jaxfp8.rewrite(loss), (0, 1))(X, SCALE)
        close(got, jax.grad(loss, (0, 1))(X, SCALE))

    def test_the_second_one_through_the_scales_is_that_of_the_function(self, weight):
        loss = self.loss(weight)
        close(curvature(jaxfp8.rewrite(loss)), curvature(loss))
        close(jaxfp8.rewrite(lambda: curvature(loss))(), curvature(loss))


def test_second_derivatives_beside_rules_of_other_data_are_right():
    loss = lambda x, s: jnp.sum((jax.nn.relu(x) @ (CODES.astype(jnp.float32) * s)) ** 2)  # noqa: E731
    close(curvature(jaxfp8.rewrite(loss)), curvature(loss))


@pytest.mark.parametrize(("start", "negative"), [(-70, True), (-3, False), (-3, True), (60, True)])
def test_scales_are_sliced_where_the_codes_are(start, negative):
    rows = jax.random.uniform(KEYS[3], (64, 1))

    def f(i):
        wide = CODES.astype(jnp.float32) * rows
        part = lax.dynamic_slice(wide, (i, 0), (16, 32), allow_negative_indices=negative)
        return X[:, :16] @ part

    jaxfp8.testing.assert_rewritten(f, jnp.int32(start))
    close(jaxfp8.rewrite(f)(jnp.int32(start)), f(jnp.int32(start)))


@pytest.mark.parametrize("layer", [-7, -5, -1, 2, 9])
def test_a_layer_has_its_own_scales_whatever_the_index(layer):
    stack = jnp.stack([CODES, CODES + 1, CODES + 2, CODES + 3])
    scales = jax.random.uniform(KEYS[2], (4, 1, 32))

    def f(i):
        wide = stack.astype(jnp.float32) * scales
        return X @ lax.dynamic_index_in_dim(wide, i, keepdims=False)

    close(jaxfp8.rewrite(f)(jnp.int32(layer)), f(jnp.int32(layer)))


@left_alone
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16])
def test_a_zero_point_that_a_narrow_float_changes_is_changed(dtype):
    zero = jnp.full((1, 32), 500, jnp.int16)

    def f(x, z):
        z = jnp.clip(z, -1000, 1000).astype(dtype).astype(jnp.float32)
        return x @ (CODES.astype(jnp.float32) - z)

    got, want = jaxfp8.rewrite(f)(X, zero), f(X, zero)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


@left_alone
@pytest.mark.parametrize("before", [True, False], ids=["sent wide", "sent in 8 bits"])
def test_devices_that_disagree_about_a_zero_point_do_not_wait_for_each_other(before):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))

    def local(x, w, z):
        if before:
            wide = (w.astype(jnp.int32) - z).astype(jnp.float32)
            return x @ lax.all_gather(wide, "d", axis=1, tiled=True)
        whole = lax.all_gather(w, "d", axis=1, tiled=True)
        return x @ (whole.astype(jnp.int32) - z).astype(jnp.float32)

    rows, columns = PartitionSpec("d"), PartitionSpec(None, "d")
    f = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), columns, rows), out_specs=rows)
    args = (jnp.ones((8, 64)), CODES, jnp.array([[0], [0], [0], [40000]], jnp.int32))
    np.testing.assert_allclose(jax.jit(jaxfp8.rewrite(f))(*args), jax.jit(f)(*args), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex64], ids=["float64", "complex64"])
def test_a_dtype_without_kernels_is_called_that(dtype):
    with jax.enable_x64(True):
        report = jaxfp8.explain(lambda x: x.astype(dtype) @ CODES.astype(dtype))(X)
    assert "is to a dtype that no kernel has" in report.missed[0].reason
    assert "use float32" in report.missed[0].remedy


def test_a_conversion_that_cuts_fractions_off_is_called_that():
    with jax.enable_x64(True):
        report = jaxfp8.explain(
            lambda x: x @ (CODES.astype(jnp.float32) * SCALE).astype(jnp.int64).astype(jnp.float32)
        )(X)
    assert "from float32 to int64 changes the values" in report.missed[0].reason


def test_picked_rows_stay_float32_where_float64_is_on():
    def model(i, x, q, scale):
        return x @ jnp.take(q.astype(jnp.float32) * scale, i, axis=0)

    with jax.enable_x64(True):
        q, scale = jnp.ones((32, 8), jnp.int8), jnp.ones((32, 1), jnp.float32)
        args = jnp.array([1, 5, 7]), jnp.ones((4, 3), jnp.float32), q, scale
        assert not jaxfp8.explain(model)(*args).missed
        assert jaxfp8.rewrite(model)(*args).dtype == jnp.float32
