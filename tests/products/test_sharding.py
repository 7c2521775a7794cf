"""Products inside `shard_map` and on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from products.samples import BIAS, DW, QW, X, close

import jaxfp8
from jaxfp8 import QArray


class TestShardMap:
    """Inside shard_map, with its check of what varies along the mesh."""

    @staticmethod
    def on_shards(function, in_specs, out_specs):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    def test_product(self) -> None:
        x = jnp.concatenate([X, X, X])[:8]
        rows = jax.P("d")
        close(self.on_shards(lambda x: jaxfp8.matmul(x, QW), rows, rows)(x), x @ DW)

    def test_gradients(self) -> None:
        x = jnp.concatenate([X, X, X])[:8]
        rows = jax.P("d")

        def loss(x, scale):
            y = jaxfp8.matmul(x, QArray(QW.qvalue, scale), bias=BIAS, activation="silu")
            return jax.lax.psum(jnp.sum(y), "d")

        def plain(x, scale):
            return jnp.sum(jax.nn.silu(x @ (QW.qvalue.astype(jnp.float32) * scale) + BIAS))

        sharded = self.on_shards(loss, (rows, jax.P()), jax.P())
        for got, want in zip(
            jax.grad(sharded, (0, 1))(x, QW.scale),
            jax.grad(plain, (0, 1))(x, QW.scale),
            strict=True,
        ):
            close(got, want)

    def test_carry_of_a_scan(self) -> None:
        q = jaxfp8.quantize(jnp.eye(24))

        def loop(x):
            return jax.lax.scan(lambda c, _: (jaxfp8.matmul(c, q), None), x, None, length=3)[0]

        x = jnp.concatenate([X, X, X])[:8]
        close(self.on_shards(loop, jax.P("d"), jax.P("d"))(x), x)


class TestMesh:
    @pytest.mark.parametrize("spec", [("x", None), (None, "y"), ("x", "y")])
    @pytest.mark.parametrize("weight_spec", [(None, "y"), ("x", None), ("y", "x")])
    def test_plain_jit_on_sharded_operands_is_right(self, spec, weight_spec) -> None:
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def put(array, spec):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            return jax.device_put(array, sharding)

        q = QArray(put(QW.qvalue, weight_spec), put(QW.scale, (None, weight_spec[1])))
        close(jax.jit(jaxfp8.matmul)(put(X[:4], spec), q), X[:4] @ DW)
