"""The demo's model through `jaxfp8.nnx.quantize` and `jaxfp8.quantize_dots`: the demo's bars."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from minilm import files, job, measure, model
from minilm.nnx_model import Encoder
from minilm.quantize import WEIGHT_MATRICES, load_params
from minilm.sentences import ORDINARY
from minilm.text import Tokenizer, make_batches

pytestmark = pytest.mark.any_jax

RECIPES = [jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC, jaxfp8.FP8_BLOCK, jaxfp8.INT8_DYNAMIC]
# The demo's bars; blocks are held to that of the scheme with coarser scales.
LEAST = job.LEAST_TO_F32 | {"FP8_BLOCK": job.LEAST_TO_F32["FP8_DYNAMIC"]}
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.fixture(scope="module")
def loaded():
    return files.load()


@pytest.fixture(scope="module")
def params(loaded):
    return load_params(loaded.tensors)


@pytest.fixture(scope="module")
def batch(loaded):
    """The ordinary sentences that fit the shortest batch."""
    return make_batches(Tokenizer(loaded.tokenizer)(ORDINARY))[0]


def encode(params, ids, mask):
    return model.encode(params, ids, mask, recipe="f32")[0]


@pytest.fixture(scope="module")
def f32(params, batch):
    return np.asarray(jax.jit(encode)(params, batch.ids, batch.mask))


@by_name
def test_model_of_nnx_quantized_in_place_keeps_the_bars(params, batch, f32, recipe):
    encoder = Encoder(params)
    changes = jaxfp8.nnx.quantize(encoder, recipe, where="^layers/")
    assert len(changes.changed) == WEIGHT_MATRICES
    run = nnx.jit(lambda encoder, ids, mask: encoder(ids, mask))
    embeddings, calls = measure.count_calls(lambda: np.asarray(run(encoder, batch.ids, batch.mask)))
    assert job.cosines(embeddings, f32).min() >= LEAST[recipe.name]
    assert sum(calls.values()) == WEIGHT_MATRICES


@by_name
def test_float_program_with_its_dots_quantized_keeps_the_bars(params, batch, f32, recipe):
    g = jaxfp8.quantize_dots(encode, recipe, weights=0)
    narrow = g.quantize_weights(params, batch.ids, batch.mask)
    embeddings, calls = measure.count_calls(lambda: np.asarray(g(narrow, batch.ids, batch.mask)))
    assert job.cosines(embeddings, f32).min() >= LEAST[recipe.name]
    assert sum(calls.values()) == WEIGHT_MATRICES


def test_every_dot_of_the_float_program_may_be_in_8_bits(params, batch, f32):
    g = jaxfp8.quantize_dots(encode, jaxfp8.INT8_DYNAMIC, where=lambda path, dot: True)
    embeddings = np.asarray(g(params, batch.ids, batch.mask))
    assert len(g.explain(params, batch.ids, batch.mask).matched) == WEIGHT_MATRICES + 2 * 6
    assert job.cosines(embeddings, f32).min() >= LEAST["INT8_DYNAMIC"]
