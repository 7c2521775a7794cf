"""An optimiser hands over the codes of the weights that it has updated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from training.samples import MATRIX, TENSOR, blocks_too, first_state, normal

import jaxfp8

pytestmark = pytest.mark.same_bits


def encode(recipe, w, scales=None):
    scales = scales or first_state(recipe)
    return jaxfp8.encode_weight(w, MATRIX, scales, recipe=recipe)


def stepped(recipe, optimiser, codes_of, x, w, scales, state):
    """One step of the optimiser, with the codes that `codes_of` finds."""
    codes = codes_of(w, scales, state)

    def loss(w, scales):
        y = jaxfp8.fp8_dot_general(x, w, MATRIX, scales, recipe=recipe, rhs_codes=codes)
        return jnp.mean(jnp.tanh(y) ** 2)

    gradient, scales = jax.grad(loss, (0, 1))(w, scales)
    more = {"scales": scales} if hasattr(state, "codes") else {}
    updates, state = optimiser.update(gradient, state, w, **more)
    return optax.apply_updates(w, updates), scales, state


@blocks_too
def test_steps_on_handed_codes_have_the_bits_of_steps_that_encode(recipe):
    x, plain = normal(8, 32), optax.adam(1e-2)
    handing = jaxfp8.with_codes(plain, functools.partial(encode, recipe))
    found = []
    for optimiser, codes_of in (
        (plain, lambda w, scales, _: encode(recipe, w, scales)),
        (handing, lambda w, scales, state: state.codes),
    ):
        w, scales = normal(32, 16, seed=1), first_state(recipe)
        state = optimiser.init(w)
        step = jax.jit(functools.partial(stepped, recipe, optimiser, codes_of, x))
        for _ in range(3):
            w, scales, state = step(w, scales, state)
        found.append((w, scales, getattr(state, "inner", state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_updated_weights_are_stored_once():
    x, w = normal(8, 256), normal(256, 256)
    optimiser = jaxfp8.with_codes(optax.sgd(1e-2), functools.partial(encode, TENSOR))
    step = functools.partial(stepped, TENSOR, optimiser, lambda w, scales, state: state.codes, x)
    lower = jax.jit(step, donate_argnums=0).lower
    program = lower(w, None, optimiser.init(w)).compile()
    # The gradient has the size of the weights. No second array of that size is there.
    assert program.memory_analysis().temp_size_in_bytes < 1.9 * w.nbytes


def test_microbatches_and_arguments_of_the_optimiser_work_as_in_optax():
    w, gradient = normal(32, 16), normal(32, 16, seed=1)
    codes_of = functools.partial(encode, TENSOR)
    summed = optax.MultiSteps(jaxfp8.with_codes(optax.sgd(1e-2), codes_of), 2)
    state = summed.init(w)
    for _ in range(2):
        updates, state = summed.update(gradient, state, params=w)
    codes = codes_of(optax.apply_updates(w, updates))
    jax.tree.map(np.testing.assert_array_equal, state.inner_opt_state.codes, codes)
    plateau = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau())
    handing = jaxfp8.with_codes(plateau, codes_of)
    handing.update(gradient, handing.init(w), w, value=jnp.float32(1))


def test_an_update_without_weights_is_told():
    handing = jaxfp8.with_codes(optax.sgd(1e-2), functools.partial(encode, TENSOR))
    with pytest.raises(ValueError, match=r"got no weights.*call `optimiser\.update"):
        handing.update(normal(32, 16), handing.init(normal(32, 16)))
