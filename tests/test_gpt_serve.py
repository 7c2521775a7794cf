"""Serving the small GPT: the cache, the bytes, what is measured."""

import jax.numpy as jnp
import numpy as np
import pytest

from gpt.model import Config
from gpt.serve import generator, quality, server, tokens_per_second
from gpt.train import Run, first_state, model_of

pytestmark = pytest.mark.any_jax

SMALL = Config(layers=2, width=32, heads=2, length=24)


@pytest.fixture(scope="module")
def params():
    return first_state(Run(recipe="bf16", config=SMALL)).params


@pytest.mark.parametrize("name", ["f32", "FP8_DYNAMIC"])
@pytest.mark.slow
def test_generated_tokens_are_those_that_the_whole_text_gives(params, name):
    made = server(name, params, SMALL)
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 8)), jnp.int32)
    tokens = generator(made, 6)(made.params, prompt)
    logits = made.logits(jnp.concatenate([prompt, tokens[:, :-1]], 1))
    np.testing.assert_array_equal(jnp.argmax(logits[:, 7:], -1), tokens)


def test_8_bit_parameters_are_a_quarter_of_the_float_ones(params):
    sizes = {name: server(name, params, SMALL).nbytes for name in ("f32", "bf16", "INT8_DYNAMIC")}
    assert sizes["bf16"] * 2 == sizes["f32"]
    assert sizes["INT8_DYNAMIC"] < 0.4 * sizes["f32"]


@pytest.mark.slow
def test_measurements_name_every_server(params):
    servers = [server(name, params, SMALL) for name in ("f32", "FP8_W8A16")]
    found = quality(servers, batches=1)
    assert found["f32"].agreement == 1.0
    assert found["FP8_W8A16"].perplexity == pytest.approx(found["f32"].perplexity, rel=0.01)
    prompt = jnp.zeros((1, 4), jnp.int32)
    assert set(tokens_per_second(servers, prompt, 3, 1)) == {"f32", "FP8_W8A16"}


def test_model_of_a_server_is_the_one_that_was_trained(params):
    tokens = jnp.arange(10)[None]
    exact = model_of(Run(recipe="bf16", config=SMALL)).apply({"params": params}, tokens)
    got = server("bf16", params, SMALL).logits(tokens)
    assert np.linalg.norm(got - exact) < 0.03 * np.linalg.norm(exact)
