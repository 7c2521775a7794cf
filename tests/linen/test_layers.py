"""Layers with 8-bit parameters: as Flax's in name and shape, close in value, clear when misused."""

import functools
import subprocess
import sys

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxfp8
import jaxfp8.linen

# Relative error of a layer's output, by recipe.
BOUND = {"W8A16": 0.04, "W8A16_INT8": 0.015, "FP8_DYNAMIC": 0.05, "FP8": 0.06, "FP8_BLOCK": 0.05}
BOUND |= {"INT8": 0.02, "INT8_ASYMMETRIC": 0.02}
RECIPES = [getattr(jaxfp8, name) for name in BOUND]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def both(theirs, ours, x, *args):
    """Outputs of Flax's layer and of ours with the same variables, and the variables of ours."""
    variables = jax.jit(theirs.init)(jax.random.key(0), x, *args)
    bias = lambda p: jax.tree.map(lambda b: b + normal(*b.shape, seed=3) if b.ndim else b, p)  # noqa: E731
    variables = {"params": bias(variables["params"])}
    narrow = jaxfp8.linen.quantize(ours, variables, x, *args)
    return jax.jit(theirs.apply)(variables, x, *args), jax.jit(ours.apply)(narrow, x, *args), narrow


@pytest.mark.parametrize("recipe", RECIPES, ids=BOUND)
def test_dense_is_flax_dense(recipe):
    x = normal(9, 256)
    want, got, narrow = both(nn.Dense(64), jaxfp8.linen.Dense(64, recipe=recipe), x)
    assert got.dtype == want.dtype and off(got, want) < BOUND[recipe.name]
    assert narrow["params"]["kernel"].qvalue.dtype == recipe.weight.dtype


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"features": (4, 6)}, (3, 32)),
        ({"features": 8, "axis": (-2, -1)}, (2, 3, 4, 8)),
        ({"features": (4,), "axis": (1, -1)}, (2, 4, 3, 8)),
        ({"features": 4, "axis": (-1, 1)}, (2, 5, 5)),
        ({"features": 4, "axis": (2, 1)}, (2, 3, 5)),
        ({"features": 8, "axis": -1, "batch_dims": (0,)}, (3, 5, 16)),
        ({"features": 8, "use_bias": False}, (3, 16)),
    ],
)
def test_dense_general_is_flax_dense_general(fields, shape):
    x = normal(*shape)
    theirs, ours = (module.DenseGeneral(**fields) for module in (nn, jaxfp8.linen))
    want, got, narrow = both(theirs, ours, x)
    assert got.shape == want.shape and off(got, want) < BOUND["W8A16"]
    shapes = jax.tree.map(jnp.shape, theirs.init(jax.random.key(0), x)["params"])
    assert narrow["params"]["kernel"].shape == shapes["kernel"]


@pytest.mark.parametrize(
    ("kernel", "equation", "shape"),
    [
        ((5, 6, 7), "abc,cde->abde", (3, 4, 5)),
        ((2, 8, 6), "bthd,hdk->bthk", (3, 4, 2, 8)),
        ((6, 8), "...d,kd->...k", (3, 4, 8)),
        ((8, 6), "td,dk->kt", (4, 8)),
    ],
)
def test_einsum_is_flax_einsum(kernel, equation, shape):
    x = normal(*shape)
    theirs, ours = (module.Einsum(kernel, equation) for module in (nn, jaxfp8.linen))
    want, got, narrow = both(theirs, ours, x)
    assert got.shape == want.shape and off(got, want) < BOUND["W8A16"]
    shapes = jax.tree.map(jnp.shape, theirs.init(jax.random.key(0), x)["params"])
    assert narrow["params"]["bias"].shape == shapes["bias"]


def test_equation_may_be_given_to_the_call():
    layer, x = jaxfp8.linen.Einsum((8, 6)), normal(4, 8)
    y, variables = layer.init_with_output(jax.random.key(0), x, "td,dk->tk")
    np.testing.assert_array_equal(layer.apply(variables, x, "td,dk->tk"), y)


