"""Second derivatives of the product of FP8 training: right if it keeps floats, else an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._recipes import training_codes

MATRIX = (((1,), (0,)), ((), ()))
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
TENSOR = jaxfp8.CurrentScaling(second_derivatives=True)
ROW = jaxfp8.CurrentScaling(granularity="channel", second_derivatives=True)

each_recipe = pytest.mark.parametrize("recipe", [TENSOR, ROW], ids=["tensor", "row"])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def product(recipe, x, w):
    state = jaxfp8.ScalingState.init(recipe) if recipe is DELAYED else None
    return jaxfp8.fp8_dot_general(x, w, MATRIX, state, recipe=recipe)


def straight(recipe, dtype, x, axis):
    """What 8 bits make of `x`, with the derivative of `x`."""
    q = recipe.quantization(dtype).quantize(jax.lax.stop_gradient(x), (axis,), ())
    return x + jax.lax.stop_gradient(jaxfp8.dequantize(q, x.dtype) - x)


def forward(recipe, x, w):
    return straight(recipe, jnp.float8_e4m3fn, x, 1) @ straight(recipe, jnp.float8_e4m3fn, w, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_floats(recipe, x, w):
    """The product and its rule as docs/training.md states them, each rounding the identity."""
    return forward(recipe, x, w)


def in_floats_backward(recipe, operands, g):
    x, w = operands
    d_x = straight(recipe, jnp.float8_e5m2, g, 1) @ straight(recipe, jnp.float8_e4m3fn, w, 1).T
    d_w = straight(recipe, jnp.float8_e4m3fn, x, 0).T @ straight(recipe, jnp.float8_e5m2, g, 0)
    return d_x, d_w


in_floats.defvjp(lambda recipe, x, w: (forward(recipe, x, w), (x, w)), in_floats_backward)


def two_layers(dot, weights, x):
    first, second = weights
    return (dot(jnp.tanh(dot(x, first)), second) ** 2).mean()


def by_reverse(f, at, along):
    """The product with the Hessian, by reverse over reverse."""

    def directional(at):
        pairs = zip(jax.tree.leaves(jax.grad(f)(at)), jax.tree.leaves(along), strict=True)
        return sum(jnp.vdot(g, t) for g, t in pairs)

    return jax.grad(directional)(at)


def hessian_product(f, at, along):
    return jax.jit(functools.partial(by_reverse, f))(at, along)


def hessian_products(f, at, along):
    """The same product with the Hessian, by reverse over reverse and by forward over reverse."""

    @jax.jit
    def both(at, along):
        return by_reverse(f, at, along), jax.jvp(jax.grad(f), (at,), (along,))[1]

    return both(at, along)


def far(got, want):
    got, want = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


WEIGHTS = normal(32, 24) / 6, normal(24, 8, seed=1) / 5
ALONG = normal(32, 24, seed=2), normal(24, 8, seed=3)


@each_recipe
@pytest.mark.slow
@pytest.mark.same_bits  # XLA encodes the columns of the reference
def test_hessian_of_two_layers_is_straight_through_in_both_modes(recipe):
    def loss(dot):
        return functools.partial(
            two_layers, functools.partial(dot, recipe), x=normal(16, 32, seed=4)
        )

    want = hessian_product(loss(in_floats), WEIGHTS, ALONG)
    exact = hessian_product(
        lambda weights: two_layers(jnp.matmul, weights, normal(16, 32, seed=4)), WEIGHTS, ALONG
    )
    for got in hessian_products(loss(product), WEIGHTS, ALONG):
        assert far(got, want) < 1e-4
        assert far(got, exact) < 0.15


@each_recipe
def test_one_layer_has_the_second_derivative_of_a_float_product(recipe):
    x, w, t = normal(4, 32), normal(32, 8, seed=1), normal(32, 8, seed=2)
    want = hessian_product(lambda w: ((x @ w) ** 2).sum(), w, t)
    both = hessian_products(lambda w: (product(recipe, x, w) ** 2).sum(), w, t)
    assert all(far(got, want) < 0.06 for got in both)


def test_third_derivatives_are_straight_through():
    x, w = normal(4, 16), normal(16, 8, seed=1)
    t = normal(16, 8, seed=2)

    def third(dot):
        def along(f):
            return lambda w: jnp.vdot(jax.grad(f)(w), t)

        return jax.jit(jax.grad(along(along(lambda w: jnp.sin(dot(TENSOR, x, w)).sum()))))(w)

    assert far(third(product), third(in_floats)) < 1e-4


def scanned(layer, weights, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


REGIONS = {
    "scan": lambda weights, x: scanned(layer, weights, x),
    "scan of remat": lambda weights, x: scanned(jax.checkpoint(layer), weights, x),
    "scan of jit": lambda weights, x: scanned(jax.jit(layer), weights, x),
    "vmap of scan": lambda weights, x: jax.vmap(lambda row: scanned(layer, weights, row[None]))(x),
}
STACK = normal(2, 16, 16) / 3
ROWS = normal(4, 16, seed=1)


def second(model, products=hessian_products):
    """Of a model of a stack of layers, the products with a Hessian."""
    return products(lambda weights: (model(weights, ROWS) ** 2).sum(), STACK, jnp.cos(9 * STACK))


@functools.cache
def of_unrolled_layers():
    return second(lambda weights, x: functools.reduce(layer, weights, x), hessian_product)


def layer(x, w):
    return jnp.tanh(product(ROW, x, w))  # each row has a scale of its own, under vmap as without


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.slow
def test_regions_change_no_second_derivative(region):
    assert all(far(got, of_unrolled_layers()) < 0.05 for got in second(region))


GENERAL = {
    "matrix": ((5, 32), (32, 7), MATRIX),
    "transposed": ((32, 5), (7, 32), (((0,), (1,)), ((), ()))),
    "general": ((3, 8, 2, 4), (4, 6, 8), (((1, 3), (2, 0)), ((), ()))),
    "batch": ((3, 5, 2, 8), (2, 8, 3, 4), (((3,), (1,)), ((2, 0), (0, 2)))),
    "tokens": ((2, 3, 16), (16, 4, 2), (((2,), (0,)), ((), ()))),
    "empty": ((0, 32), (32, 7), MATRIX),
}


@pytest.mark.parametrize("case", GENERAL.values(), ids=GENERAL)
def test_second_derivatives_of_any_product_are_near_those_of_floats(case, monkeypatch):
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: case is not GENERAL["matrix"])
    x_shape, w_shape, numbers = case
    both = normal(*x_shape), normal(*w_shape, seed=1)
    along = normal(*x_shape, seed=2), normal(*w_shape, seed=3)

    def ours(x, w):
        return jaxfp8.fp8_dot_general(x, w, numbers, recipe=TENSOR)

    def theirs(x, w):
        return jax.lax.dot_general(x, w, numbers)

    want, got = (
        products(lambda both, dot=dot: (dot(*both) ** 2).sum(), both, along)
        for products, dot in ((hessian_product, theirs), (hessian_products, ours))
    )
    if want[1].any():
        assert all(far(one, want) < 0.1 for one in got)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@each_recipe
def test_asking_for_second_derivatives_changes_no_first_one(recipe):
    plain = jaxfp8.CurrentScaling(granularity=recipe.granularity)
    x, w = normal(16, 32, dtype=jnp.bfloat16), normal(32, 8, seed=1)
    gradients = [
        jax.jit(jax.value_and_grad(lambda both, r=r: (product(r, *both) ** 2).sum()))((x, w))
        for r in (recipe, plain)
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


# Otherwise an error


PLAIN = {"delayed": DELAYED, "tensor": jaxfp8.CurrentScaling()}
WRAPPED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda x, w: (f(x, w), None), x, w[None])[0],
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("recipe", PLAIN.values(), ids=PLAIN)
def test_without_floats_a_second_derivative_is_an_error(recipe, wrap):
    dot = wrap(functools.partial(product, recipe))
    x, w = normal(4, 16), normal(16, 16, seed=1)

    def loss(w):
        return (dot(x, w) ** 2).sum()

    says = r"`rhs` is differentiated twice, .*CurrentScaling\(second_derivatives=True\)"
    with pytest.raises(TypeError, match=says):
        jax.grad(lambda w: jax.grad(loss)(w).sum())(w)
    with pytest.raises(TypeError, match=says):
        jax.jvp(jax.grad(loss), (w,), (w,))


def test_error_names_what_is_differentiated_twice():
    x, w = normal(4, 16), normal(16, 16, seed=1)
    dot = functools.partial(product, DELAYED)
    with pytest.raises(TypeError, match="`lhs` is differentiated twice"):
        jax.grad(lambda x: jax.grad(lambda w: dot(x, w).sum())(w).sum())(x)
    with pytest.raises(TypeError, match="the gradient of the output is differentiated twice"):
        jax.grad(lambda s: jax.grad(lambda w: (s * dot(x, w)).sum())(w).sum())(2.0)
