"""The GPT of the examples at reduced size: training, resuming, what its step is made of."""

import dataclasses
import functools
import re

import gpt_train
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from gpt import curves, mesh, text, train
from gpt.model import Config
from jaxfp8._bench import _hlo

SMALL = Config(layers=2, width=32, heads=2, length=32)


def run_of(recipe):
    return train.Run(recipe=recipe, config=SMALL, steps=30, batch=4, rate=1e-2)


@pytest.fixture(scope="module")
def curve_of():
    """The losses of a run, computed once."""

    @functools.cache
    def losses(recipe):
        run = run_of(recipe)
        return train.train(run, train.first_state(run))[1]

    return losses


@pytest.mark.slow
def test_the_model_learns_in_fp8(curve_of):
    losses = curve_of("delayed")
    assert np.mean(losses[-5:]) < losses[0] - 1


@pytest.mark.slow
def test_a_resumed_run_continues_identically(tmp_path, curve_of):
    run = run_of("delayed")
    half, losses = train.train(run, train.first_state(run), until=10)
    train.save(half, tmp_path / "half")
    _, rest = train.train(run, train.restore(run, tmp_path / "half"), until=20)
    assert losses + rest == curve_of("delayed")[:20]


@pytest.mark.slow
def test_each_layer_of_the_scan_has_a_scaling_state_that_moves():
    run = run_of("delayed")
    state, _ = train.train(run, train.first_state(run), until=2)
    states = state.params["_overwrite_with_gradient"]["layers"]
    assert len(jax.tree.leaves(states)) == 4 * 6  # four dense layers, six variables each
    for history in jax.tree.leaves(states["up"], is_leaf=lambda x: getattr(x, "ndim", 0) == 2):
        if history.shape == (2, 1024):
            assert (history[:, 0] > 0).all() and (history[:, -1] > 0).all()


def test_the_train_step_runs_its_dense_layers_in_8_bit():
    run = run_of("delayed")
    state, tokens = train.first_state(run), jnp.zeros((4, 33), jnp.int32)
    step = jax.value_and_grad(functools.partial(train.loss_of, state.apply_fn))
    report = jaxfp8.explain(step)(state.params, tokens)
    assert not report.missed
    hlo = jax.jit(step).lower(state.params, tokens).compile().as_text()
    # Forward, input and weight gradient of four layers; remat repeats three forwards, for
    # nothing in the backward pass asks for the output of the last.
    assert len(re.findall(r'custom_call_target="jaxfp8_scaled_dot', hlo)) == 4 + 4 + 4 + 3
    # Bytes are stacked by the scan as bytes: float8 would go through float16.
    assert not re.search(r"(?<!b)f16\[", hlo)


def test_text_of_a_step_is_the_same_for_the_same_seed():
    training, validation = text.load(100_000)
    assert len(validation) > 1000
    one, other = (text.batch(training, 2, 16, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert one.shape == (2, 17) and one.max() < text.VOCABULARY


def test_a_larger_vocabulary_has_the_commonest_words():
    training, _ = text.load(100_000, vocabulary=512)
    letters, _ = text.load(100_000)
    assert text.VOCABULARY < training.max() < 512 and len(training) < 0.7 * len(letters)


def test_curves_are_drawn(tmp_path):
    curves.draw({"bf16": [3.0, 2.0, 1.0], "delayed": [3.0, 2.1, 1.0]}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"


# Together they have all axes. Tests that use the same ones share compiled steps.
MESHES = "fsdp=2,model=2", "data=2,fsdp=2"


@pytest.mark.slow
def test_a_run_on_a_mesh_gives_the_losses_of_one_device(tmp_path, curve_of):
    """Over a checkpoint that is restored onto another mesh."""
    run, other = (dataclasses.replace(run_of("delayed"), mesh=mesh) for mesh in MESHES)
    half, losses = train.train(run, train.first_state(run), until=6)
    train.save(half, tmp_path / "half")
    state, rest = train.train(other, train.restore(other, tmp_path / "half"), until=12)
    kernel = state.params["params"]["layers"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 128)
    np.testing.assert_allclose(losses + rest, curve_of("delayed")[:12], rtol=5e-3)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_step_sends_as_much_for_twice_the_texts(recipe):
    """It sends weights and their gradients, no activations."""

    def sent(batch):
        run = dataclasses.replace(run_of(recipe), batch=batch, mesh="data=2,fsdp=2")
        tokens = np.zeros((batch, SMALL.length + 1), np.int32)
        tokens = jax.device_put(tokens, mesh.of_texts(mesh.make(run.mesh)))
        program = train.step_of(run).lower(train.first_state(run), tokens).compile()
        return sum(one.bytes for one in _hlo.sent(program.as_text()))

    assert sent(8) == pytest.approx(sent(4), rel=0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    class Killed(Exception):
        pass

    def kill(number, loss):
        if number == 20:
            raise Killed

    run, other = (dataclasses.replace(run_of("delayed"), mesh=mesh) for mesh in MESHES)
    with pytest.raises(Killed):
        train.train_with_checkpoints(run, tmp_path, kill)
    assert train.newest(tmp_path).name == "15"
    numbers = []
    _, losses = train.train_with_checkpoints(other, tmp_path, lambda n, loss: numbers.append(n))
    assert numbers == list(range(15, 30))
    _, uninterrupted = train.train(run, train.first_state(run))
    np.testing.assert_allclose(losses, uninterrupted, rtol=5e-3)


def test_a_folder_belongs_to_one_run(tmp_path):
    run = dataclasses.replace(run_of("bf16"), steps=1)
    train.train_with_checkpoints(run, tmp_path)
    assert train.why_not_in(dataclasses.replace(run, mesh="data=2"), tmp_path) is None
    with pytest.raises(ValueError, match="has a run with seed 0, not 3"):
        train.train_with_checkpoints(dataclasses.replace(run, seed=3), tmp_path)


@pytest.mark.parametrize("text", ["rows=2", "data=two", "data=0", "data=64", "data=1,data=2"])
def test_a_mesh_that_cannot_be_made_is_refused_by_name(text):
    with pytest.raises(ValueError, match="`--mesh`"):
        mesh.make(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "rows=2"], "`--mesh`: 'rows=2' is not one of"),
        (["--mesh", "data=3"], "`--batch`: 8 texts cannot be split"),
        (["--mesh", "model=3"], "`--mesh`: fsdp and model have to divide 256"),
    ],
)
def test_a_run_that_cannot_be_split_is_an_error_of_its_options(capsys, options, words):
    with pytest.raises(SystemExit):
        gpt_train.main(options)
    assert words in capsys.readouterr().err
