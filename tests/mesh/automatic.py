"""Meshes of automatic axes, and a product to split over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8

P = PartitionSpec
AUTO = jax.sharding.AxisType.Auto
MATRIX = (((1,), (0,)), ((), ()))


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, tuple("xyz"[: len(sizes)]), axis_types=(AUTO,) * len(sizes))


def put(array, *spec, mesh=None):
    return jax.device_put(array, NamedSharding(mesh or mesh_of(2, 2), P(*spec)))


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


X = normal(8, 256)
W = normal(256, 64, seed=1)
QW = jaxfp8.quantize(W, channelwise_axes=(1,))
