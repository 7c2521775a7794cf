"""Groups on a mesh: experts, tokens and columns are split, and send no more than floats do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.traffic import run, sent, sent_by

import jaxfp8
from jaxfp8._call.library import strictness

GROUPS, ROWS, DEPTH, COLUMNS = 4, 24, 32, 16
SIZES = {
    "some": jnp.array([7, 0, 9, 3], jnp.int32),
    "one": jnp.array([0, 0, 24, 0], jnp.int32),
    "excess": jnp.array([20, -3, 30, 5], jnp.int32),
}
X = jax.random.normal(jax.random.key(0), (ROWS, DEPTH), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (GROUPS, DEPTH, COLUMNS))
DY = jax.random.normal(jax.random.key(2), (ROWS, COLUMNS))
KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh(kind):
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])


def on(mesh, tree, spec):
    """Arrays on a mesh: scales lie as the values do, where they have more than one entry."""

    def put(leaf):
        entries = [*spec, *[None] * (leaf.ndim - len(spec))]
        own = [e if n > 1 else None for e, n in zip(entries, leaf.shape, strict=True)]
        return jax.device_put(leaf, NamedSharding(mesh, P(*own)))

    return jax.tree.map(put, tree)


ROWS_AND_EXPERTS = {
    "tokens": (P("a"), P()),
    "tokens over both": (P(("a", "b")), P()),
    "experts": (P(), P("a")),
    "experts over both": (P(), P(("a", "b"))),
    "tokens and experts": (P("a"), P("b")),
    "tokens and experts along one axis": (P("a"), P("a")),
    "columns": (P(), P(None, None, "a")),
    "tokens and columns": (P("a"), P(None, None, "b")),
    "experts and columns": (P(), P("a", None, "b")),
    "K": (P(None, "a"), P(None, "a")),
    "K and experts": (P(None, "a"), P("b", "a")),
}
OPERANDS = {
    "fp8": (
        jaxfp8.quantize(X, channelwise_axes=(0,)),
        jaxfp8.quantize(W, channelwise_axes=(0, 2)),
    ),
    "int8 weights": (X, jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,))),
    "blocks": (
        jaxfp8.quantize(X, tiled_axes={0: 3, 1: 8}),
        jaxfp8.quantize(W, tiled_axes={0: 1, 1: 8, 2: 8}),
    ),
}


@functools.cache
def whole(operands, sizes):
    return np.asarray(jax.jit(jaxfp8.ragged_dot)(*OPERANDS[operands], SIZES[sizes]), np.float64)


# Blocks are cut by shards, and have a scale for each row too: "fp8" is compared in bytes below.
VALUES = [
    *(("blocks", split, kind) for split in ROWS_AND_EXPERTS for kind in KINDS),
    *(("int8 weights", split, KINDS[i % 2]) for i, split in enumerate(ROWS_AND_EXPERTS)),
]


@pytest.mark.parametrize(("operands", "split", "kind"), VALUES, ids=str)
def test_groups_of_rows_give_the_same(operands, split, kind):
    devices, (of_x, of_w) = mesh(kind), ROWS_AND_EXPERTS[split]
    x, w = (on(devices, a, of) for a, of in zip(OPERANDS[operands], (of_x, of_w), strict=True))
    for sizes in SIZES:  # one program for all
        with jax.set_mesh(devices):
            y = jax.jit(jaxfp8.ragged_dot)(x, w, SIZES[sizes])
        ours, tolerance = np.asarray(y, np.float64), 2.0**-7 if y.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(ours, whole(operands, sizes), rtol=tolerance, atol=1e-4)


MASKED = {
    "experts": (P("a"), P("a")),
    "rows and experts": (P("b", "a"), P("b")),
    "columns": (P(), P(None, None, "a")),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("split", MASKED)
def test_rows_of_each_group_give_the_same(split, kind):
    devices, (of_x, of_w) = mesh(kind), MASKED[split]
    x = jaxfp8.quantize(jnp.stack([X, -X, 2 * X, X / 2]), channelwise_axes=(0, 1))
    w, sizes = OPERANDS["fp8"][1], SIZES["excess"]
    with jax.set_mesh(devices):
        y = jax.jit(jaxfp8.ragged_dot)(on(devices, x, of_x), on(devices, w, of_w), sizes)
    np.testing.assert_allclose(
        np.asarray(y), np.asarray(jax.jit(jaxfp8.ragged_dot)(x, w, sizes)), rtol=1e-5, atol=1e-5
    )


ALONG_K = {
    "tokens": (P("a"), P("a")),
    "tokens over both": (P(("a", "b")), P(("a", "b"))),
    "rows and columns": (P(None, "a"), P(None, "b")),
    "tokens and rows": (P("a", "b"), P("a")),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("split", ALONG_K)
def test_groups_along_k_give_the_same(split, kind):
    """The gradient of experts' weights: tokens are summed over devices."""
    devices, (of_x, of_dy) = mesh(kind), ALONG_K[split]
    x, dy = (jaxfp8.quantize(a.astype(jnp.float32), channelwise_axes=(1,)) for a in (X, DY))

    @jax.jit
    def product(x, dy, sizes):
        return jaxfp8.ragged_dot(x.T, dy, sizes)

    split_x, split_dy = on(devices, x, of_x), on(devices, dy, of_dy)
    for sizes in SIZES.values():
        with jax.set_mesh(devices):
            y = product(split_x, split_dy, sizes)
        wanted = np.asarray(product(x, dy, sizes))
        np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("sizes", "kind"), [("some", KINDS[0]), ("excess", KINDS[1])], ids=str)
