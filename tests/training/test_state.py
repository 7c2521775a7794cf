"""The history of amaxes, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.samples import DELAYED, MATRIX, ROW, TENSOR, first_state, normal, refuse, step

import jaxfp8


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


SIZES = [(1.0, 1e-3), (1e-3, 1e-3), (600.0, 0.02)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outside_of_training_an_untouched_state_takes_scales_of_the_data(sizes):
    x, w = (size * normal(8, 64, seed=i) for i, size in enumerate(sizes))
    product = jax.jit(functools.partial(jaxfp8.fp8_dot_general, recipe=DELAYED), static_argnums=2)
    y = product(x, w.T, MATRIX, first_state(DELAYED))
    assert np.linalg.norm(y - x @ w.T) < 0.06 * np.linalg.norm(x @ w.T)


def test_scales_of_the_data_give_the_bits_that_a_scale_of_1_gives_where_it_fits():
    x, w = jnp.sign(normal(8, 64)) * 1.75, jnp.exp2(normal(64, 4, seed=1))
    y = jaxfp8.fp8_dot_general(x, w, MATRIX, first_state(DELAYED), recipe=DELAYED)
    by_1, *_ = step(x, w, jnp.ones((8, 4)), first_state(DELAYED), DELAYED)
    np.testing.assert_array_equal(y, by_1)


def test_scales_of_the_data_are_for_states_without_history_only():
    x, w = 1e-3 * normal(8, 64), normal(64, 4, seed=1)
    state = jax.tree.map(lambda leaf: leaf.at[0].set(1), first_state(DELAYED))
    y = jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=DELAYED)
    assert np.linalg.norm(y - x @ w) > 0.1 * np.linalg.norm(x @ w)


def test_state_can_be_donated():
    leaves = jax.tree.leaves(first_state(DELAYED))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_delayed_scaling_without_a_state_says_how_to_start():
    refuse(TypeError, r"ScalingState.init", normal(2, 4), normal(4, 2), MATRIX)


def test_current_scaling_with_a_state_is_refused():
    refuse(
        TypeError, "has none", normal(2, 4), normal(4, 2), MATRIX, first_state(DELAYED), recipe=ROW
    )


def test_a_recipe_of_inference_is_refused():
    refuse(
        TypeError,
        "no rule for gradients",
        normal(2, 4),
        normal(4, 2),
        MATRIX,
        recipe=jaxfp8.INT8_DYNAMIC,
    )


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_an_operand_that_is_no_float_array_is_refused(dtype):
    x = jnp.ones((2, 4), dtype)
    refuse(TypeError, "`lhs` is", x, normal(4, 2), MATRIX, recipe=TENSOR)


def test_sizes_that_do_not_fit_are_refused():
    refuse(ValueError, "contracting axes", normal(2, 4), normal(3, 2), MATRIX, recipe=TENSOR)


def test_a_state_that_an_optimiser_trained_is_refused_and_gives_nan_under_jit():
    state = jax.tree.map(lambda leaf: leaf - 0.47, first_state(DELAYED))
    operands = normal(2, 4), normal(4, 2), MATRIX
    refuse(ValueError, r"`state.input.amax_history` has -0.47.*split_state", *operands, state)
    product = jax.jit(functools.partial(jaxfp8.fp8_dot_general, recipe=DELAYED), static_argnums=2)
    assert np.isnan(product(*operands, state)).all()


@pytest.mark.parametrize("field", ["scale", "amax_history"])
def test_values_that_no_step_of_ours_writes_are_told(field):
    value = 0 if field == "scale" else np.inf
    state = first_state(DELAYED)
    kernel = dataclasses.replace(state.kernel, **{field: jnp.full_like(state.kernel.scale, value)})
    with pytest.warns(UserWarning, match=f"`state.kernel.{field}` has values that are not finite"):
        jaxfp8.fp8_dot_general(
            normal(2, 4), normal(4, 2), MATRIX, dataclasses.replace(state, kernel=kernel)
        )
