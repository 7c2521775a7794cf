"""A product on a mesh sends no more than the same product of floats, and gives the same numbers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.programs import BATCH, DIM, HIDDEN, KINDS, LAYOUTS, LENGTH, _float
from mesh.traffic import run

X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, DIM), jnp.bfloat16)
# Kinds whose gradients are those of another kind.
FORWARD_ALONE = ("e4m3 weight", "int8 weight, zero points", "FP8_DYNAMIC")
W = jax.random.normal(jax.random.key(1), (DIM, HIDDEN), jnp.bfloat16) / 16


AXES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def cases(kinds):
    """Each layout with each kind, on explicit and automatic axes by turns."""
    pairs = itertools.product(enumerate(LAYOUTS), enumerate(kinds))
    turns = [([*AXES][(i + j) % 2], layout, kind) for (i, layout), (j, kind) in pairs]
    ids = ["-".join(turn) for turn in turns]
    return pytest.mark.parametrize(("mesh", "layout", "kind"), turns, ids=ids, indirect=["mesh"])


@pytest.fixture
def mesh(request):
    made = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AXES[request.param],) * 2)
    with jax.set_mesh(made):
        yield made


def placed(mesh, tree, spec):
    """Arrays of a weight on a mesh: scales lie as the values do, where they have the size."""

    def put(leaf):
        entries = [e if n > 1 else None for e, n in zip(spec, leaf.shape, strict=True)]
        return jax.device_put(leaf, NamedSharding(mesh, P(*entries)))

    return jax.tree.map(put, tree)


def stated(product, out, mesh):
    """The product with its output sharding stated in the way that the axes of the mesh take."""
    if out is None or AxisType.Explicit in mesh.axis_types:
        return lambda x, w: product(x, w, out)
    sharding = NamedSharding(mesh, out)
    return lambda x, w: jax.lax.with_sharding_constraint(product(x, w, None), sharding)


class Case:
    """A program and its arguments: ours, and in floats."""

    def __init__(self, mesh, layout, kind):
        layout, self.kind = LAYOUTS[layout], KINDS[kind]
        held = weight(mesh, kind)
        self.args = placed(mesh, X, layout.x), placed(mesh, held, layout.w)
        self.floats = placed(mesh, X, layout.x), placed(mesh, W, layout.w)
        self.ours = stated(self.kind.product, layout.out, mesh)
        self.plain = stated(_float, layout.out, mesh)
        # Scales and zero points, amaxes of rows and columns.
        leaves = [leaf.size for leaf in jax.tree.leaves(held) if leaf.size < W.size]
        self.small = 8 * sum(leaves) + 4 * (BATCH * LENGTH + HIDDEN)


# What several cases share is computed once. Types of arrays name the mesh that was set.
weight = functools.cache(lambda mesh, kind: KINDS[kind].hold(W))


@functools.cache
def whole(mesh, kind):
    """The product of a kind in one place."""
    return jax.jit(lambda x, w: KINDS[kind].product(x, w, None))(X, weight(mesh, kind))


@functools.cache
def whole_gradients(mesh, kind, moving):
    """Its gradients."""
    function = gradients(lambda x, w: KINDS[kind].product(x, w, None), moving)
    return jax.jit(function)(X, weight(mesh, kind))


@functools.cache
def product_of_floats(mesh, layout):
    """What the product of floats gives in a layout, and the bytes that it sends."""
    case = Case(mesh, layout, "current scaling")
    return run(case.plain, *case.floats)


@functools.cache
def gradients_of_floats(mesh, layout, moving):
    """The same of its gradients."""
    case = Case(mesh, layout, "current scaling")
    return run(placed_as(gradients(case.plain, moving), case.floats, mesh), *case.floats)


def gradients(product, moving):
    return jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), moving)


def placed_as(gradient, arrays, mesh):
    """Gradients that lie as the arguments do; on explicit axes their types say so already."""

    def constrained(*arguments):
        pairs = zip(gradient(*arguments), arrays, strict=False)
        return [jax.lax.with_sharding_constraint(g, a.sharding) for g, a in pairs]

    return gradient if AxisType.Explicit in mesh.axis_types else constrained


def check(got, want, like):
    """Whether results lie where those of floats do, and differ by roundings to bfloat16 only."""
    for one, other, array in zip(*map(jax.tree.leaves, (got, want, like)), strict=True):
        assert one.sharding.is_equivalent_to(array.sharding, one.ndim)
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-6 * np.abs(other).max())


@cases(KINDS)
def test_a_product_sends_no_more_than_that_of_floats(mesh, layout, kind):
    case = Case(mesh, layout, kind)
    (y, bytes_sent), (plain, most) = run(case.ours, *case.args), product_of_floats(mesh, layout)
    check(y, whole(mesh, kind), plain)
    assert bytes_sent <= most + case.small


@cases([name for name in KINDS if name not in FORWARD_ALONE])
def test_gradients_send_no_more_than_those_of_floats(mesh, layout, kind):
    case = Case(mesh, layout, kind)
    moving = (0, 1) if case.kind.trains else (0,)
    ours = placed_as(gradients(case.ours, moving), case.floats, mesh)
    (got, bytes_sent), (plain, most) = (
        run(ours, *case.args),
        gradients_of_floats(mesh, layout, moving),
    )
    check(got, whole_gradients(mesh, kind, moving), plain)
    assert bytes_sent <= most + 4 * case.small
