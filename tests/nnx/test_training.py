"""FP8 training in nnx: its state under every transformation, its gradients, wrong use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx

DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
X = jax.random.normal(jax.random.key(0), (8, 16))


def linear(recipe=DELAYED):
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    jaxfp8.nnx.fp8_training(model, recipe)
    return model


def paths(changes):
    return [row.path for row in changes.changed]


def input_history(model):
    return np.asarray(model.layers[0].dot_general.input_amax_history[...])


def step(model, x):
    return nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, x)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, nnx.jit, lambda f: nnx.jit(nnx.remat(f))],
    ids=["eager", "jit", "remat"],
)
def test_forward_pass_is_a_step_of_the_history(transform):
    model, run = linear(), transform(lambda model, x: model(x))
    for factor in (1.0, 3.0):
        run(model, factor * X)
    amax = float(jnp.abs(X).max())
    np.testing.assert_allclose(input_history(model), [3 * amax, 0, 0, amax], rtol=1e-6)


def test_gradient_is_a_step_too_and_leaves_no_gradient_of_the_state():
    model = linear()
    gradients = nnx.jit(step)(model, X)
    assert {path[-1] for path, _ in nnx.to_flat_state(gradients)} == {"kernel", "bias"}
    np.testing.assert_allclose(input_history(model)[0], jnp.abs(X).max(), rtol=1e-6)


def test_a_gradient_of_the_state_is_refused():
    everything = nnx.DiffState(0, nnx.Variable)
    loss = nnx.grad(lambda model: (model(X) ** 2).sum(), argnums=everything)
    with pytest.raises(TypeError, match=r"scaling state is differentiated.*wrt=nnx.Param"):
        loss(linear())


def test_scale_is_that_of_the_history():
    model = linear()
    for _ in range(2):
        model(7 * X)
    scale = model.layers[0].dot_general.input_scale[...]
    np.testing.assert_allclose(scale, [7 * jnp.abs(X).max() / 448], rtol=1e-6)


@pytest.mark.parametrize("recipe", [DELAYED, jaxfp8.CurrentScaling()], ids=["delayed", "current"])
def test_gradients_are_close_to_those_in_floats(recipe):
    model, plain = linear(recipe), nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    for _ in range(2):
        got = nnx.jit(step)(model, X)
    want = nnx.jit(step)(plain, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


def test_evaluation_leaves_the_state_alone():
    model = linear()
    model(X)
    before = input_history(model)
    model.eval()
    model(100 * X)
    np.testing.assert_array_equal(input_history(model), before)
    model.train()
    model(100 * X)
    assert input_history(model)[0] > before[0]


@pytest.mark.parametrize("size", [1e-3, 1.0, 600.0])
def test_evaluation_before_any_step_takes_scales_of_the_data(size):
    model, plain = linear(), nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    model.eval()
    both = [
        nnx.jit(nnx.value_and_grad(lambda m, x: (m(x) ** 2).sum()))(m, size * X)
        for m in (model, plain)
    ]
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)
    assert not input_history(model).any()


def test_vmap_over_inputs_takes_the_largest():
    model = linear()
    nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, jnp.stack([X, 5 * X]))
    np.testing.assert_allclose(input_history(model)[0], 5 * jnp.abs(X).max(), rtol=1e-6)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def test_layers_of_a_scan_have_histories_of_their_own():
    model = Stacked(nnx.Rngs(0))
    assert paths(jaxfp8.nnx.fp8_training(model, DELAYED)) == ["layers"]
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: ((m(X) - 0.3) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train(model, optimizer)) for _ in range(12)]
    history = np.asarray(model.layers.dot_general.input_amax_history[...])
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(history[0], jnp.abs(X).max(), rtol=1e-6)
    assert history.shape == (3, 4) and (history[1:] < 1).all() and (history > 0).all()


@pytest.mark.parametrize("value", [1e30, 0.0, np.inf], ids=str)
def test_extreme_inputs_give_no_nan(value):
    model = linear()
    for x in (X, X.at[0, 0].set(value), X):
        gradients = nnx.jit(step)(model, x)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert np.isfinite(input_history(model)).all()


def test_einsum_takes_it_too():
    model = nnx.Sequential(nnx.Einsum("bi,hio->bho", (2, 16, 4), rngs=nnx.Rngs(0)))
    exact = model(X)
    assert paths(jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())) == ["layers/0"]
    assert np.linalg.norm(model(X) - exact) < 0.06 * np.linalg.norm(exact)


def test_products_are_on_8_bit_operands():
    report = jaxfp8.explain(lambda x: linear()(x).sum())(X)
    assert report.scaled == 1 and report.others == 0


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: jaxfp8.nnx.Fp8DotGeneral(jaxfp8.INT8_DYNAMIC),
            TypeError,
            "DelayedScaling or Current",
        ),
        (
            lambda: jaxfp8.nnx.fp8_training(nnx.Sequential(nnx.relu)),
            ValueError,
            "has no layer to change",
        ),
        (lambda: jaxfp8.nnx.fp8_training(linear()), ValueError, "has no layer to change"),
    ],
)
def test_wrong_use_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_layer_with_8_bit_weights_is_refused():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    with pytest.raises(ValueError, match="training needs float master weights"):
        jaxfp8.nnx.fp8_training(model)


@pytest.mark.parametrize("recipe", [DELAYED, jaxfp8.CurrentScaling()], ids=["delayed", "current"])
def test_undone_training_is_the_model_that_it_was(recipe):
    made = nnx.Sequential(
        nnx.Linear(16, 8, rngs=nnx.Rngs(0)),
        nnx.Einsum("nk,km->nm", (8, 4), rngs=nnx.Rngs(1)),
    )
    before = nnx.clone(made)
    assert len(jaxfp8.nnx.fp8_training(made, recipe).changed) == 2
    nnx.jit(step)(made, X)
    assert paths(jaxfp8.nnx.dequantize(made, where="layers/1")) == ["layers/1"]
    assert paths(jaxfp8.nnx.dequantize(made)) == ["layers/0"]
    assert nnx.graphdef(made) == nnx.graphdef(before)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(made, X), before(X))


def test_a_model_that_trains_in_fp8_is_quantized_as_any_other():
    made, plain = linear(), nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    changes = [jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC) for model in (made, plain)]
    assert changes[0] == changes[1] and len(changes[0].changed) == 1
    assert nnx.graphdef(made) == nnx.graphdef(plain)
    np.testing.assert_array_equal(made(X), plain(X))
    jaxfp8.nnx.dequantize(made)
    assert made.layers[0].dot_general is jax.lax.dot_general
