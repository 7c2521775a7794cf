"""`jaxfp8.nnx.prepare`: the weights of a live model as kernels read them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8 import PreparedArray
from jaxfp8._value import prepared as _prepared


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 64, rngs=rngs)
        self.dense = nnx.Linear(64, 128, rngs=rngs)
        self.split = nnx.LinearGeneral(128, (2, 64), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 64), 64, axis=(-2, -1), rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.merge(self.split(nnx.relu(self.dense(self.embed(tokens))))))


def model(recipe):
    made = Model()
    jaxfp8.nnx.quantize(made, recipe, where=".")
    return made


def assert_is(made, graph, state):
    """The model is what it was when it was split."""
    again, restored = nnx.split(made)
    assert again == graph
    jax.tree.map(np.testing.assert_array_equal, restored, state)


TOKENS = jnp.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    "recipe", ["INT8_DYNAMIC", "INT8_ASYMMETRIC", "FP8_W8A16", "FP8_DYNAMIC", "FP8_BLOCK"]
)
def test_a_model_computes_what_it_did(recipe):
    made = model(getattr(jaxfp8, recipe))
    want, kernel = made(TOKENS), made.dense.weight
    changes = jaxfp8.nnx.prepare(made)
    assert [row.path for row in changes.changed] == ["dense", "split"]
    assert {row.after for row in changes.changed} == {"prepared"}
    reasons = {row.path: row.reason for row in changes.left}
    words = {"embed": "its", "merge": "it", "head": "it has 10 columns"}
    assert reasons.keys() == words.keys()
    assert all(reason.startswith(f"{words[path]} ") for path, reason in reasons.items())
    assert isinstance(made.dense.weight, PreparedArray)
    assert jaxfp8.nnx.prepare(made).rows[0].shape == (64, 128)
    for a, b in zip(
        jax.tree.leaves(made.dense.weight.unprepare()), jax.tree.leaves(kernel), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for got in (made(TOKENS), nnx.jit(lambda m, x: m(x))(made, TOKENS)):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_it_goes_back_to_floats():
    made, other = model(jaxfp8.FP8_W8A16), model(jaxfp8.FP8_W8A16)
    jaxfp8.nnx.prepare(made)
    jaxfp8.nnx.dequantize(made)
    jaxfp8.nnx.dequantize(other)
    for got, want in zip(
        jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(other)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_it_survives_split_merge_and_gradients():
    made = model(jaxfp8.INT8_DYNAMIC)
    want = made(TOKENS)
    jaxfp8.nnx.prepare(made)
    graph, state = nnx.split(made)
    np.testing.assert_allclose(nnx.merge(graph, state)(TOKENS), want, rtol=0, atol=1e-4)
    loss = lambda m: jnp.sum(m(TOKENS) ** 2)  # noqa: E731
    gradients = nnx.grad(loss)(made)
    assert float(jnp.abs(gradients["head"]["bias"][...]).max()) > 0


def test_a_stacked_layer_is_scanned():
    @nnx.vmap(in_axes=0)
    def stack(key):
        return nnx.Linear(64, 64, rngs=nnx.Rngs(key))

    class Stacked(nnx.Module):
        def __init__(self):
            self.layers = stack(jax.random.split(jax.random.key(0), 3))

    made, x = Stacked(), jax.random.normal(jax.random.key(1), (2, 64))
    jaxfp8.nnx.quantize(made, jaxfp8.INT8_DYNAMIC, where=".")

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    want = run(x, made.layers)
    assert len(jaxfp8.nnx.prepare(made).changed) == 1
    np.testing.assert_allclose(run(x, made.layers), want, rtol=0, atol=1e-4)


def test_one_layer_alone_and_twice():
    layer = jaxfp8.nnx.Linear(64, 64, recipe=jaxfp8.INT8_DYNAMIC, rngs=nnx.Rngs(0))
    assert len(jaxfp8.nnx.prepare(layer).changed) == 1
    (row,) = jaxfp8.nnx.prepare(layer).left
    assert row.reason == "it is prepared already"


def test_a_module_is_needed():
    with pytest.raises(TypeError, match=r"nnx\.Module is needed"):
        jaxfp8.nnx.prepare({"kernel": 1})


# Checkpoints


@pytest.mark.parametrize("recipe", ["INT8_DYNAMIC", "INT8_ASYMMETRIC", "FP8_W8A16", "FP8_BLOCK"])
def test_unprepare_gives_the_model_back_that_was_prepared(recipe):
    made = model(getattr(jaxfp8, recipe))
    graph, state = nnx.split(made)
    changed = [row.path for row in jaxfp8.nnx.prepare(made).changed]
    changes = jaxfp8.nnx.unprepare(made)
    assert [row.path for row in changes.changed] == changed
    assert {row.reason for row in changes.left} == {"it is not prepared"}
    assert_is(made, graph, state)


def test_checkpoint_of_an_unprepared_model_is_any_models(tmp_path):
    import orbax.checkpoint

    made = model(jaxfp8.FP8_W8A16)
    jaxfp8.nnx.prepare(made)
    want = made(TOKENS)
    jaxfp8.nnx.unprepare(made)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: model(jaxfp8.FP8_W8A16)))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(made))
        checkpointer.wait_until_finished()
        loaded = nnx.merge(graph, checkpointer.restore(tmp_path / "state", shapes))
    jaxfp8.nnx.prepare(loaded)
    np.testing.assert_array_equal(loaded(TOKENS), want)


@pytest.mark.parametrize("prepared", [False, True], ids=["not prepared", "prepared"])
def test_state_laid_out_otherwise_than_the_model_says_what_to_save(prepared):
    one, other = model(jaxfp8.INT8_DYNAMIC), model(jaxfp8.INT8_DYNAMIC)
    jaxfp8.nnx.prepare(one if prepared else other)
    nnx.update(one, nnx.state(other))
    is_prepared = f"the layer is {'' if prepared else 'not '}prepared"
    with pytest.raises(ValueError, match=rf"dense`: `kernel` has shape .*{is_prepared}.*unprepare"):
        one(TOKENS)


# For a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """Weights are prepared as if they were on a GPU."""
    monkeypatch.setattr(_prepared, "_platform", lambda q: "gpu")


def test_weights_beside_floats_stay_as_they_are_on_a_gpu(on_gpu):
    changes = jaxfp8.nnx.prepare(model(jaxfp8.FP8_W8A16))
    assert not changes.changed and "as it lies" in changes.left[0].reason


@pytest.mark.parametrize("recipe", ["INT8_DYNAMIC", "INT8_ASYMMETRIC", "FP8_DYNAMIC"])
def test_weights_beside_8_bits_lie_with_the_sum_last_on_a_gpu(on_gpu, recipe):
    made = model(getattr(jaxfp8, recipe))
    want, kernel, (graph, state) = made(TOKENS), made.dense.weight, nnx.split(made)
    changes = jaxfp8.nnx.prepare(made)
    assert [row.path for row in changes.changed] == ["dense", "head", "split"]
    weight = made.dense.weight
    assert (changes.changed[0].bytes_before, changes.changed[0].bytes_after) == (
        kernel.nbytes,
        weight.nbytes,
    )
    assert (weight.turned, weight.shape) == (True, kernel.shape)
    assert (weight.sums is None) is (recipe == "FP8_DYNAMIC")
    for got in (made(TOKENS), nnx.jit(lambda m, x: m(x))(made, TOKENS)):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert float(jnp.abs(nnx.grad(lambda m: jnp.sum(m(TOKENS)))(made)["head"]["bias"][...]).max())
    assert jaxfp8.nnx.prepare(made).left[0].reason == "it is prepared already"
    other = nnx.clone(made)
    with pytest.raises(ValueError):
        nnx.update(other, state)
    with pytest.raises(ValueError, match="the layer is prepared"):  # codes without the rest
        other.dense(jnp.ones((1, 64)))
    bare = model(made.dense.recipe)
    nnx.update(bare, nnx.state(made))
    with pytest.raises(ValueError, match=r"the layer is not prepared.*unprepare"):
        bare.dense(jnp.ones((1, 64)))
    jaxfp8.nnx.unprepare(made)
    assert_is(made, graph, state)


@pytest.mark.parametrize("recipe", ["INT8_ASYMMETRIC", "FP8_DYNAMIC"])
def test_a_model_prepared_for_a_gpu_goes_back_to_floats(on_gpu, recipe):
    recipe = getattr(jaxfp8, recipe)
    made, other = model(recipe), model(recipe)
    jaxfp8.nnx.prepare(made)
    for one in (made, other):
        jaxfp8.nnx.dequantize(one)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(made), nnx.state(other))
    jaxfp8.nnx.quantize(made, recipe, where=".")
    jaxfp8.nnx.prepare(made)
    made.dense.weight = made.dense.weight.unprepare()
    assert made.dense.prepared is None and isinstance(made.dense.weight, jaxfp8.QArray)


def test_a_view_that_gets_sums_comes_back_as_a_view(on_gpu):
    made = model(jaxfp8.INT8_ASYMMETRIC)
    q = made.dense.weight
    made.dense.weight = jaxfp8.QArray(q.qvalue.T, q.scale.T).T
    want, (graph, state) = made(TOKENS), nnx.split(made)
    jaxfp8.nnx.prepare(made)
    assert not made.dense.weight.turned and made.dense.weight.sums is not None
    np.testing.assert_array_equal(made(TOKENS), want)
    jaxfp8.nnx.unprepare(made)
    assert_is(made, graph, state)


@pytest.mark.parametrize("own", ["gpu", "cpu"])
def test_state_prepared_for_another_platform_is_refused(own, monkeypatch):
    made = {}
    for platform in ("gpu", "cpu"):
        monkeypatch.setattr(_prepared, "_platform", lambda q, platform=platform: platform)
        made[platform] = model(jaxfp8.INT8_DYNAMIC)
        jaxfp8.nnx.prepare(made[platform])
    one = made.pop(own)
    (other,) = made.values()
    with contextlib.suppress(ValueError):  # Flax's, which has overwritten the codes
        nnx.update(one, nnx.state(other))
    with pytest.raises(ValueError, match=r"the layer is (not )?prepared so.*unprepare"):
        one.dense(jnp.ones((1, 64)))


def test_a_stacked_layer_is_scanned_as_on_a_gpu(on_gpu):
    @nnx.vmap(in_axes=0)
    def stack(key):
        return nnx.Linear(64, 64, rngs=nnx.Rngs(key))

    made = nnx.Sequential(stack(jax.random.split(jax.random.key(0), 3)))
    x = jax.random.normal(jax.random.key(1), (2, 64))
    jaxfp8.nnx.quantize(made, jaxfp8.INT8_ASYMMETRIC, where=".")

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    want = run(x, made.layers[0])
    assert len(jaxfp8.nnx.prepare(made).changed) == 1
    np.testing.assert_allclose(run(x, made.layers[0]), want, rtol=0, atol=1e-4)
