"""`jaxfp8.split_dot`: the accuracy of floats from products in int8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen
from jaxfp8._call.library import ffi
from jaxfp8._ops import products
from jaxfp8._ops import terms as terms_of

pytestmark = pytest.mark.any_jax

MATRICES = (((1,), (0,)), ((), ()))


def draw(rng, shape, spread=1.0):
    """Normal values times factors of other magnitudes: `spread` is the deviation of their log."""
    scale = np.exp(spread * rng.standard_normal(shape))
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def exact_and_bound(x, y, numbers, terms):
    """The product in float64, and the bound that the docstring states."""
    x_axes, y_axes = numbers[0]

    def dot(a, b):
        return np.asarray(jax.lax.dot_general(a, b, numbers, precision="highest"))

    amax = [
        np.broadcast_to(np.abs(v).max(axis=axes, keepdims=True), v.shape)
        for v, axes in ((x, x_axes), (y, y_axes))
    ]
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) for a in (x, y)]
        exact = dot(*wide)
        magnitudes = dot(*map(np.abs, wide))
        largest = dot(*(a.astype(np.float64) for a in amax))  # K times the product of maxima
    return exact, 2 ** (2.3 - 8 * terms) * largest + 2.0**-21 * magnitudes


NUMBERS = {
    "matrices": ((13, 70), (70, 9), MATRICES),
    "transposed": ((70, 13), (9, 70), (((0,), (1,)), ((), ()))),
    "batch": ((3, 13, 70), (70, 3, 9), (((2,), (0,)), ((0,), (1,)))),
    "two contracted axes": ((5, 8, 2, 7), (7, 3, 8), (((1, 3), (2, 0)), ((), ()))),
    "two batch axes": ((2, 5, 3, 33), (3, 33, 2), (((3,), (1,)), ((0, 2), (2, 0)))),
    "one row": ((1, 513), (513, 40), MATRICES),
    "a vector": ((33,), (33, 4), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize(
    "case, terms",
    [("matrices", 1), ("matrices", 2), ("matrices", 4), *((case, 3) for case in NUMBERS)],
)
def test_the_error_is_within_the_bound(case, terms):
    x_shape, y_shape, numbers = NUMBERS[case]
    rng = np.random.default_rng(terms)
    for spread in (0.0, 3.0):  # normal and lognormal
        x, y = draw(rng, x_shape, spread), draw(rng, y_shape, spread)
        exact, bound = exact_and_bound(x, y, numbers, terms)
        got = np.asarray(jaxfp8.split_dot(x, y, numbers, terms=terms), np.float64)
        assert got.shape == exact.shape
        assert np.all(np.abs(got - exact) <= bound)


def test_large_products_that_cancel_leave_an_exact_rest():
    rng = np.random.default_rng(4)
    x, y = rng.integers(-(2**12), 2**12, (2, 40, 40)).astype(np.float64)
    sums = (x @ y).astype(np.float32)  # rounded: the rest is some units of 2^30
    left, right = np.concatenate([x, -sums], 1), np.concatenate([y, np.eye(40)])
    rest = left @ right
    got = jaxfp8.split_dot(left.astype(np.float32), right.astype(np.float32), terms=4)
    assert 0 < np.abs(rest).max() < 64
    np.testing.assert_array_equal(np.asarray(got), rest)


INT8_KERNELS = [name for name in ffi.available_kernels() if name.endswith(("int8", "vnni"))]


@pytest.mark.parametrize("kernel", INT8_KERNELS)
def test_every_kernel_gives_the_same_bits(kernel, monkeypatch):
    rng = np.random.default_rng(5)
    x, y = draw(rng, (7, 130)), draw(rng, (130, 5))
    want = jaxfp8.split_dot(x, y, terms=2)
    forced = functools.partial(products.scaled_dot, kernel=kernel)
    monkeypatch.setattr(products, "scaled_dot", forced)
    got = terms_of._product(x, y, numbers=MATRICES, terms=2, out_sharding=None)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_three_terms_are_as_accurate_as_float32_on_long_sums():
    rng = np.random.default_rng(7)
    x, y = draw(rng, (16, 8192), 0.0), draw(rng, (8192, 16), 0.0)
    exact = x.astype(np.float64) @ y.astype(np.float64)

    def error(z):
        return np.linalg.norm(np.asarray(z, np.float64) - exact)

    float32 = error(jnp.matmul(x, y, precision="highest"))
    assert error(jaxfp8.split_dot(x, y)) < 1.5 * float32
    assert error(jaxfp8.split_dot(x, y, terms=4)) < 0.5 * float32


@pytest.mark.parametrize("exponents", [(-40, -40), (-100, 90), (110, -100), (60, 60)])
def test_magnitudes_near_the_ends_of_float32_keep_their_accuracy(exponents):
    rng = np.random.default_rng(3)
    x, y = (draw(rng, (8, 8), 0.0) * np.float32(2.0) ** e for e in exponents)
    exact, bound = exact_and_bound(x, y, MATRICES, 3)
    assert np.all(np.abs(np.asarray(jaxfp8.split_dot(x, y), np.float64) - exact) <= bound)


@pytest.mark.parametrize("value", [1.0, 127.0, 128.0, -128.0, 2.0 - 2.0**-23, -1.0 + 2.0**-24])
@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_a_line_of_one_value_is_exact_to_the_bits_of_its_terms(value, terms):
    x = np.full((2, 5), value, np.float32)
    got = jaxfp8.split_dot(x, np.eye(5, dtype=np.float32), terms=terms)
    np.testing.assert_allclose(np.asarray(got), x, rtol=2.0 ** (2 - 8 * terms))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_line_that_is_not_finite_gives_nan_and_others_are_untouched(bad):
    rng = np.random.default_rng(0)
    x, y = draw(rng, (4, 6)), draw(rng, (6, 5))
    whole = jaxfp8.split_dot(x, y)
    x[2, 3] = y[1, 4] = bad
    got = np.asarray(jaxfp8.split_dot(x, y))
    assert np.isnan(got[2]).all() and np.isnan(got[:, 4]).all()
    kept = np.ix_([0, 1, 3], range(4))
    assert np.array_equal(got[kept], np.asarray(whole)[kept])


def test_zeros_and_empty_operands_give_zeros():
    zeros = np.zeros((3, 8), np.float32)
    assert not jaxfp8.split_dot(zeros, np.ones((8, 2), np.float32)).any()
    assert not jaxfp8.split_dot(zeros[:, :0], np.ones((0, 2), np.float32)).any()
    assert jaxfp8.split_dot(zeros[:0], np.ones((8, 2), np.float32)).shape == (0, 2)


def test_sums_longer_than_an_int32_holds_are_cut(monkeypatch):
    monkeypatch.setattr(terms_of, "_EXACT_SUM", 64)
    rng = np.random.default_rng(1)
    x, y = draw(rng, (3, 5, 50)), draw(rng, (5, 50, 4))
    numbers = (((1, 2), (0, 1)), ((), ()))
    exact, bound = exact_and_bound(x, y, numbers, 2)
    got = terms_of._product(x, y, numbers=numbers, terms=2, out_sharding=None)
    assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound)


def test_the_longest_exact_sum_does_not_overflow():
    count = terms_of._EXACT_SUM // 3
    x = np.full((1, count), 1.98, np.float32)  # its largest digits
    got = jaxfp8.split_dot(x, -x.T)
    np.testing.assert_allclose(np.asarray(got), -count * 1.98**2, rtol=1e-6)


def test_16_bit_operands_give_their_dtype():
    x, y = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert jaxfp8.split_dot(x, y).dtype == jnp.bfloat16
    wide = jaxfp8.split_dot(x, y.astype(jnp.float16), preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


DERIVED = {name: NUMBERS[name] for name in ("batch", "two contracted axes")}


@pytest.mark.parametrize("case", DERIVED)
def test_derivatives_are_those_of_the_product(case):
    x_shape, y_shape, numbers = DERIVED[case]
    rng = np.random.default_rng(5)
    x, y, dx, dy = (draw(rng, shape) for shape in (x_shape, y_shape, x_shape, y_shape))

    def split(x, y):
        return jaxfp8.split_dot(x, y, numbers, terms=4)

    def plain(x, y):
        return jax.lax.dot_general(x, y, numbers, precision="highest")

    def outer(f):
        return lambda x, y: jnp.sum(jnp.sin(f(x, y)))

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())

    for a, b in zip(*(jax.jvp(outer(f), (x, y), (dx, dy)) for f in (split, plain)), strict=True):
        close(a, b)
    for a, b in zip(*(jax.grad(outer(f), (0, 1))(x, y) for f in (split, plain)), strict=True):
        assert a.shape == b.shape
        close(a, b)
    twice = [
        jax.grad(lambda x, f=f: jnp.vdot(jax.grad(outer(f))(x, y), dx))(x) for f in (split, plain)
    ]
    close(*twice)


@pytest.mark.slow
def test_the_second_derivative_through_a_scan_is_that_of_the_product():
    rng = np.random.default_rng(6)
    w, x, dw = draw(rng, (4, 4), 0.0), draw(rng, (2, 4), 0.0), draw(rng, (4, 4), 0.0)

    def loss(dot, w):
        def body(h, _):
            return jnp.tanh(dot(h, w)), None

        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    along = [
        jax.jvp(jax.grad(lambda w, dot=dot: loss(dot, w)), (w,), (dw,))[1]
        for dot in (jaxfp8.split_dot, jnp.matmul)
    ]
    np.testing.assert_allclose(*along, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1), (2, 0)], ids=str)
def test_vmap_gives_the_values_of_a_loop(axes):
    rng = np.random.default_rng(8)
    shapes = ((6, 8), (8, 4))
    x, y = (
        draw(rng, shape if axis is None else (*shape[:axis], 5, *shape[axis:]))
        for shape, axis in zip(shapes, axes, strict=True)
    )
    mapped = jax.vmap(jaxfp8.split_dot, in_axes=axes)(x, y)

    def pick(v, axis, i):
        return v if axis is None else np.take(v, i, axis)

    one = [jaxfp8.split_dot(pick(x, axes[0], i), pick(y, axes[1], i)) for i in range(5)]
    np.testing.assert_array_equal(np.asarray(mapped), np.stack(one))


def test_int8_kernels_multiply_the_terms():
    x = jnp.ones((8, 64))
    text = jax.jit(jaxfp8.split_dot).lower(x, x.T).as_text()
    assert text.count("custom_call @jaxfp8") == 4  # one for each weight of a pair of terms
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"terms": 0}, ValueError, "`terms` is 0"),
        ({"terms": 5}, ValueError, "1 to 4 terms"),
        ({"terms": 2.5}, ValueError, "`terms` is 2.5"),
        ({"y": jnp.ones((4, 2), jnp.int8)}, TypeError, "`y`"),
        ({"y": jnp.ones((5, 2))}, ValueError, "contracting axes"),
        ({"y": jnp.ones((3, 4, 2))}, ValueError, "equal leading axes"),
        ({"preferred_element_type": jnp.int32}, TypeError, "preferred_element_type"),
        ({"dimension_numbers": 3}, TypeError, "dimension_numbers"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, text):
    arguments = {"x": jnp.ones((3, 4)), "y": jnp.ones((4, 2)), **arguments}
    with pytest.raises(error, match=r"jaxfp8\.split_dot") as raised:
        jaxfp8.split_dot(**arguments)
    assert text in str(raised.value)


class TestRecipe:
    """`INT8_SPLIT`: a recipe whose products are computed in terms."""

    def test_dots_of_a_program_are_split(self):
        rng = np.random.default_rng(2)
        w, x = draw(rng, (32, 16), 0.0), draw(rng, (5, 32), 0.0)

        def f(w, x):
            return jax.nn.relu(x @ w)

        split = jaxfp8.quantize_dots(f, jaxfp8.INT8_SPLIT)
        np.testing.assert_allclose(split(w, x), f(w, x), rtol=1e-5, atol=1e-5)
        (row,) = split.explain(w, x).matched
        assert row.epilogue == "int8 in 3 terms -> float32"
        assert row.reason == row.ended_by == ""
        grads = [jax.grad(lambda w, g=g: jnp.sum(g(w, x) ** 2))(w) for g in (split, f)]
        np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-4)

    def test_8_bit_data_is_left_to_other_recipes(self):
        w = jaxfp8.quantize(np.eye(8, dtype=np.float32), jnp.int8)
        split = jaxfp8.quantize_dots(
            lambda x: x @ jaxfp8.dequantize(w), jaxfp8.INT8_SPLIT, where=lambda path, row: True
        )
        (row,) = split.explain(np.ones((2, 8), np.float32)).missed
        assert row.reason == "an operand is 8-bit data"

    def test_the_product_of_a_layer_is_split(self):
        rng = np.random.default_rng(4)
        x, w = draw(rng, (4, 24), 0.0), draw(rng, (24, 6), 0.0)

        def loss(dot, x, w):
            return jnp.sum(jnp.sin(dot(x, w)))

        def recipe(x, w):
            return jaxfp8.recipe_dot_general(x, w, MATRICES, jaxfp8.INT8_SPLIT, bias=jnp.ones(6))

        def plain(x, w):
            return jnp.matmul(x, w, precision="highest") + 1

        for a, b in zip(
            *(jax.grad(loss, (1, 2))(dot, x, w) for dot in (recipe, plain)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    def test_operands_in_terms_are_not_held_in_8_bits(self):
        with pytest.raises(ValueError, match="`terms` is 2, but operands that are made of terms"):
            jaxfp8.Recipe(name="both", terms=2)

    def test_a_number_of_terms_out_of_range_is_refused_where_it_is_given(self):
        with pytest.raises(ValueError, match=r"`jaxfp8\.Recipe`: `terms` is 7"):
            dataclasses.replace(jaxfp8.INT8_SPLIT, terms=7)

    def test_a_table_of_linen_is_looked_up_in_floats(self):
        layer = jaxfp8.linen.Embed(10, 8, recipe=jaxfp8.INT8_SPLIT)
        variables = layer.init(jax.random.key(0), jnp.arange(3))
        table = variables["params"]["embedding"]
        np.testing.assert_array_equal(layer.apply(variables, jnp.arange(3)), table[:3])
        got = layer.apply(variables, table[:2], method="attend")
        np.testing.assert_allclose(got, table[:2] @ table.T, rtol=1e-4, atol=1e-5)
