"""Programs that leave XLA only some axes of a mesh, or the axes of several meshes.

Each sends no more than the same program of floats, and gives the numbers of one device.
"""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.traffic import run, sent, total

import jaxfp8

NUMBERS = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (256, 512), jnp.bfloat16) / 16
Q = jaxfp8.quantize(W, jnp.int8, channelwise_axes=(1,))
SMALL = 4 * (64 + 256 + 512)  # scales and amaxes


def automatic(*sizes):
    names = ("d", "m", "n")[: len(sizes)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def held(mesh, *spec):
    """The 8-bit weight on a mesh, with its scale beside its columns."""
    return jaxfp8.QArray(put(mesh, Q.qvalue, *spec), put(mesh, Q.scale, None, spec[1]))


def trained(x, w):
    return jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=jaxfp8.CurrentScaling())


def in_part(function, mesh):
    """The function over the axis d, with the other axes left to XLA."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
    )


def gradients(function, arrays):
    """Gradients that lie as the arguments do, so that all programs have to send the same."""
    gradient = jax.grad(lambda *args: jnp.sum(function(*args).astype(jnp.float32) ** 2), (0, 1))

    def constrained(*args):
        pairs = zip(gradient(*args), arrays, strict=True)
        return [jax.lax.with_sharding_constraint(g, a.sharding) for g, a in pairs]

    return constrained


def check(ours, plain, small=SMALL):
    """What a program gives; it sends no more than the one of floats. Both come with arguments."""
    given, bytes_sent = run(*ours)
    assert bytes_sent <= total(sent(*plain)) + small
    return given


def near(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-6 * np.abs(want).max())


LAYOUTS = {
    "columns": (("d", None), (None, "m")),
    "rows": (("d", "m"), ("m", None)),
    "rows of the left side": ((("d", "m"), None), (None, None)),
    "fsdp": ((("d", "m"), None), ("m", None)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
class TestShardMapOverSomeAxes:
    def test_a_product_sends_no_more_than_that_of_floats(self, layout):
        mesh, (of_x, of_w) = automatic(2, 2), LAYOUTS[layout]
        x, w = put(mesh, X, *of_x), put(mesh, W, *of_w)
        ours = in_part(jaxfp8.matmul, mesh), x, held(mesh, *of_w)
        near(check(ours, (in_part(jnp.matmul, mesh), x, w)), jaxfp8.matmul(X, Q))

    def test_gradients_of_training_send_no_more_than_those_of_floats(self, layout):
        mesh, (of_x, of_w) = automatic(2, 2), LAYOUTS[layout]
        # XLA:CPU aborts where a bfloat16 gradient is summed over a manual axis, in float code too.
        x, w = (a.astype(jnp.float32) for a in (X, W))
        args = put(mesh, x, *of_x), put(mesh, w, *of_w)
        ours, plain = (gradients(in_part(f, mesh), args) for f in (trained, jnp.matmul))
        given = check((ours, *args), (plain, *args), 4 * SMALL)
        for got, want in zip(given, _whole_gradients(), strict=True):
            near(got, want)


@functools.cache
def _whole_gradients():
    """Of rows that two devices scale by themselves, as the axis d of the mesh has them."""
    x, w = (a.astype(jnp.float32) for a in (X, W))

    def loss(x, w):
        halves = [trained(part, w).astype(jnp.float32) for part in jnp.split(x, 2)]
        return sum(jnp.sum(y**2) for y in halves)

    return jax.jit(jax.grad(loss, (0, 1)))(x, w)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mesh_of_both_kinds_splits_products_along_all_axes(layout):
    of_x, of_w = LAYOUTS[layout]
    with jax.set_mesh(
        jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
    ):
        mesh = jax.sharding.get_mesh()
        x, w, q = put(mesh, X, *of_x), put(mesh, W, *of_w), held(mesh, *of_w)
        y = check((jaxfp8.matmul, x, q), (jnp.matmul, x, w))
        assert jax.typeof(y).sharding.spec == P("d", None)
    near(y, jaxfp8.matmul(X, Q))


MESHES = {
    "rows and columns": (((2, 2), "d", None), ((4,), None, "d")),
    "contraction": (((4,), None, "d"), ((2, 2), ("d", "m"), None)),
    "fsdp": (((2, 2), ("d", "m"), None), ((4,), "d", None)),
}


@pytest.mark.parametrize("case", MESHES)
def test_arguments_on_several_meshes(case):
    (of_x, *x_spec), (of_w, *w_spec) = MESHES[case]
    x, mesh = put(automatic(*of_x), X, *x_spec), automatic(*of_w)
    ours = jaxfp8.matmul, x, held(mesh, *w_spec)
    near(check(ours, (jnp.matmul, x, put(mesh, W, *w_spec))), jaxfp8.matmul(X, Q))


def test_a_constraint_that_names_another_mesh():
    rows = NamedSharding(automatic(2, 2), P(("m", "d"), None))

    def after(product):
        return lambda x, w: product(jax.lax.with_sharding_constraint(jnp.tanh(x), rows), w)

    x = put(automatic(4), X, "d", None)
    given = check((after(jaxfp8.matmul), x, Q), (after(jnp.matmul), x, W))
    near(given, jaxfp8.matmul(jnp.tanh(X), Q))


def test_a_program_for_an_abstract_mesh_of_automatic_axes_splits_its_calls():
    abstract = AbstractMesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def shape(x, *spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(abstract, P(*spec)))

    types = shape(X, "d", None), jaxfp8.QArray(shape(Q.qvalue, None, "m"), shape(Q.scale))
    lowered = jax.jit(jaxfp8.matmul).trace(*types).lower(lowering_platforms=("cpu",))
    program = lowered.compile(device_assignment=tuple(jax.devices()))
    mesh = automatic(2, 2)
    args = (
        put(mesh, X, "d", None),
        jaxfp8.QArray(put(mesh, Q.qvalue, None, "m"), put(mesh, Q.scale, None, None)),
    )
    y = program(*args)
    assert "all-gather" not in program.as_text()
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d", "m")), 2)
    near(y, jaxfp8.matmul(X, Q))


# Six and eight devices: what XLA numbers in an order of its own, and axes of different primes. And
# bytes on 64.

TESTS = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_programs_for_more_devices_than_the_suite_has():
    """In a process of its own, since the number of devices is that of a process."""
    program = f"import sys; sys.path[:0] = [{str(TESTS)!r}]; from mesh import many_devices"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


# Shards of different sizes: XLA pads arrays whose axis the devices do not divide. JAX places no
# argument so, and explicit axes refuse it.

RAGGED = {
    "rows": (("d", None), (None, None)),
    "columns": ((None, None), (None, "d")),
    "contraction": ((None, "d"), ("d", None)),
    "fsdp": (("d", None), ("d", None)),
}
ODD_X, ODD_W = X[:50, :131], W[:131, :255]
encoded = functools.partial(jaxfp8.quantize, ODD_W, jnp.int8, channelwise_axes=(1,))
PRODUCTS = {
    "weight": (jaxfp8.matmul, encoded),
    "weight, zero points": (jaxfp8.matmul, functools.partial(encoded, zero_point=True)),
    "current scaling": (trained, lambda: ODD_W),
    "current scaling by row": (
        lambda x, w: jaxfp8.fp8_dot_general(
            x, w, NUMBERS, recipe=jaxfp8.CurrentScaling(granularity="channel")
        ),
        lambda: ODD_W,
    ),
}


def spread(mesh, product, of_x, of_w):
    """A product of arrays that a program spreads over a mesh."""

    def function(x, w):
        def spread_as(array, spec):
            spec = P(*(e if n > 1 else None for e, n in zip(spec, array.shape, strict=True)))
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

        w = jax.tree.map(lambda leaf: spread_as(leaf, of_w), w)
        y = product(spread_as(jnp.sin(x), of_x), w)
        return spread_as(y, (of_x[0], of_w[1]))

    return function


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("layout", RAGGED)
def test_shards_of_different_sizes_send_no_more_than_in_floats(layout, kind):
    (of_x, of_w), (product, weight) = RAGGED[layout], PRODUCTS[kind]
    mesh, w = automatic(4), weight()
    ours, floats = (spread(mesh, dot, of_x, of_w) for dot in (product, jnp.matmul))
    try:
        most = total(sent(floats, ODD_X, ODD_W))
    except ValueError as error:
        pytest.skip(f"this JAX compiles no such program of floats: {error}")
    given, bytes_sent = run(ours, ODD_X, w)
    assert bytes_sent <= most + SMALL
    near(given, product(jnp.sin(ODD_X), w))


@pytest.mark.parametrize("layout", ["rows", "contraction"])
def test_gradients_over_shards_of_different_sizes_send_no_more_than_in_floats(layout):
    mesh, (of_x, of_w) = automatic(4), RAGGED[layout]
    x, w = (a.astype(jnp.float32) for a in (ODD_X, ODD_W))

    def gradient(product):
        def loss(x, w):
            return jnp.sum(spread(mesh, product, of_x, of_w)(x, w).astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1))

    given = check((gradient(trained), x, w), (gradient(jnp.matmul), x, w), 4 * SMALL)
    whole = jax.grad(lambda x, w: jnp.sum(trained(jnp.sin(x), w) ** 2), (0, 1))
    for got, want in zip(given, jax.jit(whole)(x, w), strict=True):
        near(got, want)
