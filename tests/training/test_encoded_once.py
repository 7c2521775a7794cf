"""Each tensor of a training step is encoded once: with remat, and over microbatches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from recomputed import calls
from training.samples import (
    BLOCK,
    DELAYED,
    MATRIX,
    ROW,
    TENSOR,
    blocks_too,
    first_state,
    normal,
    refuse,
)

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

SAVING = functools.partial(jax.checkpoint, policy=jaxfp8.codes_saveable)
LAYERS, MICROBATCHES = 3, 4
# Those that encode by calls. The others are operations of XLA.
CALLED = {"delayed": DELAYED, "tensor": TENSOR}


def stacked(recipe):
    """Weights and states of the layers of a scan."""
    state = first_state(recipe)
    states = state and jax.tree.map(lambda *leaves: jnp.stack(leaves), *[state] * LAYERS)
    return normal(LAYERS, 16, 16) / 4, states


def model(recipe, wrap, weights, states, x):
    def layer(x, held):
        w, state = held
        y = jaxfp8.fp8_dot_general(x, w.astype(x.dtype), MATRIX, state, recipe=recipe)
        return jnp.tanh(y), None

    return jax.lax.scan(wrap(layer), x, (weights, states))[0].astype(jnp.float32).sum()


def gradient(recipe, wrap):
    return jax.grad(functools.partial(model, recipe, wrap), (0, 1) if recipe is DELAYED else 0)


@pytest.mark.parametrize("recipe", CALLED.values(), ids=CALLED)
@pytest.mark.parametrize("change", [lambda f: f, jaxfp8.rewrite], ids=["written", "rewritten"])
def test_a_policy_that_saves_codes_encodes_each_tensor_once(recipe, change):
    args = *stacked(recipe), normal(8, 16, dtype=jnp.bfloat16)
    plain, remat, saving = (
        calls(change(gradient(recipe, wrap)), *args)
        for wrap in (lambda f: f, jax.checkpoint, SAVING)
    )
    assert saving["quantize"] == plain["quantize"] == 3 * LAYERS < remat["quantize"]
    assert saving["scaled_dot"] == remat["scaled_dot"]


@blocks_too
def test_a_policy_that_saves_codes_keeps_no_floats_of_their_size(recipe):
    weights, states = stacked(recipe)
    x = normal(16, 16, dtype=jnp.bfloat16)

    def residuals(*args):
        return jax.vjp(functools.partial(model, recipe, SAVING), *args)[1]

    kept = jax.eval_shape(residuals, weights, states, x)
    large = [leaf.dtype for leaf in jax.tree.leaves(kept) if leaf.size >= LAYERS * x.size]
    # Both layouts or roundings of tokens and weights, at most: one for each product.
    assert set(large) == {np.dtype(np.uint8)} and 2 <= len(large) <= 4


@pytest.mark.parametrize("recipe", [DELAYED, BLOCK], ids=["delayed", "block"])
@pytest.mark.same_bits
def test_gradients_from_saved_and_given_codes_are_the_same(recipe):
    w, x, state = normal(16, 8), normal(4, 16), first_state(recipe)

    def given(w, state):
        codes = jaxfp8.encode_weight(w, MATRIX, state, recipe=recipe)
        return loss(w, state, codes)

    def loss(w, state, codes=None):
        y = jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe, rhs_codes=codes)
        return jnp.sum(jnp.tanh(y))

    moving = (0, 1) if recipe is DELAYED else 0
    want, *others = (jax.jit(jax.grad(f, moving))(w, state) for f in (loss, SAVING(loss), given))
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)


class Block(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x, _):
        product = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=self.recipe)
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=product)
        hidden = dense(32)(nn.LayerNorm(dtype=jnp.bfloat16)(x))
        return x + dense(16)(nn.gelu(hidden)), None


class Stack(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        kinds = ("params", "_overwrite_with_gradient", "fp8_codes")
        block = nn.remat(Block, prevent_cse=False, policy=jaxfp8.codes_saveable)
        scan = nn.scan(block, dict.fromkeys(kinds, 0), split_rngs={"params": True}, length=LAYERS)
        return scan(self.recipe)(x, None)[0]


def accumulated(model, variables, codes, batches):
    def one(total, x):
        def loss(v):
            return model.apply({**v, **codes}, x).astype(jnp.float32).sum()

        return jaxfp8.linen.accumulate(total, jax.grad(loss)(variables)), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, variables), batches)[0]


@pytest.mark.parametrize("recipe", CALLED.values(), ids=CALLED)
@pytest.mark.same_bits
def test_linen_encodes_weights_once_for_all_microbatches(recipe):
    model, batches = Stack(recipe), normal(MICROBATCHES, 8, 16, dtype=jnp.bfloat16)
    variables = jax.jit(model.init)(jax.random.key(0), batches[0])
    assert "fp8_codes" not in variables

    def each(variables, batches):
        return accumulated(model, variables, {}, batches)

    def once(variables, batches):
        _, codes = model.apply(variables, batches[0], mutable=["fp8_codes"])
        return accumulated(model, variables, codes, batches)

    weights, others = 2 * LAYERS, 2 * LAYERS * 2 * MICROBATCHES  # activations, gradients
    assert calls(each, variables, batches)["quantize"] == weights * MICROBATCHES + others
    assert calls(once, variables, batches)["quantize"] == weights + others
    if recipe is TENSOR:
        want, got = (jax.jit(f)(variables, batches) for f in (each, once))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def perceptron(recipe):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(16, 8, rngs=rngs), jnp.tanh, nnx.Einsum("ij,jk->ik", (8, 4), rngs=rngs)
    )
    jaxfp8.nnx.fp8_training(model, recipe)
    return model


@blocks_too
def test_nnx_encodes_weights_once_for_all_microbatches(recipe):
    graph, state = nnx.split(perceptron(recipe))
    gradients = nnx.grad(lambda model, x: (model(x) ** 2).sum())

    def each(state, batches):
        model = nnx.merge(graph, state, copy=True)
        return [gradients(model, x) for x in batches], nnx.state(model)

    def once(state, batches):
        model = nnx.merge(graph, state, copy=True)
        with jaxfp8.nnx.encoded_weights(model):
            return [gradients(model, x) for x in batches], nnx.state(perceptron(recipe))

    batches = normal(MICROBATCHES, 4, 16)
    if recipe in CALLED.values():
        assert calls(each, state, batches)["quantize"] == 6 * MICROBATCHES
        assert calls(once, state, batches)["quantize"] == 2 + 4 * MICROBATCHES
    # One microbatch: without codes the history of a kernel moves at each.
    (want, _), (got, _) = (jax.jit(f)(state, batches[:1]) for f in (each, once))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_nnx_codes_stay_inside():
    model = perceptron(TENSOR)
    before = nnx.state(model)
    with jaxfp8.nnx.encoded_weights(model):
        assert jax.tree.structure(nnx.state(model)) != jax.tree.structure(before)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    with pytest.raises(ValueError, match="has no layer that trains in FP8"):
        jaxfp8.nnx.encoded_weights(nnx.Linear(2, 2, rngs=nnx.Rngs(0))).__enter__()


def test_nnx_codes_of_an_outer_block_come_back():
    model = perceptron(TENSOR)
    before = nnx.state(model)
    with jaxfp8.nnx.encoded_weights(model):
        outer = model.layers[0].dot_general.codes
        with jaxfp8.nnx.encoded_weights(model):
            assert model.layers[0].dot_general.codes is not outer
        assert model.layers[0].dot_general.codes is outer
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)


def test_nnx_codes_of_evaluation_have_its_scales():
    model, x = perceptron(DELAYED), normal(4, 16)
    model.layers[0].kernel[...] *= 1000  # saturates at the first scale
    model.eval()
    want = model(x)
    with jaxfp8.nnx.encoded_weights(model):
        np.testing.assert_array_equal(model(x), want)


def test_codes_of_another_weight_recipe_or_kind_are_refused():
    x, w, state = normal(4, 16), normal(16, 8), first_state(DELAYED)
    codes = jaxfp8.encode_weight(w, MATRIX, recipe=TENSOR)
    says = r"has float8_e4m3fn\[16, 8\] without delayed scaling.*needs float8_e4m3fn\[16, 4\]"
    other = {"recipe": TENSOR, "rhs_codes": codes}
    refuse(ValueError, says, x, w[:, :4], MATRIX, **other)
    refuse(ValueError, "with it.*encode_weight", x, w, MATRIX, state, rhs_codes=codes)
    quantized = jaxfp8.quantize(w)
    refuse(TypeError, "is of type QArray", x, w, MATRIX, recipe=TENSOR, rhs_codes=quantized)
    with pytest.raises(TypeError, match="start with"):
        jaxfp8.encode_weight(w, MATRIX)


@pytest.mark.parametrize(
    ("made", "numbers", "says"),
    [
        (TENSOR, MATRIX, r"tiles \[16, 16\].* tiles \[16, 1\]"),
        (BLOCK, MATRIX, r"tiles \[16, 16\].* tiles \[16, 1\]"),
        (ROW, (((1,), (1,)), ((), ())), r"tiles \[1, 16\].* tiles \[16, 1\]"),
    ],
    ids=["tensor", "block", "axes"],
)
def test_codes_with_other_scales_are_refused(made, numbers, says):
    codes = jaxfp8.encode_weight(jnp.ones((16, 16)), numbers, recipe=made)
    x, w = jnp.ones((4, 16)), jnp.ones((16, 16))
    refuse(ValueError, says, x, w, MATRIX, recipe=ROW, rhs_codes=codes)


def test_codes_of_one_scale_serve_both_directions():
    x, w = normal(4, 16), normal(16, 16)
    codes = jaxfp8.encode_weight(w, MATRIX, recipe=TENSOR)
    for numbers in (MATRIX, (((1,), (1,)), ((), ()))):
        product = functools.partial(jaxfp8.fp8_dot_general, x, w, numbers, recipe=TENSOR)
        np.testing.assert_array_equal(product(rhs_codes=codes), product())


@pytest.mark.parametrize(
    ("shape", "rhs", "says"),
    [
        ((16, 8), (5,), "names axis 5, but `rhs` has 2 axes"),
        ((), (0,), "names axis 0, but `rhs` has 0 axes"),
        ((16, 8), (0, -2), r"names axes \[0, 0\]"),
    ],
)
def test_axes_that_a_weight_lacks_are_refused(shape, rhs, says):
    with pytest.raises(ValueError, match=f"jaxfp8.encode_weight.*{says}"):
        jaxfp8.encode_weight(jnp.ones(shape), ((rhs, rhs), ((), ())), recipe=TENSOR)
