"""Programs for more devices than the suite has: sums on six and eight, bytes on 64."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.programs import BATCH, DIM, HIDDEN, KINDS, LAYOUTS, LENGTH, _float
from mesh.traffic import sent, total

import jaxfp8

jax.config.update("jax_num_cpu_devices", 64)

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


def types(mesh, layout, kind):
    """The types of the arguments of a product on a mesh; a scale lies as the values do."""
    w = jax.ShapeDtypeStruct((DIM, HIDDEN), "bfloat16")
    held = jax.eval_shape(KINDS[kind].hold, w) if kind else w
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, DIM), "bfloat16")

    def placed(leaf, spec):
        entries = [e if n > 1 else None for e, n in zip(spec, leaf.shape, strict=True)]
        sharding = NamedSharding(mesh, P(*entries))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return placed(x, layout.x), jax.tree.map(lambda leaf: placed(leaf, layout.w), held)


def check_bytes(name, kind, moving=None):
    """That a product, or its gradient, on 8 x 8 devices sends no more than that of floats."""
    layout, product = LAYOUTS[name], KINDS[kind].product
    mesh = jax.make_mesh((8, 8), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def program(product):
        whole = lambda x, w: product(x, w, layout.out)  # noqa: E731
        return whole if moving is None else jax.grad(lambda *a: (whole(*a) ** 2).sum(), moving)

    with jax.set_mesh(mesh):
        ours = total(sent(program(product), *types(mesh, layout, kind)))
        floats = total(sent(program(_float), *types(mesh, layout, None)))
    small = 4 * 8 * (BATCH * LENGTH + DIM + HIDDEN) * (1 if moving is None else 4)
    assert ours <= floats + small, (name, kind, ours, floats)
    return ours, floats


for name in ("fsdp and columns", "data and rows", "sequence to rows"):
    check_bytes(name, "e4m3 weight")
ours, floats = check_bytes("fsdp and columns", "current scaling", (0, 1))
assert ours < 0.8 * floats, (ours, floats)  # codes are gathered, and sums of gradients are floats
