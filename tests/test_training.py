"""The product of FP8 training: its gradients, its state, what it compiles to, and wrong use."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
from jaxfp8._recipes import training_codes

MATRIX = (((1,), (0,)), ((), ()))
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
TENSOR = jaxfp8.CurrentScaling()
ROW = jaxfp8.CurrentScaling(granularity="row")
RECIPES = {"delayed": DELAYED, "tensor": TENSOR, "row": ROW}
# Half a step of e4m3 and of e5m2, relative to a value.
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def first_state(recipe):
    return jaxfp8.ScalingState.init(recipe) if recipe is DELAYED else None


@functools.partial(jax.jit, static_argnums=(4, 5))
def step(x, w, g, state, recipe, numbers=MATRIX):
    """The product, and what its backward pass makes of the cotangent `g`."""

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, numbers, state, recipe=recipe)

    y, pull_back = jax.vjp(product, x, w, state)
    return y, *pull_back(g.astype(y.dtype))


def settled(x, w, g, recipe, numbers=MATRIX):
    """The product at the second step, when delayed scales have seen the data."""
    state = step(x, w, g, first_state(recipe), recipe, numbers)[3]
    return step(x, w, g, state, recipe, numbers)


# Value and gradients


PRODUCTS = {
    "matrix": ((5, 32), (32, 7), MATRIX),
    "transposed": ((32, 5), (7, 32), (((0,), (1,)), ((), ()))),
    "general": ((3, 8, 2, 4), (4, 6, 8), (((1, 3), (2, 0)), ((), ()))),
    "batch": ((3, 5, 2, 8), (2, 8, 3, 4), (((3,), (1,)), ((2, 0), (0, 2)))),
    "vector": ((32,), (32, 7), (((0,), (0,)), ((), ()))),
    "inner": ((32,), (32,), (((0,), (0,)), ((), ()))),
    "empty": ((0, 32), (32, 7), MATRIX),
}


@each_recipe
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_values_that_fp8_holds_give_the_gradients_of_the_float_product(product, recipe):
    x_shape, w_shape, numbers = product
    x, w = exact(x_shape), exact(w_shape)
    y, pull_back = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, numbers), x, w)
    g = exact(y.shape)
    out = step(x, w, g, first_state(recipe), recipe, numbers)
    for got, want in zip(out[:3], (y, *pull_back(g)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)


def exact(shape):
    """Values that both types hold, in units of 1 and in units of their amax over the largest."""
    values = np.random.default_rng(0).choice([0, 1.75, -1.75, 3.5, -3.5, -7], shape)
    values.flat[:1] = 7
    return jnp.asarray(values, jnp.float32)


def finite_differences(function, at):
    """The gradient of a float64 function of one array, by central differences."""
    gradient = np.empty(at.shape)
    for index in np.ndindex(*at.shape):
        delta = np.zeros(at.shape)
        delta[index] = 1e-3
        gradient[index] = (function(at + delta) - function(at - delta)) / 2e-3
    return gradient


@each_recipe
def test_gradients_are_finite_differences_up_to_the_rounding_of_both_operands(recipe):
    x, w, g = normal(4, 16), normal(16, 6, seed=1), normal(4, 6, seed=2)
    _, dx, dw, _ = settled(x, w, g, recipe)
    wide = [np.asarray(a, np.float64) for a in (x, w, g)]
    want_dx = finite_differences(lambda x: np.sum(wide[2] * (x @ wide[1])), wide[0])
    want_dw = finite_differences(lambda w: np.sum(wide[2] * (wide[0] @ w)), wide[1])
    relative = (1 + STEP["e4m3"]) * (1 + STEP["e5m2"]) - 1
    size = [np.abs(a) for a in wide]
    # Below its normal range a type has steps of one size: 2^-10 of a scale is half of e4m3's.
    small = 2.0**-10 * max(a.max() for a in size) / 448 * 20
    assert (np.abs(dx - want_dx) <= relative * size[2] @ size[1].T + small).all()
    assert (np.abs(dw - want_dw) <= relative * size[0].T @ size[2] + small).all()


@each_recipe
def test_gradients_point_where_those_of_the_float_product_do(recipe):
    x, w, g = normal(64, 128), normal(128, 96, seed=1), normal(64, 96, seed=2)
    y, dx, dw, _ = settled(x, w, g, recipe)
    for got, want, bound in ((y, x @ w, 0.04), (dx, g @ w.T, 0.07), (dw, x.T @ g, 0.07)):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


def test_float32_weights_and_bfloat16_activations_each_get_gradients_of_their_dtype():
    x, w = normal(4, 16, dtype=jnp.bfloat16), normal(16, 8)
    y, dx, dw, _ = step(x, w, jnp.ones((4, 8)), None, TENSOR)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    y = jaxfp8.fp8_dot_general(x, w, MATRIX, recipe=TENSOR, preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


@each_recipe
def test_only_bytes_are_kept_for_the_backward_pass(recipe):
    x, w = normal(64, 128), normal(128, 96)

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe)

    kept = jax.tree.leaves(jax.vjp(product, x, w, first_state(recipe))[1])
    large = [leaf.dtype for leaf in kept if leaf.size >= min(x.size, w.size)]
    assert large and set(large) == {np.dtype(np.uint8)}


# Layouts


@pytest.fixture
def contiguous_sums(monkeypatch):
    """As on a GPU: each product gets operands that have what it sums over last."""
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


TRANSPOSED = {**PRODUCTS, "tokens": ((2, 3, 16), (16, 4, 2), (((2,), (0,)), ((), ())))}


@each_recipe
@pytest.mark.parametrize("product", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_copies_change_no_number(product, recipe, contiguous_sums, monkeypatch):
    x_shape, w_shape, numbers = product
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    y = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=numbers), x, w)
    g = normal(*y.shape, seed=2)
    got = settled(x, w, g, recipe, numbers)
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: False)
    jax.clear_caches()
    want = settled(x, w, g, recipe, numbers)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize("recipe", [DELAYED, TENSOR], ids=["delayed", "tensor"])
@pytest.mark.parametrize("product", ["matrix", "tokens"])
def test_on_a_gpu_each_tensor_is_read_once_and_nothing_is_transposed(
    product, recipe, contiguous_sums
):
    x_shape, w_shape, numbers = TRANSPOSED[product]
    x, w, g = normal(*x_shape), normal(*w_shape), normal(*x_shape[:-1], *w_shape[1:])
    trace = step.trace(x, w, g, first_state(recipe), recipe, numbers)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jaxfp8_quantize") == 3
    assert text.count("custom_call @jaxfp8_scaled_dot") == 3
    assert "stablehlo.transpose" not in text


def test_without_a_backward_pass_only_the_weights_are_transposed(contiguous_sums):
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=TENSOR)
    trace = jax.jit(lambda x, w: product(x, w, MATRIX)).trace(normal(5, 32), normal(32, 7))
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("transposed = true"), text.count("transposed = false")) == (1, 1)


# Special values


SPECIAL = {
    "zeros": 0.0,
    "1e30": 1e30,
    "1e-30": 1e-30,
    "largest": 3e38,
    "denormal": 1e-42,
}


@each_recipe
@pytest.mark.parametrize("where", ["x", "g"])
@pytest.mark.parametrize("size", SPECIAL.values(), ids=SPECIAL)
def test_no_size_of_input_gives_nan(size, where, recipe):
    x, w, g = jnp.sign(normal(8, 16)), normal(16, 4, seed=1) / 1e3, jnp.sign(normal(8, 4, seed=2))
    x, g = (x * size, g) if where == "x" else (x, g * size)
    state = first_state(recipe)
    for _ in range(3):
        y, dx, dw, state = step(x, w, g, state, recipe)
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves((y, dx, dw, state)))


@each_recipe
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_one_infinity_saturates_and_leaves_the_scale_alone(value, recipe):
    x, w, g = normal(8, 16), normal(16, 4, seed=1), normal(8, 4, seed=2)
    bad = [x.at[3, 5].set(value), w, g.at[2, 1].set(value)]
    y, dx, dw, state = settled(*bad, recipe)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, dx, dw, state)))
    rows = np.arange(8) != 3  # the others' products do not know of it
    error = np.linalg.norm((y - x @ w)[rows]) / np.linalg.norm((x @ w)[rows])
    assert error < 0.06


@each_recipe
def test_nan_stays_in_the_rows_it_came_to(recipe):
    x, w, g = normal(8, 16).at[3, 5].set(jnp.nan), normal(16, 4, seed=1), normal(8, 4, seed=2)
    y, dx, _, state = settled(x, w, g, recipe)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((dx, state)))


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_a_jump_of_the_amax_saturates_for_one_step_and_is_then_known(factor):
    x, w, g = normal(8, 64), normal(64, 4, seed=1), normal(8, 4, seed=2)
    recipe = jaxfp8.DelayedScaling(amax_history_length=2, amax_compute="most_recent")
    state = jaxfp8.ScalingState.init(recipe)
    errors = []
    for size in (1, 1, factor, factor):
        y, dx, dw, state = step(x * size, w, g * size, state, recipe)
        assert all(np.isfinite(leaf).all() for leaf in (y, dx, dw))
        errors.append(np.linalg.norm(y / size - x @ w) / np.linalg.norm(x @ w))
    assert errors[2] > 0.5 and errors[3] < 0.05


def test_a_state_from_elsewhere_with_infinities_in_it_recovers():
    x, w, g = normal(8, 64), normal(64, 4, seed=1), normal(8, 4, seed=2)
    state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), first_state(DELAYED))
    state = step(x, w, g, state, DELAYED)[3]
    y, *_, state = step(x, w, g, state, DELAYED)
    assert np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w) < 0.05


# State


def test_history_has_the_last_step_first_and_then_the_oldest():
    state, w, g = first_state(DELAYED), jnp.ones((2, 2)), jnp.ones((1, 2))
    for amax in range(1, 7):
        state = step(jnp.full((1, 2), float(amax)), w, g, state, DELAYED)[3]
    assert state.input.amax_history.tolist() == [6, 3, 4, 5]


@pytest.mark.parametrize(
    ("fields", "amax"),
    [({}, 8.0), ({"amax_compute": "most_recent"}, 2.0), ({"margin": 3}, 64.0)],
    ids=["max", "most_recent", "margin"],
)
def test_scale_is_of_the_steps_before(fields, amax):
    recipe = jaxfp8.DelayedScaling(amax_history_length=4, **fields)
    state = jaxfp8.ScalingState.init(recipe)
    w, g = jnp.ones((2, 2)), jnp.ones((1, 2))
    for size in (8.0, 2.0, 100.0):
        state = step(jnp.full((1, 2), size), w, g, state, recipe)[3]
    np.testing.assert_allclose(state.input.scale, amax / 448, rtol=1e-6)
    np.testing.assert_allclose(state.output_grad.scale, 2.0 ** fields.get("margin", 0) / 57344)


def test_state_can_be_donated():
    leaves = jax.tree.leaves(first_state(DELAYED))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# Transformations


two_recipes = pytest.mark.parametrize("recipe", [DELAYED, ROW], ids=["delayed", "row"])


@two_recipes
def test_remat_gives_the_same_gradients(recipe):
    x, w, state = normal(8, 16), normal(16, 16), first_state(recipe)

    def loss(product, w, state):
        return jnp.sum(jnp.tanh(product(jnp.tanh(product(x, w, state)), w, state)))

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe)

    gradients = [
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(w, state)
        for f in (product, jax.checkpoint(product))
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


@two_recipes
def test_scan_over_layers_is_the_loop_over_layers(recipe):
    x, w = normal(8, 16), normal(3, 16, 16) / 4
    layers = range(3)
    state = first_state(recipe)
    states = None if state is None else jax.tree.map(lambda *s: jnp.stack(s), *[state] * 3)

    def layer(x, w, state):
        return jnp.tanh(jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe))

    def scanned(w, states):
        return jnp.sum(jax.lax.scan(lambda x, s: (layer(x, *s), None), x, (w, states))[0])

    def looped(w, states):
        y = x
        for i in layers:
            y = layer(y, *jax.tree.map(lambda leaf, i=i: leaf[i], (w, states)))
        return jnp.sum(y)

    gradients = [jax.jit(jax.grad(f, (0, 1)))(w, states) for f in (scanned, looped)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *gradients)


def test_vmap_over_data_takes_the_maximum_of_a_shared_state():
    x, w, g = normal(3, 5, 16), normal(16, 4, seed=1), normal(3, 5, 4, seed=2)
    mapped = jax.vmap(
        lambda x, g: jaxfp8.fp8_dot_general(x, w, MATRIX, g, recipe=DELAYED), (0, None)
    )

    def loss(state):
        return jnp.sum(mapped(x, state) * g)

    state = jax.grad(loss)(first_state(DELAYED))
    assert state.input.amax_history[0] == np.abs(x).max()
    assert state.output_grad.amax_history[0] == np.abs(g).max()
    assert state.input.scale == 1


@pytest.mark.parametrize("models_first", [True, False])
def test_vmap_over_models_keeps_their_states_apart(models_first):
    x, w = normal(3, 2, 5, 16), normal(3, 16, 4)
    states = jax.tree.map(lambda *s: jnp.stack(s), *[first_state(DELAYED)] * 3)
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=DELAYED)
    if models_first:
        product = jax.vmap(jax.vmap(product, (0, None, None, None)), (0, 0, None, 0))
    else:
        product = jax.vmap(jax.vmap(product, (0, 0, None, 0)), (1, None, None, None))
    new = jax.jit(jax.grad(lambda states: jnp.sum(product(x, w, MATRIX, states))))(states)
    np.testing.assert_array_equal(new.input.amax_history[:, 0], np.abs(x).max((1, 2, 3)))


@two_recipes
def test_vmap_is_the_loop(recipe):
    x, w = normal(3, 5, 16), normal(16, 4)
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=recipe)
    state = first_state(recipe)
    mapped = jax.vmap(product, (0, None, None, None))(x, w, MATRIX, state)
    np.testing.assert_allclose(
        mapped, jnp.stack([product(a, w, MATRIX, state) for a in x]), rtol=1e-6
    )


def data_parallel():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return mesh, NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


@two_recipes
def test_gradients_of_a_sharded_batch_are_those_of_the_whole(recipe):
    x, w, g, state = normal(8, 16), normal(16, 4), normal(8, 4, seed=2), first_state(recipe)
    _, split, whole = data_parallel()
    placed = jax.device_put((x, w, g, state), (split, whole, split, whole))
    got, want = step(*placed, recipe), step(x, w, g, state, recipe)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_inside_shard_map_all_shards_share_one_amax():
    x, w, g, state = normal(8, 16), normal(16, 4), normal(8, 4, seed=2), first_state(DELAYED)
    mesh, _, _ = data_parallel()
    split, whole = PartitionSpec("data"), PartitionSpec()

    specs = (split, whole, split, whole)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=whole)
    def gradients(x, w, g, state):
        def loss(w, state):
            y = jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=DELAYED)
            return jax.lax.psum(jnp.sum(y * g), "data")

        return jax.grad(loss, (0, 1))(w, state)

    got, want = jax.jit(gradients)(x, w, g, state), step(x, w, g, state, DELAYED)[2:]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


# What is compiled


def mlp(params, x, recipe):
    for w, state in params[:-1]:
        x = jax.nn.relu(jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe))
    w, state = params[-1]
    return jnp.sum(jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe) ** 2)


@each_recipe
def test_train_step_multiplies_8_bit_data_only(recipe):
    x = normal(48, 64, dtype=jnp.bfloat16)
    weights = [normal(64, 96), normal(96, 80), normal(80, 40)]
    params = [(w.astype(jnp.bfloat16), first_state(recipe)) for w in weights]
    text = jax.jit(jax.grad(mlp), static_argnums=2).lower(params, x, recipe).compile().as_text()
    # Forward and weight gradient of three layers, input gradient of those that another feeds.
    assert len(re.findall(r"custom_call_target=\"jaxfp8_scaled_dot", text)) == 3 + 3 + 2
    assert " dot(" not in text
    assert not widened(text)


def widened(text):
    """Conversions of 8-bit values to a wide dtype in optimised HLO; scales are not values."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", text))
    types |= dict(re.findall(r"(%?[\w.-]+): (\w+\[[\d,]+\])", text))
    converts = re.findall(r"= ((?:f32|bf16|f16)\[\d[\d,]*\])\S* convert\((%[\w.-]+)\)", text)
    return [(to, name) for to, name in converts if re.match("f8e[45]|[us]8", types.get(name, ""))]


