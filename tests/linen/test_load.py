"""Tensors of a checkpoint as parameters of linen."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jaxfp8.linen.Dense(16, use_bias=False, name="up")(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = jaxfp8.linen.Embed(20, 16, name="embed")(ids)
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(5, name="head")(nn.RMSNorm(name="norm")(x))


MAPPING = {"layers/up/kernel": ["layers.0.up.weight", "layers.1.up.weight"]}
IDS = jnp.arange(6)


def channel(w):
    return jaxfp8.quantize(w, channelwise_axes=(0,))


def tensors():
    return {
        "embed.weight": channel(normal(20, 16)),
        **{f"layers.{i}.up.weight": channel(normal(16, 16, seed=i)) for i in range(2)},
        "norm.weight": jnp.ones(16),
        "head.weight": normal(5, 16, seed=3).astype(jnp.bfloat16),
        "head.bias": jnp.ones(5),
    }


def shapes():
    return jax.eval_shape(Model().init, jax.random.key(0), IDS)


def test_a_model_computes_with_the_weights_of_the_checkpoint():
    given = tensors()
    variables = jaxfp8.linen.load(shapes(), given, MAPPING)
    wide = {
        k: jaxfp8.dequantize(v) if isinstance(v, jaxfp8.QArray) else v for k, v in given.items()
    }
    x = wide["embed.weight"][IDS]
    for i in range(2):
        x = x + x @ wide[f"layers.{i}.up.weight"].T
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    exact = x @ wide["head.weight"].T.astype(jnp.float32) + 1
    np.testing.assert_allclose(jax.jit(Model().apply)(variables, IDS), exact, rtol=1e-4, atol=1e-4)


def test_a_file_without_zero_points_fits_a_recipe_with_them():
    asymmetric = jaxfp8.Quantization(dtype=jnp.int8, granularity="channel", symmetric=False)
    recipe = jaxfp8.Recipe(name="asymmetric", weight=asymmetric)
    model, x = jaxfp8.linen.Dense(3, use_bias=False, recipe=recipe), normal(2, 5)
    w = jaxfp8.quantize(normal(3, 5), jnp.int8, channelwise_axes=(0,))
    own = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jaxfp8.linen.load(own, {"weight": w})
    assert not variables["params"]["kernel"].stored.zero_point.any()
    np.testing.assert_array_equal(model.apply(variables, x), x @ w.T)


@pytest.mark.parametrize("kind", [channel, jaxfp8.quantize], ids=["channel", "tensor"])
def test_parts_of_a_fused_layer_become_one_weight(kind):
    model, x = jaxfp8.linen.Dense(24), normal(3, 16)
    parts = {f"{name}.weight": kind(normal(8, 16, seed=i)) for i, name in enumerate("qkv")}
    biases = {f"{name}.bias": jnp.full(8, float(i)) for i, name in enumerate("qkv", 1)}
    own = jax.eval_shape(model.init, jax.random.key(0), x)
    names = {"kernel": [*parts], "bias": [*biases]}
    variables = jaxfp8.linen.load(own, {**parts, **biases}, names)
    wide = jnp.concatenate([jaxfp8.dequantize(w) for w in parts.values()])
    exact = x @ wide.T + jnp.concatenate([*biases.values()])
    np.testing.assert_allclose(model.apply(variables, x), exact, rtol=1e-4, atol=1e-4)


def test_kernels_lie_as_in_the_checkpoint_and_are_listed():
    given = tensors()
    variables = jaxfp8.linen.load(shapes(), given, MAPPING)
    kernel = variables["params"]["layers"]["up"]["kernel"]
    assert isinstance(kernel, jaxfp8.TransposedArray) and kernel.shape == (2, 16, 16)
    np.testing.assert_array_equal(kernel.stored.qvalue[1], given["layers.1.up.weight"].qvalue)
    _, found = jaxfp8.linen.quantize(Model(), variables, IDS)
    left = {row.path: row.reason for row in found.left}
    assert left["head"].startswith("its layer is Flax's") and "already" in left["layers/up"]


def test_loaded_variables_go_through_state_dictionaries():
    variables = jaxfp8.linen.load(shapes(), tensors(), MAPPING)
    zeros = jax.tree.map(jnp.zeros_like, variables)
    again = flax.serialization.from_bytes(zeros, flax.serialization.to_bytes(variables))
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(variables), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_names_of_mesh_axes_go_with_their_axes():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("k", "n"))
    model, x = jaxfp8.linen.Dense(8, use_bias=False, kernel_init=init), normal(2, 16)
    w = channel(normal(8, 16))
    boxed = jaxfp8.linen.load(jax.eval_shape(model.init, jax.random.key(0), x), {"weight": w})
    kernel = boxed["params"]["kernel"]
    assert kernel.stored.qvalue.names == ("n", "k") and kernel.stored.scale.names == ("n", None)
    np.testing.assert_array_equal(model.apply(boxed, x), x @ w.T)
    spec = nn.get_partition_spec(boxed)["params"]["kernel"].stored.qvalue
    assert spec == jax.sharding.PartitionSpec("n", "k")


REFUSED = {
    "unused": ({"lm_head.weight": jnp.ones(3)}, ValueError, "no parameter takes lm_head.weight"),
    "floats": (
        {"embed.weight": normal(20, 16)},
        TypeError,
        "is float32.*`embed/embedding` is QArr",
    ),
    "8 bits": ({"head.weight": channel(normal(5, 16))}, TypeError, "`head/kernel` is float32"),
    "recipe": ({"embed.weight": jaxfp8.quantize(normal(20, 16))}, TypeError, "is held as"),
    "integers": ({"norm.weight": jnp.ones(16, jnp.int32)}, TypeError, "`norm.weight` is int32"),
    "shape": ({"norm.weight": jnp.ones(17)}, ValueError, r"needs \(16,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    change, error, reason = REFUSED[case]
    with pytest.raises(error, match=reason):
        jaxfp8.linen.load(shapes(), {**tensors(), **change}, MAPPING)


def test_static_scales_that_no_recipe_takes_are_left_out_with_a_warning():
    model, x = jaxfp8.linen.Dense(3, use_bias=False), normal(2, 5)
    own = jax.eval_shape(model.init, jax.random.key(0), x)
    held = {"weight": channel(normal(3, 5)), "input_scale": jnp.float32(0.1)}
    with pytest.warns(jaxfp8.FallbackWarning, match="1 static scales of inputs, such as 'input_s"):
        variables = jaxfp8.linen.load(own, held)
    assert set(variables["params"]) == {"kernel"}
