"""`gathered_matmul` and `sums_over_devices`: the numbers of one device, and the bytes sent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.traffic import sent_by, total

import jaxfp8

DEVICES = 4
X = jax.random.normal(jax.random.key(0), (16, 64), jnp.bfloat16)
W = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (64, 32)), channelwise_axes=(1,))
CODES = jaxfp8.quantize(X, channelwise_axes=(0,))
ROWS = (P("m"), P()), P()
COLUMNS = (P(), P(None, "m")), P()


def split(function, specs):
    """A function over the parts of four devices."""
    mesh = jax.make_mesh((DEVICES,), ("m",), axis_types=(AxisType.Auto,))
    of_operands, of_result = specs
    rules = {"in_specs": of_operands, "out_specs": of_result, "check_vma": False}
    return jax.jit(jax.shard_map(function, mesh=mesh, **rules))


def moved(x):
    """The bytes that each device sends if the parts of an array go round."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x)) * 3 // DEVICES


@pytest.mark.parametrize(
    ("x", "w", "gathered"),
    [(X, W, "lhs"), (CODES, W, "lhs"), (X, W, "rhs")],
    ids=["rows of floats", "rows of codes", "columns"],
)
def test_a_ring_gives_the_product_and_sends_what_an_all_gather_does(x, w, gathered):
    function = functools.partial(jaxfp8.gathered_matmul, axis_name="m", gathered=gathered)
    program = split(function, ROWS if gathered == "lhs" else COLUMNS).lower(x, w).compile()
    whole = np.asarray(jaxfp8.matmul(x, w), np.float32)
    np.testing.assert_allclose(np.asarray(program(x, w), np.float32), whole, rtol=1e-2, atol=1e-2)
    found = sent_by(program)
    assert {one.kind for one in found} == {"collective-permute"}
    assert total(found) <= moved(x if gathered == "lhs" else w)


def test_a_gradient_goes_round_the_ring_backwards():
    def part(x, codes, scale):
        w = jaxfp8.QArray(codes, scale)
        return jaxfp8.gathered_matmul(x, w, "m")

    mesh = jax.make_mesh((DEVICES,), ("m",), axis_types=(AxisType.Auto,))
    columns = P(None, "m")
    rules = {"in_specs": (P("m"), columns, columns), "out_specs": columns}
    run = jax.shard_map(part, mesh=mesh, **rules)
    x = X.astype(jnp.float32)
    got = jax.jit(jax.grad(lambda x: jnp.sum(run(x, W.qvalue, W.scale) ** 2)))(x)
    want = jax.grad(lambda x: jnp.sum(jaxfp8.matmul(x, W) ** 2))(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((X, W, "both"), "`gathered` is 'both', but"), ((X[0], W, "lhs"), r"`lhs` has shape \(64,\)")],
    ids=["gathered", "no matrix"],
)
def test_wrong_arguments_are_refused(arguments, reason):
    x, w, gathered = arguments
    with pytest.raises(ValueError, match=rf"jaxfp8\.gathered_matmul.*{reason}"):
        jaxfp8.gathered_matmul(x, w, "m", gathered=gathered)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sums_over_devices_have_the_dtype_that_is_chosen(kind):
    mesh = jax.make_mesh((DEVICES,), ("m",), axis_types=(kind,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    out = P(None, None) if kind is AxisType.Explicit else None
    product = jax.jit(functools.partial(jaxfp8.matmul, out_sharding=out))
    with jax.set_mesh(mesh):
        x, w = put(X, None, "m"), jaxfp8.QArray(put(W.qvalue, "m", None), put(W.scale, None, None))
        wide = product(x, w)
        with jaxfp8.sums_over_devices(jnp.bfloat16):
            narrow = product(x, w)
            lowered = product.lower(x, w)
        again = product(x, w)
    np.testing.assert_array_equal(np.asarray(wide), np.asarray(again))
    assert np.any(np.asarray(wide) != np.asarray(narrow))
    size = np.abs(np.asarray(wide, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(narrow, np.float32), np.asarray(wide, np.float32), atol=DEVICES * 2**-8 * size
    )
    assert [one.kind for one in sent_by(lowered.compile())] == ["all-reduce"]
    if kind is AxisType.Explicit:  # XLA widens bfloat16 on a CPU, and asks for automatic axes late
        added = re.search(r"stablehlo.all_reduce.*?-> tensor<16x32x(\w+)>", lowered.as_text(), re.S)
        assert added[1] == "bf16"


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sums_of_groups_have_the_dtype_that_is_chosen(kind):
    mesh = jax.make_mesh((DEVICES,), ("m",), axis_types=(kind,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    with jax.set_mesh(mesh):
        values, scale = put(W.qvalue[None], None, "m"), put(W.scale[None])
        given = put(X, None, "m"), jaxfp8.QArray(values, scale), put(jnp.array([16]))
        product = jax.jit(jaxfp8.ragged_dot)
        wide = product(*given)
        with jaxfp8.sums_over_devices(jnp.bfloat16):
            narrow = product(*given)
    wide, narrow = (np.asarray(y, np.float32) for y in (wide, narrow))
    assert np.any(wide != narrow)
    np.testing.assert_allclose(narrow, wide, atol=DEVICES * 2**-8 * np.abs(wide).max())


def test_another_dtype_of_sums_is_refused():
    with (
        pytest.raises(TypeError, match=r"sums_over_devices.*bfloat16"),
        jaxfp8.sums_over_devices(jnp.float16),
    ):
        pass
