"""Variables of whole models: quantized, calibrated, named, saved and restored."""

import functools

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from linen.layers import Net, normal, off

import jaxfp8
import jaxfp8.linen


def test_a_model_with_scanned_layers_is_quantized_whole():
    tokens = jnp.arange(6).reshape(2, 3)
    wide = Net(nn.Dense, nn.Embed)
    narrow = Net(
        functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8_STATIC),
        functools.partial(jaxfp8.linen.Embed, recipe=jaxfp8.FP8_W8A16),
    )
    variables = wide.init(jax.random.key(0), tokens)
    params = jaxfp8.linen.quantize(narrow, variables, tokens)[0]["params"]
    layers = params["layers"]["Dense_0"]
    assert layers["kernel"].shape == (3, 32, 32) and layers["kernel"].scale.shape == (3, 1, 1)
    assert layers["input_scale"].shape == (3,)
    got = jax.jit(narrow.apply)({"params": params}, tokens)
    assert off(got, wide.apply(variables, tokens)) < 0.06


def test_calibration_grows_with_more_inputs_and_leaves_the_weights():
    x, layer = normal(4, 16), jaxfp8.linen.Dense(8, recipe=jaxfp8.FP8_STATIC)
    variables = nn.Dense(8).init(jax.random.key(0), x)
    first, _ = jaxfp8.linen.quantize(layer, variables, x)
    second, _ = jaxfp8.linen.quantize(layer, first, 3 * x)
    third, _ = jaxfp8.linen.quantize(layer, second, x)
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


def test_quantizing_keeps_the_names_of_float_variables():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    variables = nn.Dense(256, kernel_init=init).init(jax.random.key(0), normal(2, 256))
    layer = jaxfp8.linen.Dense(256, kernel_init=init, recipe=jaxfp8.FP8_BLOCK)
    kernel = nn.get_partition_spec(jaxfp8.linen.quantize(layer, variables, normal(2, 256))[0])
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


SAVED = {"fp8": jaxfp8.FP8_DYNAMIC, "static": jaxfp8.FP8_STATIC, "int8": jaxfp8.INT8_DYNAMIC}
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
    plain, _ = jaxfp8.linen.quantize(layer, flax.serialization.msgpack_restore(data), x)
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
    again, _ = jaxfp8.linen.quantize(layer, restored, x)
    np.testing.assert_array_equal(layer.apply(again, x), layer.apply(variables, x))
