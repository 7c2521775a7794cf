"""FP8 training in the layers of Flax: what a whole step is made of."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core.scope import DenyList
from flax.training.train_state import TrainState

import jaxfp8
import jaxfp8.linen

RECIPES = {"delayed": jaxfp8.DelayedScaling(), "current": jaxfp8.CurrentScaling()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_explain_lists_every_product_of_a_step_with_its_kernel(recipe):
    cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    layers = [nn.Dense(64, dot_general_cls=cls), nn.relu, nn.Dense(8, dot_general_cls=cls)]
    model, x = nn.Sequential(layers), jnp.ones((16, 32))
    variables = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-3))

    @jax.jit
    def step(state):
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    report = jaxfp8.explain(step)(state)
    assert (report.missed, report.others) == ((), 0)
    found = {(call.lhs.dtype[7:11], call.rhs.dtype[7:11], call.dims[1:]) for call in report.calls}
    forward = {("e4m3", "e4m3", (16, 64, 32)), ("e4m3", "e4m3", (16, 8, 64))}
    weights = {("e4m3", "e5m2", (32, 64, 16)), ("e4m3", "e5m2", (64, 8, 16))}
    inputs = {("e5m2", "e4m3", (16, 64, 8)), ("e5m2", "e4m3", (16, 32, 64))}
    assert found == forward | weights | inputs
    assert all(call.kernels["cpu"] and call.platforms["cpu"] is None for call in report.calls)
    assert all("layers_" in call.path and call.file == __file__ for call in report.calls)


def second_derivative(cls, variables, x, *, mode):
    """Of a layer's squared outputs, twice along its kernel."""
    layer = nn.Dense(8, dot_general_cls=cls)

    def along(kernel):
        params = {**variables["params"], "kernel": kernel}
        return (layer.apply({**variables, "params": params}, x) ** 2).sum()

    kernel = variables["params"]["kernel"]
    if mode == "reverse":
        return jax.grad(lambda k: jnp.vdot(jax.grad(along)(k), kernel))(kernel)
    return jax.jvp(jax.grad(along), (kernel,), (kernel,))[1]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_second_derivatives_are_near_those_of_floats_or_refused(mode):
    x = jax.random.normal(jax.random.key(0), (4, 32))
    for cls, recipe in (("current", "CurrentScaling"), ("delayed", "DelayedScaling")):
        cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=RECIPES[cls])
        variables = nn.Dense(8, dot_general_cls=cls).init(jax.random.key(1), x)
        with pytest.raises(TypeError, match=f"`rhs` is differentiated twice, but {recipe}"):
            second_derivative(cls, variables, x, mode=mode)
    recipe = jaxfp8.CurrentScaling(second_derivatives=True)
    cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    want, got = (second_derivative(c, variables, x, mode=mode) for c in (None, cls))
    assert jnp.linalg.norm(got - want) < 0.06 * jnp.linalg.norm(want)


@pytest.mark.parametrize("mutable", [True, DenyList("intermediates"), ["fp8_codes"]], ids=str)
def test_codes_are_kept_if_their_collection_is_named(mutable):
    cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=RECIPES["current"])
    layer, x = nn.Dense(8, dot_general_cls=cls), jnp.ones((4, 32))
    variables = layer.init(jax.random.key(0), x)
    _, kept = layer.apply(variables, x, mutable=mutable)
    assert ("fp8_codes" in kept) == isinstance(mutable, list)