def test_groups_of_a_sum_may_be_split(sizes, kind):
    """Each device sums for its own experts alone."""
    devices = mesh(kind)
    x, dy = (jaxfp8.quantize(a.astype(jnp.float32), channelwise_axes=(1,)) for a in (X, DY))
    experts = NamedSharding(devices, P("a"))

    def gradient(w, x, dy, sizes):
        """Of weights that are split, by a product of FP8 training."""
        recipe = jaxfp8.CurrentScaling(granularity="channel")
        dot = functools.partial(jaxfp8.fp8_ragged_dot, group_sizes=sizes, recipe=recipe)
        y, pull = jax.vjp(lambda w: dot(x, w), w)
        (d_w,) = pull(dy.astype(y.dtype))
        return d_w if kind == AxisType.Explicit else lax.with_sharding_constraint(d_w, experts)

    with jax.set_mesh(devices):
        args = *map(functools.partial(on, devices), (W, X, DY), (P("a"), P(), P())), SIZES[sizes]
        program = jax.jit(gradient).lower(*args).compile()
        found = program(*args)
    assert found.sharding.is_equivalent_to(experts, 3)
    assert not [one for one in sent_by(program) if one.bytes >= found.size]
    whole = jax.jit(lambda sizes: jaxfp8.ragged_dot(x.T, dy, sizes))(SIZES[sizes])
    assert np.linalg.norm(found - whole) <= 0.1 * np.linalg.norm(whole)


@pytest.mark.parametrize("split", ROWS_AND_EXPERTS)
def test_no_byte_more_is_sent_than_in_floats(split):
    devices, (of_x, of_w) = mesh(AxisType.Auto), ROWS_AND_EXPERTS[split]
    x, w = OPERANDS["fp8"]
    floats = on(devices, X, of_x), on(devices, W.astype(jnp.bfloat16), of_w)
    with jax.set_mesh(devices):
        sizes = jax.device_put(SIZES["some"], NamedSharding(devices, P()))
        _, theirs = run(lax.ragged_dot, *floats, sizes)
        _, ours = run(jaxfp8.ragged_dot, on(devices, x, of_x), on(devices, w, of_w), sizes)
    scales = 4 * sum(q.scale.size for q in (x, w))
    assert ours <= theirs + scales


@pytest.mark.parametrize(
    ("split", "kinds"),
    [("tokens", []), ("columns", []), ("experts", ["all-reduce"]), ("K", ["all-reduce"])],
)
def test_explicit_axes_send_sums_alone(split, kinds):
    """JAX itself does not say how a ragged dot is split along explicit axes."""
    devices, (of_x, of_w) = mesh(AxisType.Explicit), ROWS_AND_EXPERTS[split]
    x, w = OPERANDS["fp8"]
    with jax.set_mesh(devices):
        sizes = jax.device_put(SIZES["some"], NamedSharding(devices, P()))
        found = sent(jaxfp8.ragged_dot, on(devices, x, of_x), on(devices, w, of_w), sizes)
    assert [one.kind for one in found] == kinds


