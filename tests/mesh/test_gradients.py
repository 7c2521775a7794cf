"""On a mesh with explicit axes: numbers of one device, gradients sharded as what they belong to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

NUMBERS = (((1,), (0,)), ((), ()))
TRAINING = {
    "delayed": jaxfp8.DelayedScaling(amax_history_length=4),
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="channel"),
}
JITS = {"eager": lambda f: f, "jit": jax.jit}
X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 32))
STACK = jax.random.normal(jax.random.key(2), (3, 16, 16)) / 4
CODES = jnp.round(16 * W).astype(jnp.int8)


@pytest.fixture
def mesh():
    made = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(made):
        yield made


def put(array, *spec):
    return jax.device_put(array, PartitionSpec(*spec))


def same(got, want, like):
    """Whether values are those of one device and types are those of the arguments."""
    for one, other, argument in zip(got, want, like, strict=True):
        assert jax.typeof(one).sharding.spec == jax.typeof(argument).sharding.spec
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def checked(loss, jit, *arguments):
    gradient = jit(jax.grad(loss, tuple(range(len(arguments)))))
    plain = [jnp.asarray(np.asarray(a)) for a in arguments]
    same(gradient(*arguments), jit(jax.grad(loss, tuple(range(len(plain)))))(*plain), arguments)


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
@pytest.mark.parametrize("recipe", TRAINING.values(), ids=TRAINING)
@pytest.mark.same_bits  # XLA encodes the short rows of shards
def test_gradients_of_training_are_sharded_as_their_operands(mesh, recipe, jit):
    delayed = isinstance(recipe, jaxfp8.DelayedScaling)
    state = jaxfp8.ScalingState.init(recipe) if delayed else None

    def loss(x, w):
        return jnp.sum(jaxfp8.fp8_dot_general(x, w, NUMBERS, state, recipe=recipe) ** 2)

    checked(loss, jit, put(X, "data", None), put(W, None, "model"))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
@pytest.mark.same_bits
def test_gradients_of_training_under_vmap_keep_the_mapped_axis(mesh, jit):
    def loss(x, w):
        one = lambda x: jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=jaxfp8.CurrentScaling())  # noqa: E731
        return jnp.sum(jax.vmap(one)(x) ** 2)

    checked(loss, jit, put(X.reshape(2, 4, 16), "data", None, None), put(W, None, "model"))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_gradients_of_operations_are_sharded_as_their_operands(mesh, jit):
    q = jaxfp8.quantize(W, jnp.int8, channelwise_axes=(1,))

    def loss(x, bias):
        return jnp.sum(jaxfp8.matmul(x, q, bias=bias) ** 2)

    checked(loss, jit, put(X, "data", None), put(W[0], "model"))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_gradients_of_the_product_of_a_recipe(mesh, jit):
    def loss(x, w):
        return jnp.sum(jaxfp8.recipe_dot_general(x, w, NUMBERS, jaxfp8.INT8_DYNAMIC) ** 2)

    checked(loss, jit, put(X, "data", None), put(W, None, "model"))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_gradient_of_the_input_of_an_8_bit_layer(mesh, jit):
    layer = jaxfp8.nnx.Linear(16, 32, recipe=jaxfp8.INT8_DYNAMIC, rngs=nnx.Rngs(0))
    checked(lambda x: jnp.sum(layer(x) ** 2), jit, put(X, "data", None))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_a_scan_that_carries_the_product_itself(mesh, jit):
    def f(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    g = jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC)
    x, stack = put(X, "data", None), put(STACK, None, None, None)
    same([jit(g)(x, stack)], [jit(g)(X, STACK)], [x])
    checked(lambda x, stack: jnp.sum(g(x, stack) ** 2), jit, x, stack)


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_a_rewritten_scan_over_8_bit_weights(mesh, jit):
    stack = jaxfp8.quantize(STACK, jnp.int8, channelwise_axes=(0, 2))

    def f(x):
        return jax.lax.scan(lambda x, w: (x @ jaxfp8.dequantize(w), None), x, stack)[0]

    g = jaxfp8.rewrite(f)
    assert len(jaxfp8.explain(f)(X).matched) == 1
    checked(lambda x: jnp.sum(g(x) ** 2), jit, put(X, "data", None))


def of_quantized_activations(x, scale):
    """A product of int8 by int8 whose function quantizes its activations itself."""
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    codes = jnp.clip(jnp.round(x / step), -127, 127).astype(jnp.int8)
    return (codes.astype(x.dtype) * step) @ (CODES.astype(x.dtype) * scale)


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
@pytest.mark.parametrize("rows", ["data", ("data", "model")], ids=["one axis", "two axes"])
def test_gradients_of_rewritten_activations_are_sharded_as_these(mesh, rows, jit):
    g = jaxfp8.rewrite(of_quantized_activations)
    checked(lambda x, s: jnp.sum(g(x, s) ** 2), jit, put(X, rows, None), jnp.full((1, 32), 0.01))


def test_gradients_of_rewritten_activations_in_part_of_a_mesh(mesh):
    specs = {
        "in_specs": (PartitionSpec("data"), PartitionSpec()),
        "out_specs": PartitionSpec("data"),
    }
    x, scale = put(X, ("data", "model"), None), jnp.full((1, 32), 0.01)

    def gradients(fun):
        part = jax.shard_map(fun, **specs, axis_names={"data"})
        return jax.jit(jax.grad(lambda x, s: jnp.sum(part(x, s) ** 2), (0, 1)))(x, scale)

    plain = gradients(of_quantized_activations)
    same(gradients(jaxfp8.rewrite(of_quantized_activations)), plain, (x, scale))


def test_a_rewritten_product_is_sharded_as_the_one_it_replaces(mesh):
    x, w = put(X, "data", None), put(W, None, "model")
    y = jaxfp8.quantize_dots(jnp.dot, jaxfp8.INT8_DYNAMIC)(x, w)
    assert jax.typeof(y).sharding.spec == jax.typeof(x @ w).sharding.spec


@pytest.mark.parametrize("kind", ["training", "8-bit"])
def test_a_layer_puts_its_output_where_it_is_told(mesh, kind):
    if kind == "training":
        layer = nnx.Linear(16, 32, dot_general=jaxfp8.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
    else:
        layer = jaxfp8.nnx.Linear(16, 32, recipe=jaxfp8.INT8_DYNAMIC, rngs=nnx.Rngs(0))
    spec = PartitionSpec("data", "model")
    y = layer(put(X, "data", None), out_sharding=spec)
    assert jax.typeof(y).sharding.spec == spec