@pytest.mark.parametrize(
    "recipe", [jaxfp8.W8A16, jaxfp8.FP8_BLOCK, jaxfp8.INT8], ids=lambda r: r.name
)
def test_embed_looks_up_rows_and_attends_to_them(recipe):
    indices = jnp.array([[0, 299, 17], [-1, 130, 4]])
    theirs = nn.Embed(300, 144)
    ours = jaxfp8.linen.Embed(300, 144, recipe=recipe)
    want, got, narrow = both(theirs, ours, indices)
    assert off(got, want) < BOUND[recipe.name]
    table = jaxfp8.dequantize(narrow["params"]["embedding"])
    np.testing.assert_array_equal(got, table[indices])
    logits = ours.apply(narrow, got, method="attend")
    assert off(logits, got @ table.T) < BOUND[recipe.name]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_an_index_out_of_range_gives_nan_as_in_flax(dtype):
    recipe = jaxfp8.Recipe(name="rows", weight=jaxfp8.Quantization(dtype=dtype))
    layer = jaxfp8.linen.Embed(5, 4, recipe=recipe)
    rows = layer.apply(layer.init(jax.random.key(0), jnp.arange(2)), jnp.array([4, 5, -5, -6]))
    np.testing.assert_array_equal(np.isnan(rows).all(1), [False, True, False, True])


def test_bfloat16_layer_computes_in_bfloat16():
    layer = jaxfp8.linen.Dense(16, dtype=jnp.bfloat16, recipe=jaxfp8.FP8_DYNAMIC)
    y, _ = layer.init_with_output(jax.random.key(0), normal(3, 32))
    assert y.dtype == jnp.bfloat16


def test_gradient_of_the_input_is_that_of_the_dequantised_layer():
    x, layer = normal(5, 32), jaxfp8.linen.Dense(16, recipe=jaxfp8.INT8)
    variables = layer.init(jax.random.key(0), x)
    got = jax.grad(lambda x: jnp.sum(jnp.sin(layer.apply(variables, x))))(x)
    kernel = jaxfp8.dequantize(variables["params"]["kernel"])
    want = jax.grad(lambda x: jnp.sum(jnp.sin(x @ kernel)))(x)
    assert off(got, want) < 0.02


class Net(nn.Module):
    """Layers under a scan, named as Flax names them, from one module or the other."""

    dense: object
    embed: object

    @nn.compact
    def __call__(self, tokens):
        x = self.embed(50, 32, name="tokens")(tokens)

        class Body(nn.Module):
            dense: object

            @nn.compact
            def __call__(self, x, _):
                return x + nn.tanh(self.dense(32)(x)), None

        scan = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(self.dense, name="layers")(x, None)[0]


def test_a_model_with_scanned_layers_is_quantised_whole():
    tokens = jnp.arange(6).reshape(2, 3)
    wide = Net(nn.Dense, nn.Embed)
    narrow = Net(
        functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8),
        functools.partial(jaxfp8.linen.Embed, recipe=jaxfp8.W8A16),
    )
    variables = wide.init(jax.random.key(0), tokens)
    params = jaxfp8.linen.quantize(narrow, variables, tokens)["params"]
    layers = params["layers"]["Dense_0"]
    assert layers["kernel"].shape == (3, 32, 32) and layers["kernel"].scale.shape == (3, 1, 1)
    assert layers["input_scale"].shape == (3,)
    got = jax.jit(narrow.apply)({"params": params}, tokens)
    assert off(got, wide.apply(variables, tokens)) < 0.06


def test_calibration_grows_with_more_inputs_and_leaves_the_weights():
    x, layer = normal(4, 16), jaxfp8.linen.Dense(8, recipe=jaxfp8.FP8)
    variables = nn.Dense(8).init(jax.random.key(0), x)
    first = jaxfp8.linen.quantize(layer, variables, x)
    second = jaxfp8.linen.quantize(layer, first, 3 * x)
    third = jaxfp8.linen.quantize(layer, second, x)
    scales = [float(v["params"]["input_scale"]) for v in (first, second, third)]
    np.testing.assert_allclose(scales, np.float32([1, 3, 3]) * np.abs(x).max() / 448, rtol=1e-6)
    np.testing.assert_array_equal(first["params"]["kernel"].scale, third["params"]["kernel"].scale)


def test_sharding_names_go_to_the_codes_and_to_the_scale():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layer = jaxfp8.linen.Dense(256, kernel_init=init, recipe=jaxfp8.FP8_DYNAMIC)
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), normal(2, 256)))
    kernel = specs["params"]["kernel"]
    assert kernel.qvalue == PartitionSpec("embed", "mlp")
    assert kernel.scale == PartitionSpec(None, "mlp")


