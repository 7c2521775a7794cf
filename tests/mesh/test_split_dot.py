"""`split_dot` on a mesh: the numbers of one device, and terms that move as int8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mesh.traffic import sent

import jaxfp8

X = jax.random.normal(jax.random.key(0), (8, 64))
Y = jax.random.normal(jax.random.key(1), (64, 32))
SPLITS = {
    "rows": (("d", None), (None, None)),
    "columns": ((None, None), (None, "d")),
    "both": (("d", None), (None, "m")),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_free_axes_are_split_without_sending(split, kind):
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x, y = (
            jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
            for value, spec in zip((X, Y), split, strict=True)
        )
        got = jax.jit(jaxfp8.split_dot)(x, y)
        assert tuple(got.sharding.spec) == (split[0][0], split[1][1])
        np.testing.assert_array_equal(got, jaxfp8.split_dot(X, Y))
        assert not sent(jaxfp8.split_dot, x, y)


def test_a_contracted_axis_is_summed_over_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, PartitionSpec(None, "d"))
        y = jax.device_put(Y, PartitionSpec("d", None))

        def product(x, y):
            return jaxfp8.split_dot(x, y, out_sharding=PartitionSpec(None, None))

        np.testing.assert_array_equal(jax.jit(product)(x, y), jaxfp8.split_dot(X, Y))
        kinds = {one.kind for one in sent(product, x, y)}
        assert kinds == {"all-reduce"}

        def loss(x, y):
            return jnp.sum(product(x, y) ** 2)

        for got, like in zip(jax.grad(loss, (0, 1))(x, y), (x, y), strict=True):
            assert jax.typeof(got).sharding == jax.typeof(like).sharding


def test_a_gradient_whose_operands_are_split_along_one_axis():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, PartitionSpec("a", "b"))
        y = jax.device_put(Y, PartitionSpec("b", None))

        def loss(dot, y):
            return jnp.sum(jnp.sin(dot(x, y, out_sharding=PartitionSpec("a", "b"))))

        def floats(x, y, out_sharding):
            numbers = (((1,), (0,)), ((), ()))
            return jax.lax.dot_general(x, y, numbers, "highest", out_sharding=out_sharding)

        got, want = (
            jax.jit(jax.grad(loss, 1), static_argnums=0)(dot, y)
            for dot in (jaxfp8.split_dot, floats)
        )
        assert jax.typeof(got).sharding == jax.typeof(y).sharding
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
