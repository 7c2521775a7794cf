"""What 8-bit layers refuse, and how they say so."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen.layers import normal

import jaxfp8
import jaxfp8.linen


def test_float_variables_in_an_8_bit_layer_say_how_to_convert_them():
    x = normal(2, 8)
    variables = nn.Dense(4).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"`kernel` is float32.*jaxfp8.linen.quantize"):
        jaxfp8.linen.Dense(4).apply(variables, x)


def test_a_static_recipe_without_calibration_says_how_to_calibrate():
    x, layer = normal(2, 8), jaxfp8.linen.Dense(4, recipe=jaxfp8.FP8_STATIC)
    variables = layer.init(jax.random.key(0), x)
    del variables["params"]["input_scale"]
    with pytest.raises(ValueError, match=r"`input_scale` is missing.*jaxfp8.linen.quantize"):
        layer.apply(variables, x)


def test_another_feature_size_is_named():
    layer = jaxfp8.linen.Dense(4)
    variables = layer.init(jax.random.key(0), normal(2, 8))
    with pytest.raises(ValueError, match=r"`kernel` has shape \(8, 4\), but the input asks"):
        layer.apply(variables, normal(2, 16))


@pytest.mark.parametrize(
    ("made", "applied", "says"),
    [
        (
            jaxfp8.INT8_DYNAMIC,
            jaxfp8.FP8_DYNAMIC,
            r"\[.*FP8_DYNAMIC holds it as QArray\(float8_e4m3fn",
        ),
        (jaxfp8.FP8_W8A16, jaxfp8.FP8_BLOCK, r".*\]\), but FP8_BLOCK holds .*float32\[2,2\]"),
        (jaxfp8.INT8_DYNAMIC, jaxfp8.Recipe(name="wide", weight=None), ".*wide holds it as floats"),
    ],
    ids=["dtype", "tiles", "floats"],
)
@pytest.mark.parametrize("kind", ["Dense", "DenseGeneral", "Einsum", "Embed"])
def test_weights_of_another_recipe_are_refused(kind, made, applied, says):
    def model(recipe):
        layer = getattr(jaxfp8.linen, kind)
        fields = {"Einsum": ((256, 256), "td,dk->tk"), "Embed": (256, 256)}.get(kind, (256,))
        return nn.Sequential([layer(*fields, recipe=recipe)])

    x = jnp.arange(2) if kind == "Embed" else normal(2, 256)
    variables = model(made).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=rf"{kind} at layers_0`: `\w+` is QArray\(\w*{says}"):
        model(applied).apply(variables, x)
    with pytest.raises(TypeError, match=r"jaxfp8\.linen\.quantize"):
        jaxfp8.linen.quantize(model(applied), variables, x)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            lambda q: {"qvalue": q.qvalue, "scale": q.scale[0]},
            r"scale of `kernel` has shape \(4,\)",
        ),
        (lambda q: {"qvalue": q.qvalue}, "its codes need their `scale`"),
    ],
    ids=["scale of rank 1", "no scale"],
)
def test_parts_of_a_checkpoint_that_make_no_weight_are_refused(parts, says):
    layer, x = jaxfp8.linen.Dense(4, recipe=jaxfp8.FP8_W8A16, use_bias=False), normal(2, 8)
    found = parts(layer.init(jax.random.key(0), x)["params"]["kernel"])
    with pytest.raises(ValueError, match=says):
        jaxfp8.linen.quantize(layer, {"params": {"kernel": found}}, x)
    if "scale" in found:
        with pytest.raises(ValueError, match=says):
            layer.apply({"params": {"kernel": jaxfp8.QArray(**found)}}, x)


def test_recipes_that_hold_weights_alike_share_variables():
    x = normal(2, 8)
    variables = jaxfp8.linen.Dense(4, recipe=jaxfp8.INT8_DYNAMIC).init(jax.random.key(0), x)
    got = jaxfp8.linen.Dense(4, recipe=jaxfp8.INT8_W8A16).apply(variables, x)
    kernel = jaxfp8.dequantize(variables["params"]["kernel"])
    np.testing.assert_allclose(got, x @ kernel, rtol=1e-5, atol=1e-6)


@pytest.fixture
def mesh():
    made = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(made):
        yield made


CUT = r"has 64 values per shard on axis 0, but tiles of 128 have to lie within a shard"


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_tiles_that_a_named_mesh_axis_cuts_are_refused(mesh, box):
    init = box(nn.initializers.lecun_normal(), ("model", None))
    layer = jaxfp8.linen.Dense(256, kernel_init=init, recipe=jaxfp8.FP8_BLOCK)
    error = pytest.raises(ValueError, match=rf"`jaxfp8\.linen\.Dense`: `kernel` {CUT}")
    with nn.logical_axis_rules([("model", "model")]), error:
        jax.eval_shape(layer.init, jax.random.key(0), normal(2, 256))


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("boxed", [True, False])
def test_tiles_that_the_shards_of_variables_cut_are_refused(mesh, boxed):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
    wide = nn.Sequential([nn.Dense(256, kernel_init=init)])
    variables = wide.init(jax.random.key(0), normal(2, 256))
    variables = jax.device_put(variables, nn.get_sharding(variables, mesh))
    narrow = nn.Sequential([jaxfp8.linen.Dense(256, recipe=jaxfp8.FP8_BLOCK)])
    with pytest.raises(ValueError, match=rf"layers_0.*kernel` {CUT}"):
        given = variables if boxed else nn.unbox(variables)
        jaxfp8.linen.quantize(narrow, given, normal(2, 256))


def test_a_layer_below_is_named_by_its_path():
    model = nn.Sequential([jaxfp8.linen.Dense(8), jaxfp8.linen.Dense(4)])
    variables = model.init(jax.random.key(0), normal(2, 8))
    variables["params"]["layers_1"]["kernel"] = jnp.ones((8, 4))
    with pytest.raises(TypeError, match=r"`jaxfp8.linen.Dense at layers_1`"):
        model.apply(variables, normal(2, 8))


def test_training_without_its_collection_says_what_is_missing():
    layer = nn.Dense(4, dot_general_cls=jaxfp8.linen.Fp8DirectDotGeneralOp)
    variables = layer.init(jax.random.key(0), normal(2, 8))
    with pytest.raises(ValueError, match=r"collection `_overwrite_with_gradient` lacks it"):
        layer.apply({"params": variables["params"]}, normal(2, 8))


def test_a_history_of_another_length_is_refused():
    def layer(length):
        recipe = jaxfp8.DelayedScaling(amax_history_length=length)
        cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
        return nn.Dense(4, dot_general_cls=cls)

    variables = layer(16).init(jax.random.key(0), normal(2, 8))
    with pytest.raises(ValueError, match=r"has shape \(16,\), but the recipe needs \(32,\)"):
        layer(32).apply(variables, normal(2, 8))


def test_a_recipe_of_inference_is_not_for_training():
    cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=jaxfp8.INT8_DYNAMIC)
    with pytest.raises(TypeError, match="recipes of inference go with the layers"):
        nn.Dense(4, dot_general_cls=cls).init(jax.random.key(0), normal(2, 8))


def test_a_recipe_of_training_is_not_for_8_bit_parameters():
    layer = jaxfp8.linen.Dense(4, recipe=jaxfp8.DelayedScaling())
    with pytest.raises(TypeError, match=r"recipes of training go to `jaxfp8.fp8_dot_general`"):
        layer.init(jax.random.key(0), normal(2, 8))


def test_shared_scaling_wants_a_state():
    with pytest.raises(ValueError, match="pass all variables"):
        jaxfp8.linen.shared_scaling({"params": {}})


@pytest.mark.slow
def test_importing_the_package_does_not_import_flax():
    code = "import sys, jaxfp8; assert not {'flax', 'optax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


X = jnp.ones((2, 8))
MISUSED = {
    "a recipe": (
        lambda m, v: jaxfp8.linen.quantize(m, v, X, recipe=jaxfp8.INT8_DYNAMIC),
        "make the layers",
    ),
    "both results": (lambda m, v: jaxfp8.linen.report(m, (v, 0), X), "first result of `quantize`"),
    "of nnx": (lambda m, v: jaxfp8.linen.quantize(3, v, X), "see `jaxfp8.nnx.quantize`"),
}


@pytest.mark.parametrize(("call", "says"), MISUSED.values(), ids=MISUSED)
def test_arguments_of_another_function_say_where_they_belong(call, says):
    model = jaxfp8.linen.Dense(4)
    with pytest.raises(TypeError, match=says):
        call(model, model.init(jax.random.key(0), X))


def test_an_argument_of_the_model_may_be_called_recipe():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, recipe):
            return recipe * jaxfp8.linen.Dense(4)(x)

    variables = Model().init(jax.random.key(0), X, recipe=2)
    assert len(jaxfp8.linen.quantize(Model(), variables, X, recipe=2)[1].rows) == 1


def test_quantizing_for_a_model_without_8_bit_layers_is_an_error():
    x, model = normal(2, 8), nn.Dense(4)
    with pytest.raises(ValueError, match=r"`model` has no layer of `jaxfp8\.linen`"):
        jaxfp8.linen.quantize(model, model.init(jax.random.key(0), x), x)
