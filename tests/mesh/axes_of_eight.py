"""Sums over one of several axes that are left to XLA, on eight and on six devices."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.traffic import sent

import jaxfp8

jax.config.update("jax_num_cpu_devices", 8)

X = jax.random.normal(jax.random.key(0), (48, 72))
Q = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (72, 96)), channelwise_axes=(1,))


def check(sizes, manual, x_spec, w_spec):
    """That the product is right and is summed over devices, with nothing gathered."""
    names = ("d", "m", "n")[-len(sizes) :]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))
    x = jax.device_put(X, NamedSharding(mesh, P(*x_spec)))
    q = jaxfp8.QArray(jax.device_put(Q.qvalue, NamedSharding(mesh, P(*w_spec))), Q.scale)
    function = jaxfp8.matmul
    if manual:
        specs = {"in_specs": (P(manual), P()), "out_specs": P(manual)}
        function = jax.shard_map(function, mesh=mesh, axis_names={manual}, **specs)
    y = jax.jit(function)(x, q)
    np.testing.assert_allclose(y, jaxfp8.matmul(X, Q), rtol=1e-4, atol=1e-4)
    assert [c.kind for c in sent(function, x, q)] == ["all-reduce"], (sizes, manual, x_spec, w_spec)


# The rows of the result are split by the last axis: XLA numbers devices along that one first.
check((2, 2, 2), "d", (("d", "n"), "m"), ("m", None))
check((2, 2, 2), "d", ("d", "n"), ("n", "m"))
check((2, 2, 2), "m", (("m", "n"), "d"), ("d", None))
check((2, 2, 2), "n", (("n", "m"), "d"), ("d", None))
check((2, 2, 2), "n", ("n", ("m", "d")), (("m", "d"), None))
check((3, 2), None, (None, "m"), ("m", "n"))
check((2, 3), None, (None, "m"), ("m", "n"))
check((2, 3), None, ("n", "m"), ("m", None))
check((3, 2), None, (None, ("n", "m")), (("n", "m"), None))
