"""Remat, scan, vmap and shards."""

import functools

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from training.samples import DELAYED, MATRIX, ROW, first_state, normal, step

import jaxfp8

two_recipes = pytest.mark.parametrize("recipe", [DELAYED, ROW], ids=["delayed", "row"])


@two_recipes
@pytest.mark.same_bits
def test_remat_gives_the_same_gradients(recipe):
    x, w, state = normal(8, 16), normal(16, 16), first_state(recipe)

    def loss(product, w, state):
        return jnp.sum(jnp.tanh(product(jnp.tanh(product(x, w, state)), w, state)))

    def product(x, w, state):
        return jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe)

    gradients = [
        compiling.jit(jax.grad(functools.partial(loss, f), (0, 1)))(w, state)
        for f in (product, jax.checkpoint(product))
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


@two_recipes
@pytest.mark.same_bits
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
@pytest.mark.same_bits
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


def test_shards_and_copies_of_an_untouched_state_take_scales_of_all_their_data():
    x, w, state = 1e-3 * normal(8, 16), 1e-3 * normal(16, 4), first_state(DELAYED)
    mesh, _, _ = data_parallel()
    split, whole = PartitionSpec("data"), PartitionSpec()
    product = functools.partial(jaxfp8.fp8_dot_general, recipe=DELAYED)
    want = product(x, w, MATRIX, state)
    copies = jax.vmap(product, (0, None, None, None))(x[:, None], w, MATRIX, state)[:, 0]
    in_shards = jax.shard_map(
        lambda *args: product(*args[:2], MATRIX, args[2]),
        mesh=mesh,
        in_specs=(split, whole, whole),
        out_specs=split,
    )
    for got in (copies, jax.jit(in_shards)(x, w, state)):
        np.testing.assert_allclose(got, want, rtol=1e-6)
