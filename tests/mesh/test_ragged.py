"""Groups on a mesh: automatic and manual axes as they are split, explicit ones gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8
from jaxfp8._call.library import strictness

pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")

SIZES = jnp.array([3, 4], jnp.int32)
X = jaxfp8.quantize(jax.random.normal(jax.random.key(0), (8, 16)), channelwise_axes=(0,))
W = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (2, 16, 4)), channelwise_axes=(0, 2))
SPLITS = {"rows": (P("a"), P()), "groups": (P(), P("a")), "columns": (P(), P(None, None, "a"))}
# Groups along the contracted axis.
DY = jaxfp8.quantize(jax.random.normal(jax.random.key(2), (8, 6)), channelwise_axes=(1,))
ALONG_K = {"contracted": (P("a"), P("a")), "rows": (P(None, "a"), P())}


def mesh(kind):
    return jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])


def on(mesh, q, spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), q)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_split_operands_give_the_same(split, kind):
    two, (of_x, of_w) = mesh(kind), SPLITS[split]
    with jax.set_mesh(two):
        y = jax.jit(jaxfp8.ragged_dot)(on(two, X, of_x), on(two, W, of_w), SIZES)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jaxfp8.ragged_dot(X, W, SIZES)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", ALONG_K)
def test_groups_along_a_split_axis_give_the_same(split, kind):
    two, (of_x, of_dy) = mesh(kind), ALONG_K[split]
    x = jaxfp8.QArray(X.qvalue, jnp.float32(0.5))

    def product(x, dy):
        return jaxfp8.ragged_dot(x.T, dy, SIZES)

    with jax.set_mesh(two):
        values = on(two, x.qvalue, of_x)
        dy = jaxfp8.QArray(on(two, DY.qvalue, of_dy), on(two, DY.scale, P()))
        y = jax.jit(product)(jaxfp8.QArray(values, x.scale), dy)
    np.testing.assert_allclose(np.asarray(y), np.asarray(product(x, DY)), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("change", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_explicit_axes_need_no_mesh_in_context(change):
    two = mesh(AxisType.Explicit)
    y = change(jaxfp8.ragged_dot)(on(two, X, P("a")), W, SIZES)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jaxfp8.ragged_dot(X, W, SIZES)))


def test_columns_may_be_split_by_hand():
    def local(values, scale):
        return jaxfp8.ragged_dot(X, jaxfp8.QArray(values, scale), SIZES)

    columns = P(None, None, "a")
    call = jax.shard_map(
        local, mesh=mesh(AxisType.Auto), in_specs=(columns, columns), out_specs=P(None, "a")
    )
    y = jax.jit(call)(W.qvalue, W.scale)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jaxfp8.ragged_dot(X, W, SIZES)))


def test_gathering_is_told(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    two = mesh(AxisType.Explicit)
    with jax.set_mesh(two), pytest.warns(jaxfp8.FallbackWarning, match="are not split along"):
        jaxfp8.ragged_dot(on(two, X, P("a")), on(two, W, P()), SIZES)
