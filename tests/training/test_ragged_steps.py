"""`fp8_ragged_dot` in training steps: remat, scan, accumulated gradients, vmap, blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recomputed import equations

import jaxfp8

pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")

SIZES = jnp.array([5, 0, 9, 3])
X = jax.random.normal(jax.random.key(0), (19, 48), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (4, 48, 32)) / 7
RECIPES = {
    "delayed": jaxfp8.DelayedScaling(amax_history_length=4),
    "tensor": jaxfp8.CurrentScaling(),
    "channel": jaxfp8.CurrentScaling(granularity="channel"),
    "block": jaxfp8.CurrentScaling(granularity="block"),
}


def state_of(recipe):
    is_delayed = isinstance(recipe, jaxfp8.DelayedScaling)
    return jaxfp8.ScalingState.init(recipe) if is_delayed else None


def loss(recipe, w, x, sizes=SIZES):
    y = jaxfp8.fp8_ragged_dot(x, w, sizes, state_of(recipe), recipe=recipe)
    return jnp.sum(jnp.tanh(y.astype(jnp.float32)) ** 2)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("policy", "products"),
    [("dots_saveable", 3), ("dots_with_no_batch_dims_saveable", 3), ("nothing_saveable", 4)],
)
def test_policies_save_its_products(policy, products, name):
    saved = saved_by(policy, RECIPES[name])
    assert equations(jax.grad(saved, (0, 1)), W, X).count("ragged_dot") == products


def saved_by(policy, recipe):
    policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(functools.partial(loss, recipe), policy=policy)


@pytest.mark.parametrize(
    ("name", "policy"), [("delayed", "dots_saveable"), ("channel", "nothing_saveable")]
)
def test_policies_keep_gradients(name, policy):
    step = functools.partial(loss, RECIPES[name])
    saved = saved_by(policy, RECIPES[name])
    ours, theirs = (jax.jit(jax.grad(f, (0, 1)))(W, X) for f in (saved, step))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-5)


@pytest.mark.same_bits  # codes at a tie
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_gradients_of_microbatches_add_up(name):
    gradient = jax.grad(functools.partial(loss, RECIPES[name]))
    batches, sizes = jnp.stack([X, 2 * X, -X]), jnp.stack([SIZES, SIZES[::-1], SIZES])

    def add(total, batch):
        return jax.tree.map(jnp.add, total, gradient(W, *batch)), None

    total, _ = jax.jit(lambda: jax.lax.scan(add, jnp.zeros_like(W), (batches, sizes)))()
    wanted = sum(jax.jit(gradient)(W, x, s) for x, s in zip(batches, sizes, strict=True))
    np.testing.assert_allclose(total, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["delayed", "channel"])
def test_weights_may_have_16_bits(name):
    """A weight that bfloat16 holds exactly has the same codes, and its gradient is rounded."""
    narrow = W.astype(jnp.bfloat16)
    gradient = jax.jit(jax.grad(functools.partial(loss, RECIPES[name]), (0, 1)))
    (ours, ours_x), (theirs, theirs_x) = (
        gradient(narrow, X),
        gradient(narrow.astype(jnp.float32), X),
    )
    assert (ours.dtype, theirs.dtype, ours_x.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    for mine, other in ((ours, theirs), (ours_x, theirs_x)):
        mine, other = (np.asarray(a, np.float64) for a in (mine, other))
        assert np.linalg.norm(mine - other) < 0.03 * np.linalg.norm(other)


@pytest.mark.same_bits  # codes at a tie
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("delayed", (0, 0, 0)),
        ("channel", (None, 0, 0)),
        ("tensor", (0, None, None)),
        ("block", (0, 0, 0)),
    ],
)
def test_vmap_computes_each(name, axes):
    args = [jnp.stack([a, b]) for a, b in ((W, W + 1), (X, 2 * X), (SIZES, SIZES[::-1]))]
    given = [a if axis == 0 else a[0] for a, axis in zip(args, axes, strict=True)]
    each = jax.value_and_grad(functools.partial(loss, RECIPES[name]))
    ours, alone = jax.jit(jax.vmap(each, axes))(*given), jax.jit(each)
    for i in range(2):
        one = [a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
        for mine, wanted in zip(ours, alone(*one), strict=True):
            assert np.linalg.norm(mine[i] - wanted) <= 1e-3 * np.linalg.norm(wanted)


def test_a_split_axis_may_be_mapped():
    each = functools.partial(loss, RECIPES["tensor"])
    x = jnp.stack([X, 2 * X, -X, X / 2])
    mapped = jax.jit(jax.vmap(jax.grad(each), (None, 0)))
    wanted = np.asarray(mapped(W, x))
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a")))
            np.testing.assert_allclose(np.asarray(mapped(W, split)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_have_scales_of_their_own():
    """Tiles of 128 lie on the arrays, whatever the groups. Outliers stay in their tiles."""
    recipe, sizes = RECIPES["block"], jnp.array([150, 1, 0, 100])
    x = jax.random.normal(jax.random.key(2), (300, 272)).at[:, :128].multiply(2.0**-16)
    w = jax.random.normal(jax.random.key(3), (4, 272, 200)).at[:, :128].multiply(2.0**16)
    dot = functools.partial(jaxfp8.fp8_ragged_dot, recipe=recipe)
    dy = jax.random.normal(jax.random.key(4), (300, 200))

    def all_three(dot, x, w, dy):
        y, pull = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
        return y, *pull(dy)

    ours, exact = (
        jax.jit(functools.partial(all_three, f))(x, w, dy) for f in (dot, jax.lax.ragged_dot)
    )
    for mine, other in zip(ours, exact, strict=True):
        assert np.linalg.norm(mine - other) < 0.1 * np.linalg.norm(other)
    small = slice(None, 128)  # the parts of both gradients with other magnitudes
    (_, d_x, d_w), (_, e_x, e_w) = ours, exact
    for mine, other in ((d_x[:, 128:], e_x[:, 128:]), (d_w[:, small], e_w[:, small])):
        assert np.linalg.norm(mine - other) < 0.1 * np.linalg.norm(other)


def test_the_dense_product_takes_blocks():
    recipe, numbers = RECIPES["block"], (((1,), (0,)), ((), ()))
    x, w = jax.random.normal(jax.random.key(5), (150, 272)), W[0].repeat(6, 0)[:272]

    def dense(x, w):
        return jaxfp8.fp8_dot_general(x, w, numbers, recipe=recipe)

    def grouped(x, w):
        return jaxfp8.fp8_ragged_dot(x, w[None], jnp.array([150]), recipe=recipe)

    ours, theirs = (
        jax.jit(lambda x, w, f=f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))(x, w))(x, w)
        for f in (dense, grouped)
    )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-3)
