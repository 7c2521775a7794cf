"""On explicit axes the type of a result names the sharding that float code would have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.traffic import sent

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

NUMBERS = (((2,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (8, 16, 64), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (64, 128))
RECIPES = {
    name: getattr(jaxfp8, name)
    for name in ("INT8_DYNAMIC", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_W8A16")
}


@pytest.fixture(autouse=True)
def mesh():
    made = jax.make_mesh((2, 2), ("d", "m"))
    with jax.set_mesh(made):
        yield made


@pytest.fixture
def x(mesh):
    return jax.device_put(X, P("d", "m", None))


def spec_of(array):
    return jax.typeof(array).sharding.spec


QUANTIZED = {
    "token": ({"channelwise_axes": (0, 1)}, P("d", "m", None)),
    "token, zero points": ({"channelwise_axes": (0, 1), "zero_point": True}, P("d", "m", None)),
    "blocks": ({"channelwise_axes": (0, 1), "tiled_axes": {2: 32}}, P("d", "m", None)),
    "blocks of a sharded axis": (
        {"channelwise_axes": (0,), "tiled_axes": {1: 4, 2: 32}},
        P("d", "m", None),
    ),
    "tensor": ({}, P(None, None, None)),
    "given": ({"scale": jnp.float32(0.1)}, P()),
    "given by token": ({"scale": jnp.full((8, 16, 1), 0.1)}, P(None, None, None)),
}


@pytest.mark.parametrize("how", QUANTIZED)
def test_codes_lie_as_values_and_scales_as_tiles(x, how):
    arguments, of_scale = QUANTIZED[how]
    quantized = jax.jit(lambda x: jaxfp8.quantize(x, jnp.int8, **arguments))(x)
    assert spec_of(quantized.qvalue) == P("d", "m", None)
    assert spec_of(quantized.scale) == of_scale
    want = jaxfp8.quantize(X, jnp.int8, **arguments)
    np.testing.assert_array_equal(quantized.qvalue, want.qvalue)


@pytest.mark.parametrize("how", ["token", "blocks", "tensor", "given"])
def test_fake_quantize_and_its_gradient_lie_as_the_input(x, how):
    arguments, _ = QUANTIZED[how]
    value, gradient = jax.jit(
        jax.value_and_grad(lambda x: jaxfp8.fake_quantize(x, **arguments).sum().astype(jnp.float32))
    )(x)
    assert spec_of(gradient) == spec_of(x)
    assert spec_of(jaxfp8.fake_quantize(x, **arguments)) == spec_of(x)
    assert np.isfinite(value)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", ["function", "linen", "nnx"])
def test_a_recipe_keeps_batch_and_sequence_split(x, recipe, layer):
    recipe = RECIPES[recipe]
    if layer == "function":
        w = recipe.quantize_weight(W, (0,))
        y = jaxfp8.recipe_dot_general(x, w, NUMBERS, recipe)
    elif layer == "nnx":
        y = jaxfp8.nnx.Linear(64, 128, recipe=recipe, rngs=nnx.Rngs(0))(x)
    else:
        module = jaxfp8.linen.Dense(128, recipe=recipe)
        y = module.apply(module.init(jax.random.key(0), x), x)
    assert spec_of(y) == P("d", "m", None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_an_input_lies_as_the_input(x, recipe):
    recipe = RECIPES[recipe]
    w = recipe.quantize_weight(W, (0,))

    def loss(x):
        y = jaxfp8.recipe_dot_general(x, w, NUMBERS, recipe)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    assert spec_of(jax.jit(jax.grad(loss))(x)) == spec_of(x)


def test_axes_of_an_einsum_keep_their_split(x):
    q = jaxfp8.quantize(W.reshape(64, 4, 32), channelwise_axes=(1, 2))
    assert spec_of(jaxfp8.einsum("bsk,khd->bhsd", x, q)) == P("d", None, "m", None)
    asked = P("d", "m", None, None)
    assert spec_of(jaxfp8.einsum("bsk,khd->bhsd", x, q, out_sharding=asked)) == asked


def test_experts_stay_where_they_are(mesh):
    x = jax.device_put(jnp.ones((4, 8, 64), jnp.bfloat16), P("m", "d", None))
    w = jax.device_put(jnp.ones((4, 64, 128)), P("m", None, None))
    y = jaxfp8.matmul(x, jaxfp8.quantize(w, channelwise_axes=(0, 2)))
    assert spec_of(y) == P("m", "d", None)


def test_columns_of_a_prepared_weight_are_split_by_groups(mesh, x):
    w = jax.random.normal(jax.random.key(2), (64, 256))
    prepared = jaxfp8.prepare(jaxfp8.quantize(w, channelwise_axes=(1,)))
    by_columns = lambda a: NamedSharding(mesh, P("m", *[None] * (a.ndim - 1)))  # noqa: E731
    split = jax.device_put(prepared, jax.tree.map(by_columns, prepared))
    y = jaxfp8.matmul(jax.device_put(x, P("d", None, None)), split)
    assert spec_of(y) == P("d", None, "m")
    np.testing.assert_array_equal(y, jaxfp8.matmul(X, prepared))


def test_a_contraction_that_both_sides_split_is_ambiguous_as_in_jax(mesh):
    x = jax.device_put(X, P(None, None, "m"))
    w = jaxfp8.QArray(jax.device_put(jnp.ones((64, 128), jnp.int8), P("m", None)), jnp.float32(1))
    with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
        jaxfp8.dot_general(x, w, NUMBERS)
    assert spec_of(jaxfp8.matmul(x, w, out_sharding=P(None, None, None))) == P(None, None, None)


def test_a_vmap_of_gradients_keeps_the_mapped_axis_split(mesh):
    q = jaxfp8.QArray(jnp.ones((64, 128), jnp.int8), jnp.float32(1))
    x = jax.device_put(jnp.ones((8, 64)), P("d", None))
    gradients = jax.jit(jax.vmap(jax.grad(lambda x: jaxfp8.matmul(x, q).sum())))(x)
    assert spec_of(gradients) == P("d", None)
    np.testing.assert_array_equal(gradients, 128)


def test_automatic_axes_inside_explicit_ones_split_a_contraction(mesh):
    x = jax.device_put(jnp.ones((64, 256)), P(None, "m"))
    w = jax.device_put(jnp.ones((256, 128), jnp.int8), P("m", None))
    product = lambda x, w: jaxfp8.matmul(x, jaxfp8.QArray(w, jnp.float32(1)))  # noqa: E731
    y = jax.jit(jax.sharding.auto_axes(product, out_sharding=P()))(x, w)
    np.testing.assert_array_equal(y, 256)


def test_a_program_for_an_abstract_mesh_splits_its_calls():
    abstract = jax.sharding.AbstractMesh(
        (2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )

    def shape(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(abstract, P(*spec)))

    with jax.sharding.use_abstract_mesh(abstract):
        traced = jax.jit(lambda x, w: jaxfp8.matmul(x, jaxfp8.QArray(w, jnp.float32(1)))).trace(
            shape((64, 256), jnp.float32, "d", None), shape((256, 128), jnp.int8, None, "m")
        )
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "manual_computation" in text
    assert "tensor<32x256xf32>, tensor<256x64xi8>" in text


def test_an_exported_program_splits_its_calls(mesh):
    x = jax.device_put(jnp.ones((64, 256)), P("d", None))
    w = jax.device_put(jnp.ones((256, 128), jnp.int8), P(None, "m"))
    function = jax.jit(lambda x, w: jaxfp8.matmul(x, jaxfp8.QArray(w, jnp.float32(1))))
    exported = jax.export.export(function, disabled_checks=jaxfp8.ffi.export_checks())(x, w)
    again = jax.export.deserialize(exported.serialize())
    y = again.call(x, w)
    np.testing.assert_array_equal(y, 256)
    assert y.sharding.spec == P("d", "m")
    assert "tensor<32x256xf32>, tensor<256x64xi8>" in exported.mlir_module()


def trained(x, w):
    recipe = jaxfp8.CurrentScaling()
    y = jaxfp8.fp8_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe)
    return jnp.sum(y**2)


def step(x, w):
    """Gradients of training, and an 8-bit weight."""
    gradients = jax.grad(trained, (0, 1))(x, w)
    return *gradients, jaxfp8.quantize(w, channelwise_axes=(1,)).scale


def of_step(mesh):
    x, w = X[0].astype(jnp.float32), W
    return [
        jax.device_put(a, NamedSharding(mesh, P(*spec)))
        for a, spec in ((x, ("d", None)), (w, (None, "m")))
    ]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


def test_an_exported_step_of_training_splits_its_calls(mesh):
    args = of_step(mesh)
    exported = jax.export.export(jax.jit(step), disabled_checks=jaxfp8.ffi.export_checks())(*args)
    again = jax.jit(jax.export.deserialize(exported.serialize()).call)
    assert sorted(sent(again, *args)) == sorted(sent(step, *args))
    assert_same(again(*args), jax.jit(step)(*args))


def test_a_step_of_training_is_compiled_for_an_abstract_mesh(mesh):
    abstract = mesh.abstract_mesh
    args = of_step(mesh)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(abstract, a.sharding.spec))
        for a in args
    ]
    with jax.sharding.use_abstract_mesh(abstract):
        lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cpu",))
    program = lowered.compile(device_assignment=tuple(jax.devices()))
    assert "all-gather" not in program.as_text()
    assert_same(program(*args), jax.jit(step)(*args))


def test_a_sum_over_devices_is_scattered_where_the_output_is_split(mesh):
    x = jax.device_put(jnp.ones((64, 256)), P(None, "m"))
    w = jaxfp8.QArray(jax.device_put(jnp.ones((256, 128), jnp.int8), P("m", None)), jnp.float32(1))
    residual = jax.device_put(jnp.ones((64, 128)), P("m", None))

    def product(x, w):
        asked = {"residual": residual, "bias": jnp.arange(128.0), "return_amax": True}
        return jaxfp8.matmul(x, w, activation="relu", out_sharding=P("m", None), **asked)

    y, amax = jax.jit(product)(x, w)
    assert spec_of(y) == P("m", None)
    np.testing.assert_array_equal(y, np.broadcast_to(257 + np.arange(128), y.shape))
    assert amax == 257 + 127
    text = jax.jit(product).lower(x, w).compile().as_text()
    assert " reduce-scatter(" in text
    assert " all-reduce(" not in text


@pytest.mark.parametrize("split", [P(None, "m"), P("m", None)], ids=["columns", "rows"])
def test_a_block_that_a_shard_would_cut_keeps_the_weight_in_its_place(split):
    """80 columns and 96 rows on each device of four, in blocks of 128 x 128."""
    with jax.set_mesh(jax.make_mesh((4,), ("m",))):
        x = jax.random.normal(jax.random.key(0), (16, 384))
        q = jaxfp8.quantize(
            jax.random.normal(jax.random.key(1), (384, 320)), tiled_axes={0: 128, 1: 128}
        )
        x_split = jax.device_put(x, P(None, split[0]))
        q_split = jaxfp8.QArray(jax.device_put(q.qvalue, split), q.scale, tiles=q.tiles)

        def product(x, q):
            return jaxfp8.matmul(x, q, out_sharding=P(None, split[1]))

        y = jax.jit(product)(x_split, q_split)
        text = jax.jit(product).lower(x_split, q_split).compile().as_text()
    np.testing.assert_allclose(y, jaxfp8.matmul(np.asarray(x), q), rtol=1e-5, atol=1e-4)
    assert "all-gather" not in text
    assert "all-to-all" not in text