def test_quantising_keeps_the_names_of_float_variables():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    variables = nn.Dense(256, kernel_init=init).init(jax.random.key(0), normal(2, 256))
    layer = jaxfp8.linen.Dense(256, kernel_init=init, recipe=jaxfp8.FP8_BLOCK)
    kernel = nn.get_partition_spec(jaxfp8.linen.quantize(layer, variables, normal(2, 256)))
    assert kernel["params"]["kernel"].scale == PartitionSpec("embed", "mlp")


def test_8_bit_parameters_go_through_orbax(tmp_path):
    import orbax.checkpoint

    layer, x = jaxfp8.linen.Dense(8, recipe=jaxfp8.FP8_DYNAMIC), normal(4, 16)
    variables = layer.init(jax.random.key(0), x)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables", variables)
    np.testing.assert_array_equal(layer.apply(restored, x), layer.apply(variables, x))


SAVED = {"fp8": jaxfp8.FP8_DYNAMIC, "static": jaxfp8.FP8, "int8": jaxfp8.INT8}
SAVED["partial tiles"] = jaxfp8.Recipe(
    name="tiles of 6", weight=jaxfp8.Quantization(dtype=jnp.int8, granularity=(6, 1))
)
SAVED["zero points"] = jaxfp8.Recipe(
    name="zero points", weight=jaxfp8.Quantization(dtype=jnp.int8, symmetric=False)
)


@pytest.mark.parametrize("recipe", SAVED.values(), ids=SAVED)
def test_8_bit_parameters_go_through_msgpack(recipe):
    layer, x = jaxfp8.linen.Dense(8, recipe=recipe), normal(4, 16)
    variables, others = (layer.init(jax.random.key(i), x) for i in (0, 1))
    data = flax.serialization.to_bytes(variables)
    restored = flax.serialization.from_bytes(others, data)
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    np.testing.assert_array_equal(layer.apply(restored, x), layer.apply(variables, x))
    plain = jaxfp8.linen.quantize(layer, flax.serialization.msgpack_restore(data), x)
    assert jax.tree.structure(plain) == jax.tree.structure(variables)
    np.testing.assert_array_equal(layer.apply(plain, x), layer.apply(variables, x))


def test_state_of_another_recipe_is_refused():
    x = normal(4, 16)
    with_zero_point, without = (
        jaxfp8.linen.Dense(8, recipe=SAVED[name]).init(jax.random.key(0), x)
        for name in ("zero points", "int8")
    )
    with pytest.raises(
        ValueError, match=r"has \['qvalue', 'scale', 'zero_point'\], but the target"
    ):
        flax.serialization.from_bytes(without, flax.serialization.to_bytes(with_zero_point))


def test_what_orbax_restores_without_a_target_is_converted_once(tmp_path):
    import orbax.checkpoint

    layer, x = jaxfp8.linen.Dense(8, recipe=jaxfp8.FP8_DYNAMIC), normal(4, 16)
    variables = layer.init(jax.random.key(0), x)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables")
    with pytest.raises(TypeError, match=r"is a dictionary of .*jaxfp8\.linen\.quantize"):
        layer.apply(restored, x)
    again = jaxfp8.linen.quantize(layer, restored, x)
    np.testing.assert_array_equal(layer.apply(again, x), layer.apply(variables, x))


class Classifier(nn.Module):
    """8-bit layers of every kind, some in a scan and rematerialised."""

    recipe: jaxfp8.Recipe

    @nn.compact
    def __call__(self, tokens):
        x = jaxfp8.linen.Embed(16, 32, recipe=self.recipe)(tokens)

        class Body(nn.Module):
            recipe: jaxfp8.Recipe

            @nn.compact
            def __call__(self, x, _):
                x = nn.LayerNorm()(x)
                return x + jaxfp8.linen.Dense(32, recipe=self.recipe)(x), None

        body = nn.remat(Body)
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return jaxfp8.linen.DenseGeneral(8, recipe=self.recipe)(scan(self.recipe)(x, None)[0])


