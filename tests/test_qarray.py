"""The value: its invariants, what it says of itself, and how it travels."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxfp8._ops.quantize import dequantize, quantize
from jaxfp8._value.dtypes import as_bytes, bits_as
from jaxfp8._value.qarray import (
    QArray,
    check_qarray,
    check_shapes,
    scale_and_zero_point,
)

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def array(shape, dtype=E4M3):
    return jax.ShapeDtypeStruct(shape, dtype)


def qarray(shape, scale, dtype=E4M3, scale_dtype=jnp.float32, zero_point=None, tiles=None):
    """A QArray of shapes only: what the checks look at."""
    zero = None if zero_point is None else array(zero_point, jnp.int32)
    return QArray(array(shape, dtype), array(scale, scale_dtype), zero, tiles=tiles)


def weight(dtype=E4M3, shape=(3, 40, 8), **options):
    """Three layers with partial tiles along their rows."""
    x = jax.random.normal(jax.random.key(0), shape)
    return quantize(x, dtype, channelwise_axes=(0, 2), tiled_axes={1: 16}, **options)


def same(a, b):
    """Whether two trees have one structure and the same bytes."""
    flat_a, def_a = jax.tree.flatten(a)
    flat_b, def_b = jax.tree.flatten(b)
    return def_a == def_b and all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(flat_a, flat_b, strict=True)
    )


# What it says of itself


def test_repr_shows_dtypes_and_shapes_only():
    q = qarray((4096, 4096), (1, 4096))
    assert repr(q) == "QArray(float8_e4m3fn[4096,4096], scale=float32[1,4096])"


def test_repr_shows_zero_point_and_tiles_where_given():
    q = qarray((5, 8), (2, 1), np.int8, zero_point=(), tiles=(3, None))
    assert repr(q) == "QArray(int8[5,8], scale=float32[2,1], zero_point=int32[], tiles=(3, None))"


def test_repr_survives_leaves_that_are_no_arrays():
    assert repr(QArray(None, "s")) == "QArray(None, scale='s')"


def test_shape_ndim_size_and_nbytes():
    q = weight(np.int8, zero_point=True)
    assert (q.shape, q.ndim, q.size) == ((3, 40, 8), 3, 960)
    assert q.nbytes == 960 + 4 * 72 + 72


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtype_is_that_of_the_scale(scale_dtype):
    assert qarray((4,), (), scale_dtype=scale_dtype).dtype == scale_dtype


def test_dtype_is_float32_for_power_of_two_scales():
    assert qarray((4,), (), scale_dtype=E8M0).dtype == jnp.float32


@pytest.mark.parametrize(
    ("shape", "scale", "tiles", "expected"),
    [
        ((), (), None, ()),
        ((6, 8), (), None, (6, 8)),
        ((6, 8), (1, 8), None, (6, 1)),
        ((6, 8), (3, 2), None, (2, 4)),
        ((7, 8), (3, 1), (3, None), (3, 8)),
        ((7, 8, 5), (7, 1, 3), (2,), (1, 8, 2)),
        ((7,), (3,), (1, None, 3), (3,)),
        ((7,), (3,), (np.int64(3),), (3,)),
        ((0, 4), (1, 4), None, (1, 1)),
        ((0, 4), (0, 4), None, (1, 1)),
        ((5, 4), (1, 4), (128, None), (128, 1)),
    ],
)
def test_tile_sizes(shape, scale, tiles, expected):
    q = qarray(shape, scale, tiles=tiles)
    check_shapes(q, "test", "q")
    assert q.tile_sizes == expected
    assert {type(tile) for tile in q.tile_sizes} <= {int}


def test_tiles_given_as_a_list_are_kept_hashable():
    assert hash(qarray((7,), (3,), tiles=[3]).tiles) == hash((3,))


def test_is_frozen():
    with pytest.raises(AttributeError, match="scale"):
        weight().scale = None


# Bytes


@FLOAT8
def test_bytes_hold_every_code(dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = bits_as(codes, dtype)
    assert values.dtype == dtype
    assert as_bytes(values).dtype == jnp.uint8
    np.testing.assert_array_equal(as_bytes(values), codes)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integers_are_their_own_bytes(dtype):
    values = jnp.array([0, 1, 127], dtype)
    assert as_bytes(values).dtype == dtype
    np.testing.assert_array_equal(bits_as(as_bytes(values), dtype), values)


@FLOAT8
def test_no_gradient_passes_through_bytes(dtype):
    def loss(values):
        return 1e6 * bits_as(as_bytes(values), dtype).astype(jnp.float32).sum()

    gradient = jax.grad(loss)(jnp.ones(3, dtype))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.zeros(3))


# Scale and zero point by tile


def test_a_scalar_scale_becomes_one_of_full_rank():
    q = QArray(jnp.ones((2, 3), E4M3), jnp.float16(0.5))
    scale, zero_point, tiles = scale_and_zero_point(q)
    assert (scale.shape, scale.dtype, zero_point, tiles) == ((1, 1), jnp.float32, None, (2, 3))


def test_a_zero_point_finer_than_the_scale_sets_the_tiles():
    q = QArray(jnp.ones((6, 4), jnp.int8), jnp.ones((1, 4)), jnp.ones((3, 1), jnp.int8))
    check_qarray(q, "test", "q")
    scale, zero_point, tiles = scale_and_zero_point(q)
    assert scale.shape == zero_point.shape == (3, 4)
    assert zero_point.dtype == jnp.int32
    assert tiles == (2, 1)


def test_an_empty_axis_has_no_scales():
    scale, _, tiles = scale_and_zero_point(QArray(jnp.ones((0, 4), E4M3), jnp.ones((1, 4))))
    assert (scale.shape, tiles) == ((0, 4), (1, 1))


# As a pytree


def test_key_paths_name_the_fields():
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(weight(np.int8, zero_point=True))
    ]
    assert paths == [".qvalue", ".scale", ".zero_point"]


@pytest.mark.parametrize("leaf", [None, object(), 3, "spec", array((2,))])
def test_unflattening_accepts_any_leaf(leaf):
    structure = jax.tree.structure(weight())
    q = jax.tree.unflatten(structure, [leaf, leaf])
    assert q.qvalue is leaf
    assert q.tiles == (16, None)


def test_equal_structures_compare_and_hash_equal():
    a, b = (jax.tree.structure(weight()) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)


def test_tree_map_keeps_the_tiles():
    assert jax.tree.map(lambda leaf: leaf.shape, weight()).tiles == (16, None)


def test_jit_takes_and_returns_it():
    assert same(jax.jit(lambda q: q)(weight()), weight())


def test_vmap_over_a_leading_axis_keeps_the_tiles():
    q = weight()
    expected = dequantize(q)
    np.testing.assert_array_equal(jax.vmap(dequantize)(q), expected)


def test_vmap_makes_it_with_a_leading_axis():
    x = jax.random.normal(jax.random.key(0), (3, 40, 8))
    make = jax.vmap(lambda row: quantize(row, channelwise_axes=(1,), tiled_axes={0: 16}))
    assert same(make(x), weight())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, np.int8], ids=["e4m3", "e5m2", "int8"])
def test_scan_over_a_stack_sees_each_layer(dtype):
    q = weight(dtype)
    _, layers = jax.lax.scan(lambda carry, layer: (carry, dequantize(layer)), 0, q)
    np.testing.assert_array_equal(layers, dequantize(q))


def test_scan_over_a_stack_with_power_of_two_scales():
    q = weight(scale_dtype=E8M0)
    _, layers = jax.lax.scan(lambda carry, layer: (carry, dequantize(layer)), 0, q)
    np.testing.assert_array_equal(layers, dequantize(q))


def test_scan_carries_it():
    q = weight()
    carried, _ = jax.lax.scan(lambda q, _: (q, None), q, length=3)
    assert same(carried, q)


def test_eval_shape_gives_the_same_structure_without_data():
    abstract = jax.eval_shape(weight)
    assert jax.tree.structure(abstract) == jax.tree.structure(weight())
    assert repr(abstract) == repr(weight())
    check_shapes(abstract, "test", "q")


def test_device_put_moves_every_leaf():
    device = jax.devices()[1]
    moved = jax.device_put(weight(), device)
    assert {leaf.device for leaf in jax.tree.leaves(moved)} == {device}
    assert same(moved, weight())


@pytest.mark.parametrize("copied", [lambda q: pickle.loads(pickle.dumps(q)), copy.deepcopy])
def test_copies_are_alike(copied):
    q = weight(np.uint8, zero_point=True)
    assert same(copied(q), q)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(E4M3, {}), (E5M2, {"scale_dtype": jnp.bfloat16}), (np.int8, {"zero_point": True})],
    ids=["e4m3", "e5m2-bf16", "int8-zero_point"],
)
def test_orbax_restores_what_it_saved(tmp_path, dtype, options):
    tree = {"layer": {"kernel": weight(dtype, **options), "bias": jnp.ones(8)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", tree)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = checkpointer.restore(tmp_path / "weights", target)
    assert same(restored, tree)


# Checks


GOOD = {
    "scalar scale": qarray((6, 8), ()),
    "whole": qarray((6, 8), (1, 1)),
    "channels": qarray((6, 8), (6, 1)),
    "tiles": qarray((6, 8), (3, 2)),
    "partial tiles": qarray((7, 8), (3, 2), tiles=(3, None)),
    "rank 0": qarray((), ()),
    "empty": qarray((0, 8), (0, 1)),
    "empty in one tile": qarray((0, 8), (1, 1)),
    "power-of-two scale": qarray((6, 8), (), scale_dtype=E8M0),
    "scalar zero point": qarray((6, 8), (6, 1), np.int8, zero_point=()),
    "zero point of the scale's shape": qarray((6, 8), (6, 1), np.uint8, zero_point=(6, 1)),
    "shared zero point": qarray((6, 8), (6, 1), np.int8, zero_point=(1, 1)),
    "finer zero point": qarray((6, 8), (), np.int8, zero_point=(6, 1)),
}


@pytest.mark.parametrize("q", GOOD.values(), ids=GOOD.keys())
def test_accepts(q):
    check_shapes(q, "jaxfp8.matmul", "rhs")


def test_accepts_numpy_arrays():
    check_qarray(QArray(np.ones(3, ml_dtypes.float8_e4m3fn), np.float32(1)), "test", "q")


BAD = {
    "no QArray": (
        np.ones(3),
        TypeError,
        "`jaxfp8.matmul`: `rhs` is of type ndarray, but a QArray is needed; "
        "use `jaxfp8.quantize` to make one.",
    ),
    "qvalue no array": (
        QArray(object(), array((), jnp.float32)),
        TypeError,
        "`jaxfp8.matmul`: qvalue of `rhs` is of type object, but an array is needed; "
        "pass it as a `jax.Array`.",
    ),
    "scale no array": (
        QArray(array((3,)), 0.5),
        TypeError,
        "scale of `rhs` is of type float, but an array is needed",
    ),
    "qvalue dtype": (
        qarray((3,), (), np.float32),
        TypeError,
        "qvalue of `rhs` has dtype float32, but float8_e4m3fn, float8_e5m2, int8 or uint8 is "
        "needed; use `jaxfp8.quantize` to make a QArray of wide values.",
    ),
    "scale dtype": (
        qarray((3,), (), scale_dtype=np.int32),
        TypeError,
        "scale of `rhs` has dtype int32, but float32, bfloat16, float16 or float8_e8m0fnu is "
        "needed; convert it with `.astype(jax.numpy.float32)`.",
    ),
    "zero point on FP8": (
        qarray((3,), (), zero_point=()),
        TypeError,
        "zero_point of `rhs` is given, but float8_e4m3fn has none; "
        "leave it out, or quantize to int8 or uint8.",
    ),
    "zero point dtype": (
        QArray(array((3,), np.int8), array((), np.float32), array((), np.uint8)),
        TypeError,
        "zero_point of `rhs` has dtype uint8, but qvalue of dtype int8 needs int8 or int32; "
        "round it and convert it with `.astype(jax.numpy.int32)`.",
    ),
    "scale rank": (
        qarray((3, 4), (4,)),
        ValueError,
        "scale of `rhs` has shape (4,), but qvalue of shape (3, 4) needs shape () or rank 2; "
        "keep an axis of size 1 where tiles are shared, as in `s.reshape(1, -1)`.",
    ),
    "zero point rank": (
        qarray((3, 4), (1, 4), np.int8, zero_point=(4,)),
        ValueError,
        "zero_point of `rhs` has shape (4,), but qvalue of shape (3, 4) needs shape () or rank 2",
    ),
    "tiles": (
        qarray((3, 4), (1, 4), tiles=(0, None)),
        ValueError,
        "tiles of `rhs` is (0, None), but a tile is an int of at least 1, or None; give its size.",
    ),
    "tiles of True": (qarray((3, 4), (3, 4), tiles=(True,)), ValueError, "is (True,), but a tile"),
    "tiles of floats": (qarray((4,), (2,), tiles=(2.0,)), ValueError, "is (2.0,), but a tile"),
    "tiles no tuple": (
        qarray((3, 4), (1, 4), tiles=5),
        TypeError,
        "tiles of `rhs` is 5, but a tuple is needed; "
        "give a size or None for each of the last axes.",
    ),
    "more tiles than axes": (
        qarray((4,), (2,), tiles=(3, 2)),
        ValueError,
        "tiles of `rhs` is (3, 2), but qvalue of shape (4,) has 1 axes; "
        "give no more sizes than axes.",
    ),
    "scale shape": (
        qarray((512, 64), (5, 64)),
        ValueError,
        "`jaxfp8.matmul`: scale of `rhs` has shape (5, 64), but qvalue of shape (512, 64) needs "
        "1, 512 or a divisor of it on axis 0; give `tiles` if the last tile is partial, or use "
        "`jaxfp8.quantize` to make it.",
    ),
    "scale larger than its axis": (
        qarray((2, 4), (2, 8)),
        ValueError,
        "needs 1, 4 or a divisor of it on axis 1",
    ),
    "no scales for values": (
        qarray((2, 4), (2, 0)),
        ValueError,
        "needs 1, 4 or a divisor of it on axis 1",
    ),
    "number of tiles": (
        qarray((300, 8), (2, 8), tiles=(128, None)),
        ValueError,
        "scale of `rhs` has shape (2, 8), but qvalue of shape (300, 8) in tiles of 128 needs 3 on "
        "axis 0; give the tile sizes that it was made with.",
    ),
    "zero point shape": (
        qarray((6, 8), (6, 1), np.int8, zero_point=(3, 1)),
        ValueError,
        "zero_point of `rhs` has shape (3, 1), but scale of shape (6, 1) needs as many or 1 on "
        "each axis; use one for each entry of the scale.",
    ),
    "finer zero point": (
        qarray((6, 8), (1, 1), np.int8, zero_point=(5, 1)),
        ValueError,
        "zero_point of `rhs` has shape (5, 1), but qvalue of shape (6, 8) needs 1, 6 or a divisor",
    ),
}


@pytest.mark.parametrize(("q", "error", "text"), BAD.values(), ids=BAD.keys())
def test_refuses(q, error, text):
    with pytest.raises(error) as caught:
        check_qarray(q, "jaxfp8.matmul", "rhs")
    assert text in str(caught.value)


@pytest.mark.parametrize("leaf", ["qvalue", "scale", "zero_point"])
def test_refuses_leaves_that_hold_no_data(leaf):
    q = weight(np.int8, zero_point=True)
    stand_in = array(getattr(q, leaf).shape, getattr(q, leaf).dtype)
    with pytest.raises(TypeError) as caught:
        check_qarray(dataclasses.replace(q, **{leaf: stand_in}), "jaxfp8.matmul", "rhs")
    assert str(caught.value) == (
        f"`jaxfp8.matmul`: {leaf} of `rhs` is of type ShapeDtypeStruct, but an array of numbers "
        "is needed; pass a jax.Array (inside `jax.eval_shape` for shapes alone)."
    )


def test_eval_shape_takes_what_holds_no_data():
    abstract = jax.eval_shape(weight)
    assert jax.eval_shape(dequantize, abstract).shape == abstract.shape
