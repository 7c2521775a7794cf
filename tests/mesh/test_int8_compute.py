"""`compute="int8"` on a mesh: the numbers of one device, and no more sent than by any product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mesh.traffic import sent

import jaxfp8

X = jax.random.normal(jax.random.key(0), (8, 64))
W = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (64, 32)), channelwise_axes=(1,))
SPLITS = {
    "rows": (("d", None), (None, None)),
    "columns": ((None, None), (None, "d")),
    "contracted": ((None, "d"), ("d", None)),
    "rows and contracted": (("m", "d"), ("d", None)),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_lines_are_those_of_the_whole_operands(split, kind):
    (x_split, w_split), mesh = split, jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind, kind))

    def product(x, w):
        sharding = PartitionSpec(x_split[0], w_split[1]) if kind is AxisType.Explicit else None
        return jaxfp8.matmul(x, w, compute="int8", out_sharding=sharding)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.set_mesh(mesh):
        codes, scale = put(W.qvalue, *w_split), put(W.scale, None, w_split[1])
        x, w = put(X, *x_split), jaxfp8.QArray(codes, scale)
        got = jax.jit(product)(x, w)
        np.testing.assert_allclose(got, jaxfp8.matmul(X, W, compute="int8"), rtol=1e-5, atol=1e-5)
        kinds = {one.kind for one in sent(product, x, w)}
        assert kinds <= ({"all-reduce"} if "d" in w_split[:1] else set())
        gradient = jax.jit(jax.grad(lambda x: product(x, w).sum()))(x)
    want = jnp.ones((8, 32)) @ jaxfp8.dequantize(W).T
    np.testing.assert_allclose(jax.device_get(gradient), want, rtol=1e-4, atol=1e-5)
