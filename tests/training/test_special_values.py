"""NaN, infinities, zeros and jumps of the amax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.samples import DELAYED, each_recipe, first_state, normal, settled, step

import jaxfp8

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