@pytest.mark.parametrize("change", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_explicit_axes_need_no_mesh_in_context(change):
    devices, (x, w) = mesh(AxisType.Explicit), OPERANDS["fp8"]
    y = change(jaxfp8.ragged_dot)(on(devices, x, P("a")), w, SIZES["some"])
    assert jax.typeof(y).sharding.spec == P("a", None)
    np.testing.assert_allclose(np.asarray(y), whole("fp8", "some"), rtol=1e-5, atol=1e-5)


def test_columns_may_be_split_by_hand():
    x, w = OPERANDS["fp8"]

    def local(values, scale):
        return jaxfp8.ragged_dot(x, jaxfp8.QArray(values, scale), SIZES["some"])

    columns = P(None, None, "a")
    call = jax.shard_map(
        local, mesh=mesh(AxisType.Auto), in_specs=(columns, columns), out_specs=P(None, "a")
    )
    y = jax.jit(call)(w.qvalue, w.scale)
    np.testing.assert_allclose(np.asarray(y), whole("fp8", "some"), rtol=1e-5, atol=1e-5)


TRAINING = {
    "tokens": (P("a"), P()),
    "experts": (P(), P("a")),
    "tokens and experts": (P("a"), P("b")),
    "columns": (P(), P(None, None, "a")),
}


GRANULARITIES = [("tensor", KINDS[0]), ("channel", KINDS[0]), ("channel", KINDS[1])]


@functools.partial(jax.jit, static_argnames="granularity")
def step(x, w, granularity):
    def loss(x, w):
        recipe = jaxfp8.CurrentScaling(granularity=granularity)
        y = jaxfp8.fp8_ragged_dot(x, w, SIZES["some"], recipe=recipe)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize(("granularity", "kind"), GRANULARITIES, ids=str)
@pytest.mark.parametrize("split", TRAINING)
def test_training_gives_the_same(split, granularity, kind):
    devices, (of_x, of_w) = mesh(kind), TRAINING[split]
    wanted = step(X, W, granularity)
    with jax.set_mesh(devices):
        given = step(on(devices, X, of_x), on(devices, W, of_w), granularity)
    for mine, other in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        mine, other = (np.asarray(a, np.float64) for a in (mine, other))
        assert np.linalg.norm(mine - other) <= 0.01 * np.linalg.norm(other)


@pytest.mark.filterwarnings("ignore:.*is differentiated")
def test_gathering_of_a_derivative_is_told(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    devices, (_, w) = mesh(AxisType.Explicit), OPERANDS["fp8"]
    with jax.set_mesh(devices), pytest.warns(jaxfp8.FallbackWarning, match="are not split along"):
        x = on(devices, X.astype(jnp.float32), P("a"))
        gradient = jax.grad(lambda x: jaxfp8.ragged_dot(x, w, SIZES["some"]).sum())(x)
    wanted = jax.grad(lambda x: jaxfp8.ragged_dot(x, w, SIZES["some"]).sum())(X.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX refuses explicit axes")
def test_a_ragged_dot_on_explicit_axes_is_captured():
    devices, q = mesh(AxisType.Explicit), jaxfp8.quantize(W, channelwise_axes=(0, 2))
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    rows = NamedSharding(devices, P("a", None))

    def written(x, codes, scale, sizes):
        wide = codes.astype(x.dtype) * scale
        return lax.ragged_dot_general(x, wide, sizes, numbers, out_sharding=rows)

    x = X.astype(jnp.float32)
    with jax.set_mesh(devices):
        weights = on(devices, (q.qvalue, q.scale), P("b"))
        args = on(devices, x, P("a")), *weights, on(devices, SIZES["some"], P())
        assert len(jaxfp8.explain(written)(*args).matched) == 1
        y = jaxfp8.rewrite(written, strict=True)(*args)
    assert jax.typeof(y).sharding.spec == P("a", None)
    np.testing.assert_allclose(
        np.asarray(y), np.asarray(jaxfp8.ragged_dot(x, q, SIZES["some"])), rtol=1e-5, atol=1e-5
    )