def test_a_widened_operand_would_be_seen():
    w = jnp.ones((64, 32), jnp.float8_e4m3fn)
    product = jax.jit(lambda x, w: x @ w.astype(jnp.float32))
    assert widened(product.lower(jnp.ones((8, 64)), w).compile().as_text())


# Wrong use


def refuse(error, text, *args, **kwargs):
    with pytest.raises(error, match=text):
        jaxfp8.fp8_dot_general(*args, **kwargs)


def test_delayed_scaling_without_a_state_says_how_to_start():
    refuse(TypeError, r"ScalingState.init", normal(2, 4), normal(4, 2), MATRIX)


def test_current_scaling_with_a_state_is_refused():
    refuse(
        TypeError, "has none", normal(2, 4), normal(4, 2), MATRIX, first_state(DELAYED), recipe=ROW
    )


def test_a_recipe_of_inference_is_refused():
    refuse(
        TypeError, "no rule for gradients", normal(2, 4), normal(4, 2), MATRIX, recipe=jaxfp8.INT8
    )


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_an_operand_that_is_no_float_array_is_refused(dtype):
    x = jnp.ones((2, 4), dtype)
    refuse(TypeError, "`lhs` is", x, normal(4, 2), MATRIX, recipe=TENSOR)


def test_sizes_that_do_not_fit_are_refused():
    refuse(ValueError, "contracting axes", normal(2, 4), normal(3, 2), MATRIX, recipe=TENSOR)
