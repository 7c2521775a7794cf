"""8-bit layers of nnx against the layers of Flax that they stand for."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8 import testing

run = nnx.jit(lambda layer, x: layer(x))


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def bias_init(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def rngs():
    return nnx.Rngs(0)


# Name: (layer of Flax, shape of an input, how it is called, axes that its product sums over).
LAYERS = {
    "Linear": (
        lambda: nnx.Linear(40, 24, bias_init=bias_init, rngs=rngs()),
        (3, 5, 40),
        (2,),
    ),
    "no bias": (lambda: nnx.Linear(40, 24, use_bias=False, rngs=rngs()), (40,), (0,)),
    "LinearGeneral": (
        lambda: nnx.LinearGeneral((4, 10), (3, 8), axis=(1, -1), bias_init=bias_init, rngs=rngs()),
        (2, 4, 5, 10),
        (1, 3),
    ),
    "batch axis": (
        lambda: nnx.LinearGeneral(10, (3, 8), batch_axis={0: 4}, bias_init=bias_init, rngs=rngs()),
        (4, 5, 10),
        (2,),
    ),
    "Einsum": (
        lambda: nnx.Einsum("bti,hio->bhto", (2, 10, 8), (2, 8), bias_init=bias_init, rngs=rngs()),
        (3, 5, 10),
        (2,),
    ),
    "Einsum with batch": (
        lambda: nnx.Einsum("...ei,eio->...eo", (4, 10, 8), rngs=rngs()),
        (3, 5, 4, 10),
        (3,),
    ),
}
RECIPES = [jaxfp8.FP8_W8A16, jaxfp8.INT8_ASYMMETRIC]


def rounded_input(x, recipe, axes):
    if recipe.activation is None:
        return x
    return jaxfp8.dequantize(recipe.quantize_activation(x, axes), jnp.float32)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_its_float_twin_on_rounded_operands(name, recipe):
    make, shape, axes = LAYERS[name]
    layer = make()
    narrow = getattr(jaxfp8.nnx, type(layer).__name__).of(layer, recipe)
    x = normal(*shape, seed=1)
    x8 = rounded_input(x, recipe, axes)
    got, exact, plain = run(narrow, x), run(narrow.to_float(), x8), run(layer, x)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(got - plain) < 0.06 * np.linalg.norm(plain)


@pytest.mark.parametrize("name", LAYERS)
def test_scales_lie_along_what_is_not_summed(name):
    layer = LAYERS[name][0]()
    narrow = getattr(jaxfp8.nnx, type(layer).__name__).of(layer, jaxfp8.INT8_DYNAMIC)
    widths = np.asarray(jnp.abs(narrow.to_float().kernel[...]) / narrow.weight.scale)
    assert narrow.weight.scale.size < narrow.weight.size
    np.testing.assert_allclose(np.round(widths), widths, atol=1e-3)


def test_embedding_looks_up_and_attends():
    layer = nnx.Embed(50, 16, rngs=rngs())
    narrow = jaxfp8.nnx.Embed.of(layer, jaxfp8.INT8_DYNAMIC)
    wide = narrow.to_float()
    ids = jnp.array([[0, 49], [-1, 3]])
    np.testing.assert_array_equal(narrow(ids), wide(ids))
    query = rounded_input(normal(3, 16), jaxfp8.INT8_DYNAMIC, (1,))
    np.testing.assert_allclose(narrow.attend(query), wide.attend(query), rtol=1e-5, atol=1e-5)
    assert narrow.embedding_scale.shape == (50, 1)


@pytest.mark.parametrize(
    ("settings", "dtype", "expected"),
    [
        ({}, jnp.bfloat16, jnp.float32),
        ({"dtype": jnp.bfloat16}, jnp.float32, jnp.bfloat16),
        ({"param_dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16),
        ({"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}, jnp.float32, jnp.float32),
    ],
    ids=["parameters promote", "dtype", "param_dtype", "preferred_element_type"],
)
def test_dtype_is_that_of_the_layer_of_flax(settings, dtype, expected):
    x = normal(2, 8).astype(dtype)
    layer = jaxfp8.nnx.Linear(8, 4, recipe=jaxfp8.FP8_DYNAMIC, rngs=rngs(), **settings)
    assert layer(x).dtype == nnx.Linear(8, 4, rngs=rngs(), **settings)(x).dtype == expected


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: jaxfp8.nnx.Linear(8, 4, rngs=rngs()), (2, 7)),
        (lambda: jaxfp8.nnx.Linear(8, 4, rngs=rngs()), ()),
        (lambda: jaxfp8.nnx.LinearGeneral((2, 4), 3, axis=(0, 1), rngs=rngs()), (2, 5, 4)),
    ],
    ids=["Linear", "scalar", "LinearGeneral"],
)
def test_other_feature_size_is_refused(make, shape):
    layer = make()
    name = type(layer).__name__
    with pytest.raises(ValueError, match=f"`jaxfp8.nnx.{name}`: the input has shape .*made for"):
        layer(jnp.ones(shape))


def test_gradient_reaches_input_and_bias_and_passes_codes_by():
    layer = jaxfp8.nnx.Linear(8, 4, recipe=jaxfp8.FP8_DYNAMIC, rngs=rngs())
    x = normal(3, 8)
    state = nnx.grad(lambda layer: layer(x).sum())(layer)
    assert list(state) == ["bias"]
    np.testing.assert_allclose(state["bias"][...], 3.0)
    wide = np.asarray(layer.to_float().kernel[...], np.float64)
    got = jax.grad(lambda x: layer(x).sum())(x)
    np.testing.assert_allclose(got, np.ones((3, 4)) @ wide.T, rtol=1e-5)


def test_product_runs_on_a_kernel():
    layer = jaxfp8.nnx.Linear(64, 32, recipe=jaxfp8.INT8_DYNAMIC, rngs=rngs())
    before = testing.kernel_calls()
    with jaxfp8.strict():
        jax.block_until_ready(nnx.jit(lambda layer, x: layer(x))(layer, normal(4, 64)))
    after = testing.kernel_calls()
    assert sum(after.values()) == sum(before.values()) + 1


def test_scope_names_the_layer():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()))
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    jaxpr = jax.make_jaxpr(model)(normal(2, 8))
    names = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    assert "layers/0" in names


def test_a_gradient_of_8_bit_codes_is_refused():
    layer = jaxfp8.nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    wrt = nnx.DiffState(0, jaxfp8.nnx.QParam)
    with pytest.raises(TypeError, match=r"`kernel` has 8-bit codes, of which a gradient"):
        nnx.grad(lambda layer: layer(jnp.ones((2, 8))).sum(), argnums=wrt)(layer)


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "LoRALinear", "Einsum", "Embed"])
def test_a_signature_has_the_arguments_of_flax_and_ours(name):
    """The class of Flax hides its own behind a metaclass, its constructor does not."""
    _, *flax = inspect.signature(getattr(nnx, name).__init__).parameters.values()
    shown = inspect.signature(getattr(jaxfp8.nnx, name)).parameters
    ours = ["recipe", "layer", "path", "scale"]
    assert [one for key, one in shown.items() if key not in ours] == flax
    assert all(shown[key].kind is inspect.Parameter.KEYWORD_ONLY for key in ours)
    assert shown["recipe"].default is jaxfp8.FP8_W8A16


def test_a_subclass_with_a_constructor_shows_its_own_signature():
    class Square(jaxfp8.nnx.Linear):
        def __init__(self, size, *, rngs):
            super().__init__(size, size, rngs=rngs)

    class Named(jaxfp8.nnx.Linear):
        pass

    assert str(inspect.signature(Square)) == "(size, *, rngs)"
    assert inspect.signature(Named) == inspect.signature(jaxfp8.nnx.Linear)
    assert Square(4, rngs=rngs()).in_features == 4