@pytest.mark.parametrize("recipe", [jaxfp8.W8A16, jaxfp8.FP8, jaxfp8.INT8], ids=lambda r: r.name)
def test_an_optimiser_trains_the_floats_and_leaves_the_8_bits(recipe):
    model, tokens = Classifier(recipe), jnp.arange(6).reshape(2, 3)
    params = model.init(jax.random.key(0), tokens)["params"]
    floats, held = jaxfp8.linen.partition(params)
    assert jax.tree.structure(jaxfp8.linen.combine(floats, held)) == jax.tree.structure(params)
    optimiser = optax.adamw(1e-2, weight_decay=0.1)

    def loss(floats):
        y = model.apply({"params": jaxfp8.linen.combine(floats, held)}, tokens)
        return jnp.mean((y - 1) ** 2)

    @jax.jit
    def step(floats, state):
        value, gradients = jax.value_and_grad(loss)(floats)
        updates, state = optimiser.update(gradients, state, floats)
        return value, optax.apply_updates(floats, updates), state

    state, values = optimiser.init(floats), []
    for _ in range(5):
        value, floats, state = step(floats, state)
        values.append(float(value))
    assert values == sorted(values, reverse=True) and np.isfinite(values).all()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("part", ["Embed_0", "DenseGeneral_0", "ScanBody_0"])
def test_a_gradient_of_8_bit_codes_is_refused(part, jit):
    model, tokens = Classifier(jaxfp8.W8A16), jnp.arange(6).reshape(2, 3)
    params = model.init(jax.random.key(0), tokens)["params"]
    (part,) = [name for name in params if part.removeprefix("Scan") in name]

    def loss(own):
        return model.apply({"params": {**params, part: own}}, tokens).sum()

    with pytest.raises(TypeError, match=r"a gradient is asked for.*jaxfp8\.linen\.partition"):
        jit(jax.grad(loss))(params[part])


# Wrong use


def test_float_variables_in_an_8_bit_layer_say_how_to_convert_them():
    x = normal(2, 8)
    variables = nn.Dense(4).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"`kernel` is float32.*jaxfp8.linen.quantize"):
        jaxfp8.linen.Dense(4).apply(variables, x)


def test_a_static_recipe_without_calibration_says_how_to_calibrate():
    x, layer = normal(2, 8), jaxfp8.linen.Dense(4, recipe=jaxfp8.FP8)
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
        (jaxfp8.INT8, jaxfp8.FP8_DYNAMIC, r"\[.*FP8_DYNAMIC holds it as QArray\(float8_e4m3fn"),
        (jaxfp8.W8A16, jaxfp8.FP8_BLOCK, r".*\]\), but FP8_BLOCK holds .*float32\[2,2\]"),
        (jaxfp8.INT8, jaxfp8.Recipe(name="wide", weight=None), ".*wide holds it as floats"),
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
    layer, x = jaxfp8.linen.Dense(4, recipe=jaxfp8.W8A16, use_bias=False), normal(2, 8)
    found = parts(layer.init(jax.random.key(0), x)["params"]["kernel"])
    with pytest.raises(ValueError, match=says):
        jaxfp8.linen.quantize(layer, {"params": {"kernel": found}}, x)
    if "scale" in found:
        with pytest.raises(ValueError, match=says):
            layer.apply({"params": {"kernel": jaxfp8.QArray(**found)}}, x)


def test_recipes_that_hold_weights_alike_share_variables():
    x = normal(2, 8)
    variables = jaxfp8.linen.Dense(4, recipe=jaxfp8.INT8).init(jax.random.key(0), x)
    got = jaxfp8.linen.Dense(4, recipe=jaxfp8.W8A16_INT8).apply(variables, x)
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
    cls = functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=jaxfp8.INT8)
    with pytest.raises(TypeError, match="recipes of inference go with the layers"):
        nn.Dense(4, dot_general_cls=cls).init(jax.random.key(0), normal(2, 8))


def test_a_recipe_of_training_is_not_for_8_bit_parameters():
    layer = jaxfp8.linen.Dense(4, recipe=jaxfp8.DelayedScaling())
    with pytest.raises(TypeError, match=r"recipes of training go to `jaxfp8.fp8_dot_general`"):
        layer.init(jax.random.key(0), normal(2, 8))


def test_shared_scaling_wants_a_state():
    with pytest.raises(ValueError, match="pass all variables"):
        jaxfp8.linen.shared_scaling({"params": {}})


def test_importing_the_package_does_not_import_flax():
    code = "import sys, jaxfp8; assert not {'flax', 'optax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_quantizing_for_a_model_without_8_bit_layers_is_an_error():
    x, model = normal(2, 8), nn.Dense(4)
    with pytest.raises(ValueError, match=r"`model` has no layer of `jaxfp8\.linen`"):
        jaxfp8.linen.quantize(model, model.init(jax.random.key(0), x), x)
