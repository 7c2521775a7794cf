"""FP8 training of experts: `fp8_ragged_dot` beside the dense product and beside floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._recipes.training_codes import encode_for_products

pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")

MATRIX = (((1,), (0,)), ((), ()))
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
RECIPES = {
    "delayed": DELAYED,
    "tensor": jaxfp8.CurrentScaling(),
    "channel": jaxfp8.CurrentScaling(granularity="channel"),
    "block": jaxfp8.CurrentScaling(granularity="block"),
}
SIZES = (5, 0, 9, 3)
ROWS, DEPTH, COLUMNS = 19, 48, 32


def state_of(recipe):
    return jaxfp8.ScalingState.init(recipe) if recipe is DELAYED else None


def draw(groups=4, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(groups), 3)
    x = jax.random.normal(keys[0], (ROWS, DEPTH), dtype)
    w = jax.random.normal(keys[1], (groups, DEPTH, COLUMNS))
    dy = jax.random.normal(keys[2], (ROWS, COLUMNS))
    return x, w, dy


def value_and_gradients(dot, x, w, state, dy):
    y, pull = jax.vjp(dot, x, w, state)
    return y, *pull(dy.astype(y.dtype))


@pytest.mark.parametrize("name", RECIPES)
def test_one_group_is_the_dense_product(name):
    recipe = RECIPES[name]
    x, w, dy = draw(groups=1)

    def grouped(x, w, state):
        return jaxfp8.fp8_ragged_dot(x, w[None], jnp.array([ROWS]), state, recipe=recipe)

    def dense(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe)

    ours, theirs = (
        jax.jit(functools.partial(value_and_gradients, dot))(x, w[0], state_of(recipe), dy)
        for dot in (grouped, dense)
    )
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-5)


def rounded(recipe, dtype, x, summed, **more):
    """The values that both products of a tensor see, in float64."""
    both, _ = encode_for_products(recipe, dtype, x, None, summed, (), **more)
    values = []
    for codes in both:
        wide = jax.lax.bitcast_convert_type(codes.values, jnp.dtype(codes.dtype))
        wide = jaxfp8.dequantize(jaxfp8.QArray(wide, codes.scale, tiles=codes.tiles), jnp.float32)
        values.append(np.asarray(wide, np.float64).transpose(np.argsort(codes.order)))
    return values


@pytest.mark.parametrize("name", ["tensor", "channel", "block"])
def test_groups_multiply_rounded_operands(name):
    recipe = RECIPES[name]
    x, w, dy = draw()
    dot = functools.partial(jaxfp8.fp8_ragged_dot, recipe=recipe)

    @jax.jit
    def all_three(x, w, dy):
        y, pull = jax.vjp(lambda x, w: dot(x, w, jnp.array(SIZES)), x, w)
        return y, *pull(dy)

    y, d_x, d_w = all_three(x, w, dy)
    x_first, x_second = rounded(recipe, recipe.forward_dtype, x, ((1,), (0,)))
    summed = (1,), (2,)
    w_first, w_second = rounded(recipe, recipe.forward_dtype, w, summed, is_weight=True)
    g_first, g_second = rounded(recipe, recipe.gradient_dtype, dy, ((1,), (0,)))
    ends = np.cumsum(SIZES)
    wanted = np.zeros(y.shape), np.zeros(x.shape), np.zeros(w.shape)
    for group, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
        rows = slice(end - size, end)
        wanted[0][rows] = x_first[rows] @ w_first[group]
        wanted[1][rows] = g_first[rows] @ w_second[group].T
        wanted[2][group] = x_second[rows].T @ g_second[rows]
    assert (y.dtype, d_x.dtype, d_w.dtype) == (jnp.float32, x.dtype, w.dtype)
    np.testing.assert_allclose(y, wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(d_x, np.float64), wanted[1], rtol=2**-7, atol=1e-2)
    np.testing.assert_allclose(d_w, wanted[2], rtol=1e-4, atol=1e-4)
    assert not np.any(y[ends[-1] :]) and not np.any(d_w[1])


def test_a_state_remembers_the_amax_of_each_tensor():
    x, w, dy = draw()

    def loss(x, w, state):
        y = jaxfp8.fp8_ragged_dot(x, w, jnp.array(SIZES), state, recipe=DELAYED)
        return jnp.sum(y * dy)

    state = state_of(DELAYED)
    for _ in range(2):
        state = jax.jit(jax.grad(loss, 2))(x, w, state)
    amaxes = [np.abs(np.asarray(a, np.float32)).max() for a in (x, w)]
    assert state.input.amax_history[0] == amaxes[0] and state.input.scale > 0
    assert state.kernel.amax_history[0] == amaxes[1]
    assert state.output_grad.amax_history[0] == np.abs(dy[: sum(SIZES)]).max() or np.isclose(
        state.output_grad.amax_history[0], np.abs(dy).max()
    )


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_it_works_under_remat_and_scan(wrap):
    x, w, _ = draw()
    sizes = jnp.array(SIZES)
    down = jnp.swapaxes(w, 1, 2)
    recipe = RECIPES["tensor"]

    @wrap
    def layer(x, weights):
        up, down = weights
        h = jax.nn.gelu(jaxfp8.fp8_ragged_dot(x, up, sizes, recipe=recipe).astype(x.dtype))
        return x + 0.01 * jaxfp8.fp8_ragged_dot(h, down, sizes, recipe=recipe).astype(x.dtype)

    def scanned(weights):
        y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def unrolled(weights):
        y = x
        for i in range(2):
            y = layer(y, jax.tree.map(lambda w: w[i], weights))  # noqa: B023
        return jnp.sum(y.astype(jnp.float32) ** 2)

    stacked = jnp.stack([w, 2 * w]), jnp.stack([down, down])
    ours, theirs = (jax.jit(jax.grad(f))(stacked) for f in (scanned, unrolled))
    for mine, other in zip(ours, theirs, strict=True):
        assert np.linalg.norm(mine - other) < 0.05 * np.linalg.norm(other)  # ties may round apart


def test_only_codes_are_kept():
    """As `fp8_dot_general`, it keeps 8 bits for the backward pass."""
    x, w, _ = draw()
    dot = functools.partial(jaxfp8.fp8_ragged_dot, recipe=RECIPES["tensor"])
    _, pull = jax.vjp(lambda x, w: dot(x, w, jnp.array(SIZES)), x, w)
    sizes = [leaf.size for leaf in jax.tree.leaves(pull) if leaf.dtype.itemsize > 1]
    assert max(sizes, default=0) <= len(SIZES)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"lhs": np.ones((2, 3, 4), np.float32)}, ValueError, r"\[M, K\] and \[G, K, N\]"),
        ({"rhs": np.ones((2, 5, 4), np.float32)}, ValueError, "have to agree"),
        ({"lhs": np.ones((2, 3), np.int8)}, TypeError, "lhs"),
        ({"group_sizes": np.ones(2)}, TypeError, "group_sizes"),
        ({"group_sizes": np.ones(3, int)}, ValueError, "one size for each group"),
        ({"group_sizes": np.array([4, 3])}, ValueError, "adds up to 7 rows"),
        ({"group_sizes": [-1, 3]}, ValueError, "-1 for group 0"),
        ({"state": jaxfp8.ScalingState.init(DELAYED)}, TypeError, "CurrentScaling has none"),
        (
            {"recipe": jaxfp8.CurrentScaling(second_derivatives=True)},
            ValueError,
            "second derivatives",
        ),
        ({"recipe": jaxfp8.FP8_DYNAMIC}, TypeError, "recipe"),
    ],
)
def test_bad_input_is_refused(change, error, match):
    good = {
        "lhs": np.ones((6, 3), np.float32),
        "rhs": np.ones((2, 3, 4), np.float32),
        "group_sizes": np.array([2, 3]),
        "recipe": RECIPES["tensor"],
    }
    with pytest.raises(error, match=match):
        jaxfp8.fp8_ragged_dot(**(good | change))


def test_a_gradient_is_not_differentiated():
    x, w, _ = draw()

    def loss(x):
        return jnp.sum(jaxfp8.fp8_ragged_dot(x, w, jnp.array(SIZES), recipe=RECIPES["tensor"]) ** 2)

    told = r"fp8_ragged_dot.*differentiated twice.*take `jax.lax.ragged_dot`"
    with pytest.raises(TypeError, match=told):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x).astype(jnp.float32) ** 2))(x)
