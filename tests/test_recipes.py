"""Recipes: the granularity, dtypes and scales that their names promise, and the errors."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
from jaxfp8._recipes.rules import as_rules, choose

RECIPES = (
    jaxfp8.FP8_W8A16,
    jaxfp8.INT8_W8A16,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_STATIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
    jaxfp8.FP8_AS_INT8,
)
E4M3 = jnp.float8_e4m3fn


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("recipe", "weight", "weight_scale", "activation", "activation_scale"),
    [
        (jaxfp8.FP8_W8A16, E4M3, (1, 256), None, None),
        (jaxfp8.INT8_W8A16, jnp.int8, (1, 256), None, None),
        (jaxfp8.FP8_DYNAMIC, E4M3, (1, 256), E4M3, (3, 5, 1)),
        (jaxfp8.FP8_BLOCK, E4M3, (4, 2), E4M3, (3, 5, 4)),
        (jaxfp8.INT8_DYNAMIC, jnp.int8, (1, 256), jnp.int8, (3, 5, 1)),
        (jaxfp8.FP8_AS_INT8, E4M3, (1, 256), jnp.int8, (3, 5, 1)),
        (jaxfp8.INT8_ASYMMETRIC, jnp.int8, (1, 256), jnp.int8, (3, 5, 1)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_recipe_has_the_scales_of_its_name(
    recipe, weight, weight_scale, activation, activation_scale
):
    w = recipe.quantize_weight(normal(512, 256), contracting=(0,))
    x = recipe.quantize_activation(normal(3, 5, 512), contracting=(-1,))
    assert w.qvalue.dtype == weight and w.scale.shape == weight_scale
    if activation is None:
        assert isinstance(x, jax.Array)
    else:
        assert x.qvalue.dtype == activation and x.scale.shape == activation_scale


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_product_in_a_recipe_is_close_to_the_float_product(recipe):
    x, w = normal(9, 256), normal(256, 192, seed=1)
    scale = jnp.max(jnp.abs(x)) / 448 if recipe is jaxfp8.FP8_STATIC else None
    x_q = recipe.quantize_activation(x, (1,), scale=scale)
    y = jaxfp8.matmul(x_q, recipe.quantize_weight(w, (0,)))
    error = np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)
    assert 0 < error < 0.05


def test_asymmetric_activation_has_a_zero_point_for_each_token():
    x = jaxfp8.INT8_ASYMMETRIC.quantize_activation(normal(6, 32) + 3, (1,))
    assert x.zero_point.shape == (6, 1)


def test_static_activation_takes_a_scale_of_any_shape_with_one_element():
    x = jaxfp8.FP8_STATIC.quantize_activation(normal(6, 32), (1,), scale=jnp.full((1,), 0.5))
    assert x.scale.shape == () and x.scale == 0.5


def test_batch_axes_have_scales_of_their_own():
    experts = jaxfp8.INT8_DYNAMIC.quantize_weight(normal(4, 32, 16), contracting=(1,), batch=(0,))
    assert experts.scale.shape == (4, 1, 16)


def test_tiles_lie_along_the_last_contracted_and_the_last_free_axis():
    how = jaxfp8.Quantization(granularity=(16, 8))
    assert how.tiles((4, 32, 6, 64), contracting=(0, 1)) == {0: 1, 1: 16, 2: 1, 3: 8}


def test_a_tile_larger_than_its_axis_is_the_axis():
    how = jaxfp8.Quantization(granularity=(128, None))
    assert how.quantize(normal(96, 10), (0,)).scale.shape == (1, 1)


def test_partial_blocks_are_stated():
    w = jaxfp8.FP8_BLOCK.quantize_weight(normal(300, 130), contracting=(0,))
    assert w.scale.shape == (3, 2) and w.tile_sizes == (128, 128)


def test_power_of_two_scales_are_powers_of_two():
    recipe = jaxfp8.CurrentScaling(granularity="channel")
    q = recipe.quantization(recipe.gradient_dtype).quantize(normal(8, 64), (1,))
    exponents = np.log2(q.scale.astype(np.float32))
    assert q.qvalue.dtype == jnp.float8_e5m2 and (exponents == np.round(exponents)).all()


def test_recipes_are_equal_and_hash_alike_however_dtypes_are_named():
    one, other = jaxfp8.Quantization(dtype="int8"), jaxfp8.Quantization(dtype=jnp.int8)
    assert one == other and hash(one) == hash(other)
    assert len({*RECIPES}) == len(RECIPES)


def test_recipe_works_under_jit_and_vmap():
    w = jax.vmap(lambda w: jaxfp8.FP8_BLOCK.quantize_weight(w, (0,)))(normal(3, 256, 128))
    assert jax.jit(jaxfp8.dequantize)(w).shape == (3, 256, 128)


# Errors


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"dtype": jnp.float32}, TypeError, "`dtype` is float32"),
        ({"dtype": "int4"}, TypeError, "`dtype` is int4"),
        ({"symmetric": False}, TypeError, "FP8 has no zero point"),
        ({"granularity": "row"}, ValueError, "`granularity` is 'row'"),
        ({"granularity": (128, 0)}, ValueError, "pair of tile sizes"),
        ({"granularity": 128}, ValueError, "`granularity` is 128"),
        ({"scale_dtype": jnp.int8}, TypeError, "`scale_dtype` is int8"),
    ],
)
def test_quantization_refuses(fields, error, text):
    with pytest.raises(error, match=text):
        jaxfp8.Quantization(**fields)


@pytest.mark.parametrize(
    ("kind", "fields", "error", "text"),
    [
        (jaxfp8.DelayedScaling, {"forward_dtype": jnp.int8}, TypeError, "`forward_dtype` is int8"),
        (jaxfp8.DelayedScaling, {"amax_history_length": 0}, ValueError, "one step at least"),
        (jaxfp8.DelayedScaling, {"amax_compute": "mean"}, ValueError, "'max' or 'most_recent'"),
        (jaxfp8.CurrentScaling, {"granularity": "row"}, ValueError, "'tensor' or 'channel'"),
        (jaxfp8.CurrentScaling, {"gradient_dtype": "int8"}, TypeError, "`gradient_dtype` is int8"),
    ],
)
def test_training_recipe_refuses(kind, fields, error, text):
    with pytest.raises(error, match=text):
        kind(**fields)


def test_static_recipe_without_a_scale_says_what_to_pass():
    with pytest.raises(ValueError, match=r"scale of `activation` is missing.*FP8_DYNAMIC"):
        jaxfp8.FP8_STATIC.quantize_activation(normal(2, 8), (1,))


def test_dynamic_recipe_with_a_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale of `activation` is given.*static=True"):
        jaxfp8.FP8_DYNAMIC.quantize_activation(normal(2, 8), (1,), scale=1.0)


def test_static_asymmetric_recipe_wants_a_zero_point():
    how = jaxfp8.Quantization(dtype="int8", granularity="tensor", symmetric=False, static=True)
    with pytest.raises(ValueError, match="zero point of `x` is missing"):
        how.quantize(normal(2, 8), (1,), scale=0.1)
    x = how.quantize(normal(2, 8), (1,), scale=0.1, zero_point=3)
    assert x.zero_point == 3


def test_axis_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="`weight` has 2 axes, but axis 2 of it is named"):
        jaxfp8.INT8_DYNAMIC.quantize_weight(normal(2, 8), (2,))


@pytest.mark.parametrize("kind", ["concrete", "explicit mesh"])
def test_tile_that_a_shard_would_cut_is_refused(kind):
    axis_type = jax.sharding.AxisType.Explicit if kind == "explicit mesh" else None
    types = (axis_type,) if axis_type else (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=types)
    w = jax.device_put(normal(256, 128), NamedSharding(mesh, PartitionSpec("x", None)))
    quantize = jaxfp8.FP8_BLOCK.quantize_weight
    quantize = jax.jit(quantize, static_argnums=1) if axis_type else quantize
    with pytest.raises(ValueError, match=r"64 values per shard on axis 0.*tiles of 128"):
        quantize(w, (0,))


# Rules


def test_first_rule_that_matches_counts():
    rules = as_rules([jaxfp8.Rule(where=".*/out", recipe=None), jaxfp8.INT8_DYNAMIC])
    assert choose(rules, "layer/out") is None and choose(rules, "layer/in") is jaxfp8.INT8_DYNAMIC
    assert choose(as_rules(jaxfp8.Rule(where="^b", recipe=jaxfp8.INT8_DYNAMIC)), "ab") is None


def qwix_rule(**fields):
    return types.SimpleNamespace(**{"module_path": ".*", "weight_qtype": None} | fields)


def test_qwix_rule_becomes_the_recipe_that_says_the_same():
    fields = {"module_path": "a/.*", "act_qtype": "int8", "tile_size": 128}
    rule = jaxfp8.Rule.from_qwix(qwix_rule(weight_qtype=E4M3, **fields))
    assert choose([rule], "a/b") is rule.recipe and choose([rule], "b/a/b") is None
    assert rule.recipe.weight == jaxfp8.Quantization(granularity=(128, 1))
    assert rule.recipe.activation == jaxfp8.Quantization(dtype="int8", granularity=(128, 1))


def test_a_rule_made_by_qwix_itself_is_understood():
    import qwix

    rule = qwix.QuantizationRule(module_path=".*mlp.*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    (own,) = as_rules([rule])
    assert choose([own], "0/mlp/up") is own.recipe and choose([own], "up") is None
    assert (own.recipe.weight, own.recipe.activation) == (
        jaxfp8.INT8_DYNAMIC.weight,
        dataclasses.replace(jaxfp8.INT8_DYNAMIC.activation, granularity="channel"),
    )


def test_qwix_static_minmax_activation_has_one_scale_and_a_zero_point():
    fields = {"act_static_scale": True, "act_calibration_method": "minmax"}
    rule = jaxfp8.Rule.from_qwix(qwix_rule(act_qtype="int8", **fields))
    how = jaxfp8.Quantization(dtype="int8", granularity="tensor", symmetric=False, static=True)
    assert rule.recipe.activation == how and rule.recipe.weight is None


def test_qwix_rule_that_quantizes_nothing_has_no_recipe():
    (rule,) = as_rules([qwix_rule(module_path="head")])
    assert rule.recipe is None and choose([rule, *as_rules(jaxfp8.FP8_W8A16)], "head") is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tile_size": 0.25}, "`tile_size` is 0.25"),
        ({"weight_calibration_method": "rms,3"}, "`weight_calibration_method` is 'rms,3'"),
        ({"op_names": ("einsum",)}, "`op_names` is"),
    ],
)
def test_qwix_rule_without_a_counterpart_is_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        jaxfp8.Rule.from_qwix(qwix_rule(weight_qtype="int8", **fields))


def test_qwix_dtype_that_no_array_here_holds_is_refused():
    with pytest.raises(TypeError, match="`dtype` is 'nf4'"):
        jaxfp8.Rule.from_qwix(qwix_rule(weight_qtype="nf4"))


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match="`recipe` is 'INT8'"):
        as_rules("INT8")


def test_replacing_a_field_checks_it():
    with pytest.raises(TypeError, match="`dtype` is float64"):
        dataclasses.replace(jaxfp8.INT8_DYNAMIC.weight, dtype=jnp.float64)
