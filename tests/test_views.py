"""Views of 8-bit arrays: transposed ones in products, parts along leading axes, and `@`."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._value.qarray import QArray


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


KINDS = {
    "channel": lambda w: jaxfp8.quantize(w, channelwise_axes=(-2,)),
    "partial blocks": lambda w: jaxfp8.quantize(w, tiled_axes={-2: 16, -1: 32}),
    "int8 with a zero point": lambda w: jaxfp8.quantize(
        w, jnp.int8, channelwise_axes=(-2,), zero_point=True
    ),
    "one scale": lambda w: jaxfp8.quantize(w),
}
KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("kind", "rows"), [("channel", 1), *((kind, 5) for kind in KINDS)])
def test_product_with_a_transposed_weight_is_the_one_of_the_stored_weight(kind, rows):
    w, x = KINDS[kind](normal(40, 72)), normal(rows, 72, seed=1)
    got = jaxfp8.matmul(x, w.T)
    np.testing.assert_array_equal(got, jaxfp8.einsum("mk,nk->mn", x, w))
    np.testing.assert_array_equal(x @ w.T, got)


def test_a_transposed_weight_is_read_as_it_lies():
    w = jaxfp8.quantize(normal(40, 72), channelwise_axes=(0,))
    text = jax.jit(lambda x, w: x @ w.T).lower(normal(2, 72), w).compile().as_text()
    assert " transpose(" not in text and "f8e4m3fn[72,40]" not in text
    assert w.T.T is w and w.T.stored is w and w.T.nbytes == w.nbytes


def test_view_dequantizes_to_the_transposed_values():
    w = KINDS["partial blocks"](normal(3, 40, 72))
    wide = jaxfp8.dequantize(w)
    np.testing.assert_array_equal(jaxfp8.dequantize(w.mT), wide.mT)
    np.testing.assert_array_equal(jaxfp8.dequantize(w.T), wide.T)
    moved = w.transpose((1, 2, 0))
    np.testing.assert_array_equal(jaxfp8.dequantize(moved.contiguous()), wide.transpose(1, 2, 0))
    assert moved.shape == (40, 72, 3) and moved.transpose((2, 0, 1)) is w


@pytest.mark.parametrize("equation", ["btk,khd->bthd", "bthd,khd->btk", "btd,khd->bhtk"])
def test_einsum_reads_several_axes_of_a_view(equation):
    """Free axes of the view lie in another order in memory."""
    w = jaxfp8.quantize(normal(6, 8, 4), jnp.int8, channelwise_axes=(0,)).transpose((2, 0, 1))
    sizes = {"b": 2, "t": 3, "k": 4, "h": 6, "d": 8}
    x = normal(*(sizes[letter] for letter in equation.split(",")[0]), seed=1)
    exact = jnp.einsum(equation, x, jaxfp8.dequantize(w), precision="highest")
    bias = jnp.arange(exact.shape[-1], dtype=jnp.float32)
    got = jaxfp8.einsum(equation, x, w, bias=bias)
    np.testing.assert_allclose(got, exact + bias, rtol=2e-5, atol=2e-5)


def test_a_view_may_be_the_left_side_and_have_batch_axes():
    w, x = jaxfp8.quantize(normal(3, 5, 8), channelwise_axes=(0,)), normal(3, 5, 6, seed=1)
    exact = jnp.matmul(jaxfp8.dequantize(w).mT, x, precision="highest")
    np.testing.assert_allclose(w.mT @ x, exact, rtol=2e-5, atol=2e-5)


def test_gradients_through_a_view_are_those_of_the_stored_weight():
    w, x = jaxfp8.quantize(normal(5, 8), channelwise_axes=(0,)), normal(2, 8, seed=1)
    wide = jaxfp8.dequantize(w)
    got = jax.grad(lambda x: (x @ w.T).sum())(x)
    np.testing.assert_allclose(got, jnp.ones((2, 5)) @ wide, rtol=1e-5)
    numbers = (((1,), (0,)), ((), ()))

    def layer(x, w):
        return jaxfp8.recipe_dot_general(x, w, numbers, jaxfp8.FP8_DYNAMIC)

    of_scale = jax.grad(lambda s: layer(x, QArray(w.qvalue, s).T).sum())(w.scale)
    assert of_scale.shape == w.scale.shape and jnp.abs(of_scale).max() > 0
    np.testing.assert_array_equal(layer(x, w.T), layer(x, w.T.contiguous()))


def test_scan_and_vmap_take_views_apart_along_leading_axes():
    stack, x = jaxfp8.quantize(normal(3, 5, 8), jnp.int8, channelwise_axes=(0, 1)), normal(2, 8)
    each = [x @ stack[i].T for i in range(3)]
    _, scanned = jax.lax.scan(lambda _, w: (None, x @ w), None, stack.mT)
    np.testing.assert_array_equal(scanned, each)
    np.testing.assert_array_equal(jax.vmap(lambda w: x @ w)(stack.mT), each)
    np.testing.assert_array_equal(x @ stack.mT[1], each[1])


def test_prepared_view_is_the_prepared_weight():
    w, x = jaxfp8.quantize(normal(64, 8), channelwise_axes=(0,)), normal(2, 8, seed=1)
    prepared = jaxfp8.prepare(w.T)
    assert prepared.shape == (8, 64)
    np.testing.assert_array_equal(prepared.packed.qvalue, jaxfp8.prepare(w, -1).packed.qvalue)
    np.testing.assert_allclose(x @ prepared, x @ w.T, rtol=1e-5, atol=1e-5)


def test_view_goes_through_jit_and_export():
    w, x = jaxfp8.quantize(normal(5, 8), channelwise_axes=(0,)), normal(2, 8, seed=1)
    export = jax.export.export(
        jax.jit(lambda x, w: x @ w), disabled_checks=jaxfp8.ffi.export_checks()
    )
    exported = jax.export.deserialize(export(x, w.T).serialize())
    np.testing.assert_allclose(exported.call(x, w.T), x @ w.T, rtol=1e-6)


@pytest.mark.parametrize("x", [normal(2, 8), np.ones((2, 8), np.float32)], ids=["jax", "numpy"])
def test_operator_is_matmul_from_both_sides(x):
    q = jaxfp8.quantize(normal(8, 8, seed=2), channelwise_axes=(1,))
    np.testing.assert_array_equal(x @ q, jaxfp8.matmul(x, q))
    np.testing.assert_array_equal(q @ x.T, jaxfp8.matmul(q, x.T))
    assert isinstance(jax.jit(lambda x: x @ q)(x), jax.Array)


# Parts


@KIND
def test_a_part_stands_for_the_part_of_the_values(kind):
    w = KINDS[kind](normal(3, 40, 72))
    indices = [-1, slice(1, 3), (2, slice(0, 16)), (slice(None), slice(16, 40))]
    wide = jaxfp8.dequantize(w)
    parts = jax.jit(lambda w: [jaxfp8.dequantize(w[index]) for index in indices])(w)
    for index, got in zip(indices, parts, strict=True):
        np.testing.assert_array_equal(got, wide[index])


PLACES = np.array([2, -3, 2])
INDICES = [
    np.s_[..., 3],
    np.s_[..., :32],
    np.s_[:, None, 16:],
    np.s_[None, 1, ..., None],
    np.s_[::-1],
    np.s_[PLACES],
    np.s_[PLACES.reshape(1, 3), :, 32:64],
    np.s_[()],
    np.s_[2, 17, 40],
]
# Along an axis without tiles.
FREE = [np.s_[:, PLACES], np.s_[:, 3:5], np.s_[..., 7:2:-1], np.s_[:, 30::3]]


@KIND
def test_an_index_takes_what_it_takes_of_an_array(kind):
    w = KINDS[kind](normal(3, 40, 72))
    indices = INDICES + FREE * (kind in ("channel", "one scale"))
    parts = jax.jit(lambda w: [jaxfp8.dequantize(w[index]) for index in indices])(w)
    for index, got in zip(indices, parts, strict=True):
        np.testing.assert_array_equal(got, np.asarray(jaxfp8.dequantize(w))[index])


@KIND
def test_an_index_of_a_view_is_that_of_its_axes(kind):
    w = KINDS[kind](normal(3, 40, 72)).transpose((2, 0, 1))
    indices = [3, np.s_[:32, 1], np.s_[..., 16:], np.s_[:, PLACES], np.s_[2, 1, 0]]
    parts = jax.jit(lambda w: [jaxfp8.dequantize(w[index]) for index in indices])(w)
    for index, got in zip(indices, parts, strict=True):
        np.testing.assert_array_equal(got, np.asarray(jaxfp8.dequantize(w))[index])


def test_traced_places_take_experts():
    w = jaxfp8.quantize(normal(3, 4, 8), channelwise_axes=(0, 1))
    got = jax.jit(lambda i: jaxfp8.dequantize(w[i]))(PLACES)
    np.testing.assert_array_equal(got, jaxfp8.dequantize(w)[PLACES])


def test_a_traced_index_takes_the_layer():
    w = jaxfp8.quantize(normal(3, 4, 8), channelwise_axes=(0, 1))
    got = jax.jit(lambda i: jaxfp8.dequantize(w[i]))(jnp.int32(-1))
    np.testing.assert_array_equal(got, jaxfp8.dequantize(w)[2])


def test_parts_keep_every_bit_of_fp8():
    codes = np.arange(512, dtype=np.uint8).reshape(2, 256).view(jnp.float8_e5m2)
    q = QArray(jnp.asarray(codes), jnp.ones((2, 1)))
    got = jax.lax.bitcast_convert_type(q[1].qvalue, jnp.uint8)
    np.testing.assert_array_equal(got, np.arange(256))


BLOCKS = KINDS["partial blocks"]


@pytest.mark.parametrize("index", [slice(40, None), slice(20, 3), slice(500, 600), slice(0, 0)])
def test_an_empty_slice_is_empty_anywhere_in_a_tile(index):
    q = BLOCKS(normal(40, 72))
    part = q[index]
    assert part.shape == np.zeros((40, 72))[index].shape == (0, 72)
    np.testing.assert_array_equal(jaxfp8.dequantize(part), np.zeros((0, 72)))


@pytest.mark.parametrize(
    ("take", "error", "reason"),
    [
        (lambda q: q[0, 3:20], IndexError, "tiles of 16 have to be whole.*whole tiles"),
        (lambda q: q[0, ::2], IndexError, "in steps of 1"),
        (lambda q: q[3], IndexError, "is 3, but the axis has 3"),
        (lambda q: q[0, 0, 0, 0], IndexError, "has 4 axes"),
        (lambda q: q[0, jnp.arange(2)], IndexError, "is an array, but tiles of 16"),
        (lambda q: q[jnp.ones(3, bool)], TypeError, "is an array of bool, but .*array of ints"),
        (lambda q: q[jnp.arange(2), 0], IndexError, "one after the other"),
        (lambda q: q[..., 0, ...], IndexError, "2 ellipses"),
        (lambda q: q["a"], TypeError, "an int or a slice"),
        (lambda q: q.T[None], IndexError, "has a new axis.*index `stored`"),
        (lambda q: q.T[0, 3:20], IndexError, "tiles of 16 have to be whole"),
        (lambda q: q.transpose((0, 1)), ValueError, "each of 3 axes is needed once"),
        (lambda q: q.transpose((-4, 1, 2)), ValueError, "each of 3 axes is needed once"),
        (lambda q: q.transpose(0), ValueError, "each of 3 axes is needed once"),
        (lambda q: q[0, :16].mT.mT[0, 0].mT, ValueError, "two at least"),
    ],
    ids=range(15),
)
def test_what_has_no_meaning_is_refused(take, error, reason):
    with pytest.raises(error, match=reason):
        take(BLOCKS(normal(3, 40, 72)))
