"""Static scales of inputs in a checkpoint, for layers that choose their own."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx


def normal(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def linear():
    return nnx.Sequential(nnx.Linear(32, 8, use_bias=False, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("left", ["input_scale", "input_zero_point", "output_scale"])
@pytest.mark.parametrize("recipe", [None, jaxfp8.FP8_DYNAMIC], ids=["weights", "dynamic"])
def test_static_scales_that_a_recipe_does_not_take_are_left_out_and_named(recipe, left):
    model = nnx.eval_shape(linear)
    held = {"layers.0.weight": jaxfp8.quantize(normal(8, 32)), f"layers.0.{left}": jnp.full(1, 0.5)}
    changes = jaxfp8.nnx.load(model, held, recipe=recipe)
    assert changes.left_scales == (f"layers.0.{left}",)
    assert "since the recipe chooses its own: layers.*." + left in str(changes)


@pytest.mark.parametrize("name", ["layers.1.input_scale", "layers.0.k_scale", "input_scale"])
def test_a_scale_of_no_layer_is_no_scale_that_is_left_out(name):
    model = nnx.eval_shape(linear)
    held = {"layers.0.weight": jaxfp8.quantize(normal(8, 32)), name: jnp.full(1, 0.5)}
    with pytest.raises(ValueError, match=f"no parameter takes {name}"):
        jaxfp8.nnx.load(model, held)


def test_a_zero_point_of_a_static_input_is_not_left_out():
    model = nnx.eval_shape(linear)
    held = {f"layers.0.input_{part}": jnp.ones(1) for part in ("scale", "zero_point")}
    held["layers.0.weight"] = jaxfp8.quantize(normal(8, 32))
    with pytest.raises(ValueError, match=r"no parameter takes layers.0.input_zero_point"):
        jaxfp8.nnx.load(model, held, recipe=jaxfp8.FP8_STATIC)
