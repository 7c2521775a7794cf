"""`jaxfp8.prepare`: the same weight, and the same products, in another order of bytes."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import PreparedArray, QArray
from jaxfp8._value import prepared as _prepared

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRAINS = {
    "tensor": {},
    "channel": {"channelwise_axes": (1,)},
    "block": {"tiled_axes": {0: 128, 1: 128}},
    "group": {"channelwise_axes": (1,), "tiled_axes": {0: 32}},
    "pair": {"channelwise_axes": (1,), "tiled_axes": {0: 2}},
    "value": {"channelwise_axes": (0, 1)},
    "columns": {"tiled_axes": {1: 16}},
}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_same(a, b):
    """Equal as pytrees: structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def assert_close(a, b):
    a, b = (np.asarray(value, np.float64) for value in (a, b))
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("grain", GRAINS)
def test_nothing_is_lost(grain, dtype):
    zero = {"zero_point": True} if dtype == jnp.uint8 else {}
    q = jaxfp8.quantize(normal(260, 192), dtype, **GRAINS[grain], **zero)
    p = jaxfp8.prepare(q)
    assert isinstance(p, PreparedArray)
    assert (p.shape, p.ndim, p.size, p.dtype, p.nbytes) == (
        q.shape,
        q.ndim,
        q.size,
        q.dtype,
        q.nbytes,
    )
    assert_same(p.unprepare(), q)


@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e8m0fnu])
def test_the_dtype_of_the_scale_stays(scale_dtype):
    q = jaxfp8.quantize(normal(64, 64), **GRAINS["group"], scale_dtype=scale_dtype)
    assert_same(jaxfp8.prepare(q).unprepare(), q)


def test_a_scalar_scale_stays_a_scalar():
    q = QArray(jnp.ones((8, 64), jnp.int8), jnp.float32(0.5))
    p = jaxfp8.prepare(q)
    assert p.packed.scale.shape == ()
    assert_same(p.unprepare(), q)
    assert_close(jaxfp8.matmul(normal(3, 8), p), jaxfp8.matmul(normal(3, 8), q))


def test_the_layout_is_the_documented_one():
    codes = np.arange(8 * 128, dtype=np.int64).reshape(8, 128) % 251
    p = jaxfp8.prepare(QArray(jnp.asarray(codes, jnp.uint8), jnp.ones((1, 128))))
    packed = np.asarray(p.packed.qvalue)
    assert packed.shape == (2, 2, 64, 4)
    for n, k in [(0, 0), (5, 3), (63, 7), (64, 0), (127, 6)]:
        assert packed[n // 64, k // 4, n % 64, k % 4] == codes[k, n]


@pytest.mark.parametrize("lhs", ["float32", "bfloat16", "row", "block", "zero_point"])
@pytest.mark.parametrize("grain", GRAINS)
def test_products_are_those_of_the_weight_as_it_was(grain, lhs):
    x = normal(5, 260, seed=1)
    x = {
        "float32": lambda: x,
        "bfloat16": lambda: x.astype(jnp.bfloat16),
        "row": lambda: jaxfp8.quantize(x, jnp.int8, channelwise_axes=(0,)),
        "block": lambda: jaxfp8.quantize(x, E4M3, channelwise_axes=(0,), tiled_axes={1: 128}),
        "zero_point": lambda: jaxfp8.quantize(x, jnp.uint8, zero_point=True),
    }[lhs]()
    for dtype in (E4M3, jnp.int8):
        q = jaxfp8.quantize(normal(260, 192), dtype, **GRAINS[grain])
        expected = jaxfp8.matmul(x, q, preferred_element_type=jnp.float32)
        found = jaxfp8.matmul(x, jaxfp8.prepare(q), preferred_element_type=jnp.float32)
        assert_close(found, expected)


EPILOGUES = {
    "bias": {"bias": jnp.arange(192.0)},
    "one bias": {"bias": jnp.float32(3)},
    "residual": {"residual": normal(7, 192, seed=3)},
    "residual of rows": {"residual": normal(7, 1, seed=3)},
    "amax": {"return_amax": True, "activation": "gelu_tanh"},
    "int8": {"preferred_element_type": jnp.int8, "out_scale": jnp.arange(1.0, 193)},
    "fp8": {
        "preferred_element_type": E4M3,
        "out_scale": 0.1,
        "bias": jnp.ones(192),
        "return_amax": True,
    },
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_are_those_of_the_weight_as_it_was(epilogue):
    q = jaxfp8.quantize(normal(64, 192), jnp.int8, channelwise_axes=(1,))
    x = jaxfp8.quantize(normal(7, 64, seed=1), jnp.int8, channelwise_axes=(0,))
    given = EPILOGUES[epilogue]
    expected = jaxfp8.matmul(x, q, **given)
    found = jaxfp8.matmul(x, jaxfp8.prepare(q), **given)
    assert_same(found, expected)  # integer sums are exact


def test_every_axis_can_be_the_contracted_one_and_every_layout_multiplies():
    x = normal(3, 8, seed=1)
    for axis, shape in [(0, (8, 2, 64)), (1, (2, 8, 64)), (2, (2, 64, 8)), (-1, (64, 8))]:
        q = jaxfp8.quantize(normal(*shape), jnp.int8)
        p = jaxfp8.prepare(q, axis)
        assert p.shape == shape
        assert_same(p.unprepare(), q)
        numbers = ((1,), (axis % len(shape),)), ((), ())
        assert_close(jaxfp8.dot_general(x, p, numbers), jaxfp8.dot_general(x, q, numbers))


def test_batches_einsum_and_vectors():
    q = jaxfp8.quantize(normal(3, 8, 64), jnp.int8, channelwise_axes=(0, 2))
    p = jaxfp8.prepare(q)
    x = normal(3, 5, 8, seed=1)
    assert_close(jaxfp8.matmul(x, p), jaxfp8.matmul(x, q))
    assert_close(jaxfp8.matmul(x[0], p), jaxfp8.matmul(x[0], q))
    for equation in ("bmk,bkn->bmn", "bmk,bkn->nbm", "...mk,...kn->...mn"):
        assert_close(jaxfp8.einsum(equation, x, p), jaxfp8.einsum(equation, x, q))
    assert_close(jaxfp8.einsum("mk,bkn->bnm", x[0], p), jaxfp8.einsum("mk,bkn->bnm", x[0], q))
    flat = jaxfp8.quantize(normal(8, 64), jnp.int8)
    assert_close(jaxfp8.matmul(x[0, 0], jaxfp8.prepare(flat)), jaxfp8.matmul(x[0, 0], flat))
    assert_close(jaxfp8.matmul(x, jaxfp8.prepare(flat)), jaxfp8.matmul(x, flat))


def test_transformations():
    q = jaxfp8.quantize(normal(4, 64, 64), E4M3, channelwise_axes=(0, 2))
    p, x = jaxfp8.prepare(q), normal(4, 3, 64, seed=1)
    expected = jaxfp8.matmul(x, q)
    assert_close(jax.jit(jaxfp8.matmul)(x, p), expected)
    assert_close(jax.vmap(jaxfp8.matmul)(x, p), expected)
    assert_close(jax.vmap(lambda x: jaxfp8.matmul(x, p))(x[None])[0], expected)
    _, scanned = jax.lax.scan(lambda c, xw: (c, jaxfp8.matmul(*xw)), 0, (x, p))
    assert_close(scanned, expected)
    for w in (p, jax.jit(jaxfp8.prepare)(q)):
        gradient = jax.grad(lambda x, w=w: jnp.sum(jnp.sin(jaxfp8.matmul(x, w))))(x)
        assert_close(gradient, jax.grad(lambda x: jnp.sum(jnp.sin(jaxfp8.matmul(x, q))))(x))
    assert_same(jax.vmap(jaxfp8.prepare)(q).unprepare(), jax.vmap(lambda q: q)(q))
    assert_same(pickle.loads(pickle.dumps(p)), p)


def test_the_scale_has_the_gradient_that_it_had():
    q, x = jaxfp8.quantize(normal(8, 64), jnp.int8, channelwise_axes=(1,)), normal(3, 8, seed=1)

    def loss(scale, prepared):
        w = QArray(q.qvalue, scale)
        return jnp.sum(jnp.sin(jaxfp8.matmul(x, jaxfp8.prepare(w) if prepared else w)))

    assert_close(jax.grad(loss)(q.scale, True), jax.grad(loss)(q.scale, False))


def test_a_tree_is_prepared_leaf_by_leaf():
    q = jaxfp8.quantize(normal(8, 64), jnp.int8)
    tree = {"a": q, "bias": jnp.ones(3), "none": None, "list": [q, 2]}
    prepared = jaxfp8.prepare(tree)
    assert isinstance(prepared["a"], PreparedArray)
    assert isinstance(prepared["list"][0], PreparedArray)
    assert prepared["bias"] is tree["bias"]
    again = jaxfp8.prepare(prepared)
    assert isinstance(again["a"], PreparedArray)
    assert jax.tree.structure(again) == jax.tree.structure(prepared)


@pytest.mark.parametrize(
    ("shape", "grain", "why"),
    [
        (
            (8, 65),
            {},
            "it has 65 columns of 8 values, and multiples of 64 columns and of 4 values are needed",
        ),
        (
            (6, 64),
            {},
            "it has 64 columns of 6 values, and multiples of 64 columns and of 4 values are needed",
        ),
        ((0, 64), {}, "it is empty"),
        ((12, 64), {"tiled_axes": {0: 3}}, "cut groups"),
        ((12, 192), {"tiled_axes": {1: 48}}, "cut groups"),
    ],
)
def test_what_cannot_be_prepared_is_left_and_says_why(shape, grain, why):
    q = jaxfp8.quantize(jnp.ones(shape), jnp.int8, **grain)
    with pytest.warns(jaxfp8.FallbackWarning, match=why) as caught:
        left = jaxfp8.prepare({"layer": {"kernel": q}})
    assert left["layer"]["kernel"] is q
    assert "`layer/kernel`" in str(caught[0].message)
    assert caught[0].filename == __file__


# Sums, for a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """Weights are prepared as if they were on a GPU."""
    monkeypatch.setattr(_prepared, "_platform", lambda q: "gpu")


def test_a_gpu_keeps_fp8_weights_whose_contracted_axis_lies_last(on_gpu):
    q = jaxfp8.quantize(normal(8, 64), channelwise_axes=(0,))
    assert jaxfp8.prepare(q.T).stored is q
    assert jaxfp8.prepare(q, -1) is q
    flat = jaxfp8.quantize(normal(64), jnp.int8)
    assert jaxfp8.prepare(flat, -1) is flat


def test_a_gpu_copies_no_view(on_gpu):
    q = jaxfp8.quantize(normal(64, 40))
    assert jaxfp8.prepare(q.T, -1).stored is q
    q = jaxfp8.quantize(normal(64, 40), jnp.int8)
    p = jaxfp8.prepare(q.T, -1)
    assert (p.turned, p.shape, p.sums.shape) == (False, (40, 64), (1, 40))
    assert p.unprepare().stored is q
    x = jaxfp8.quantize(normal(5, 64, seed=1), jnp.uint8, zero_point=True)
    over_last = (((1,), (1,)), ((), ()))
    assert_same(jaxfp8.dot_general(x, p, over_last), jaxfp8.dot_general(x, q.T, over_last))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("axis", [-3, 1, 2, -1])
def test_a_gpu_gets_the_contracted_axis_last_and_the_sums_of_integers(on_gpu, axis, dtype):
    integers = jnp.issubdtype(dtype, jnp.integer)
    grain = {"channelwise_axes": (1,), "zero_point": True if integers else None}
    q = jaxfp8.quantize(normal(3, 10, 7), dtype, tiled_axes={2: 4}, **grain)
    p = jaxfp8.prepare(q, axis)
    axis %= 3
    if not integers and axis == 2:
        assert p is q
        return
    lies = jnp.moveaxis(q.qvalue, axis, -1)
    held = p.packed.stored if p.turned else p.packed
    assert p.turned is (axis != 2)
    assert np.asarray(held.qvalue).tobytes() == np.asarray(lies).tobytes()
    assert (p.shape, p.ndim, p.size, p.dtype) == (q.shape, q.ndim, q.size, q.dtype)
    if integers:
        np.testing.assert_array_equal(p.sums, np.asarray(lies, int).sum(-1, keepdims=True))
    assert p.nbytes == q.nbytes + (4 * p.sums.size if integers else 0)
    assert_same(jax.tree.leaves(p.unprepare()), jax.tree.leaves(q))
    assert p.unprepare().tile_sizes == q.tile_sizes
    assert f"contracting={axis - 3}" in repr(p)
    assert_same(jaxfp8.dequantize(p), jaxfp8.dequantize(q))
    assert_same(pickle.loads(pickle.dumps(p)), p)


@pytest.mark.parametrize("dtype", [E4M3, jnp.int8])
def test_a_turned_weight_multiplies_as_it_did(on_gpu, dtype):
    q = jaxfp8.quantize(normal(3, 64, 40), dtype, channelwise_axes=(0, 2))
    x = jaxfp8.quantize(normal(3, 5, 64, seed=1), dtype, channelwise_axes=(0, 1))
    p, want = jaxfp8.prepare(q), jaxfp8.matmul(x, q)
    assert p.turned
    assert_close(jaxfp8.matmul(x, p), want)
    assert_close(jax.vmap(jaxfp8.matmul)(x, p), want)
    _, got = jax.lax.scan(lambda _, part: (None, jaxfp8.matmul(*part)), None, (x, p))
    assert_close(got, want)
    assert_close(jaxfp8.matmul(x, p, compute="int8"), jaxfp8.matmul(x, q, compute="int8"))
    merged = jaxfp8.einsum("btk,bkn->tbn", x, p)
    assert_close(merged, want.transpose(1, 0, 2))
    spec = spec_of(lambda x, w: jaxfp8.matmul(x, w), x, p)
    assert spec.rhs.contracting == (2,)  # of the arrays as they lie


def spec_of(fun, *args):
    """The spec of the only scaled dot of a function."""
    (found,) = (
        eqn.params["spec"] for eqn in jax.make_jaxpr(fun)(*args).eqns if "spec" in eqn.params
    )
    return found


@pytest.mark.parametrize("view", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("of_weight", [False, True], ids=["symmetric", "zero points"])
def test_sums_go_into_products_of_zero_points(on_gpu, of_weight, view):
    q = jaxfp8.quantize(normal(64, 40), jnp.int8, channelwise_axes=(1,), zero_point=of_weight)
    q = jaxfp8.quantize(normal(40, 64), jnp.int8, channelwise_axes=(0,)).T if view else q
    p = jaxfp8.prepare(q)
    x = normal(5, 64, seed=1)
    asymmetric = jaxfp8.quantize(x, jnp.uint8, channelwise_axes=(0,), zero_point=True)
    symmetric = jaxfp8.quantize(x, jnp.int8, channelwise_axes=(0,))
    for lhs, given in ((asymmetric, True), (symmetric, False), (x, False)):
        assert_same(jaxfp8.matmul(lhs, p), jaxfp8.matmul(lhs, q))
        assert spec_of(jaxfp8.matmul, lhs, p).rhs.sums is given
    with pytest.raises(ValueError, match="prepared for products over axis -2 alone"):
        jaxfp8.dot_general(normal(5, 40), p, (((1,), (1,)), ((), ())))


def test_sums_are_mapped_scanned_and_batched(on_gpu):
    q = jaxfp8.quantize(normal(3, 64, 40), jnp.int8, channelwise_axes=(0, 2))
    x = jaxfp8.quantize(normal(3, 5, 64, seed=1), jnp.int8, channelwise_axes=(0,), zero_point=True)
    p, want = jaxfp8.prepare(q), jaxfp8.matmul(x, q)
    assert_same(jaxfp8.matmul(x, p), want)
    assert_same(jax.vmap(jaxfp8.matmul)(x, p), want)
    assert spec_of(jax.vmap(jaxfp8.matmul), x, p).rhs.sums_shape == (3, 40, 1)
    shared = jax.vmap(jaxfp8.matmul, in_axes=(0, None))
    assert_same(shared(x, jax.tree.map(lambda leaf: leaf[1], p)), jaxfp8.matmul(x, q[1]))
    stacked = jax.vmap(jaxfp8.matmul, in_axes=(None, 0))
    assert_same(stacked(x[0], p), stacked(x[0], q))
    _, got = jax.lax.scan(lambda _, part: (None, jaxfp8.matmul(*part)), None, (x, p))
    assert_same(got, want)


def test_sums_of_all_of_a_contracted_axis_do_not_serve_a_part_of_it(on_gpu):
    """As where `shard_map` splits the axis by hand: each part has other sums."""
    q = jaxfp8.quantize(normal(64, 40), jnp.int8, channelwise_axes=(1,))
    x = jaxfp8.quantize(normal(8, 64), jnp.int8, channelwise_axes=(0,), zero_point=True)
    whole = x, jaxfp8.prepare(q)
    parts = jax.tree.map(lambda leaf: leaf[:, :32] if leaf.shape[-1] == 64 else leaf, whole)
    with pytest.raises(ValueError, match=r"of 64 codes each.* of 32 integers.*unprepare"):
        jaxfp8.matmul(*parts)


def test_gradients_beside_sums(on_gpu):
    recipe = jaxfp8.INT8_ASYMMETRIC
    q = recipe.quantize_weight(normal(64, 40), (0,))
    numbers = (((1,), (0,)), ((), ()))

    def gradients(w):
        def loss(x, w):
            return jnp.sum(jaxfp8.recipe_dot_general(x, w, numbers, recipe) ** 2)

        return jax.grad(loss, (0, 1), allow_int=True)(normal(5, 64, seed=1), w)

    (of_x, of_p), (x, of_q) = gradients(jaxfp8.prepare(q)), gradients(q)
    assert_close(of_x, x)
    assert_close(of_p.packed.stored.scale.T, of_q.scale)


def test_sums_that_do_not_fit_are_refused(on_gpu):
    q = jaxfp8.quantize(normal(64, 40), jnp.int8)
    p, x = jaxfp8.prepare(q), normal(5, 64)
    for sums in (p.sums.astype(jnp.float32), p.sums.T, p.sums[:39]):
        with pytest.raises(ValueError, match=r"`rhs` has sums .* int32\[40, 1\] of 64 integers"):
            jaxfp8.matmul(x, dataclasses.replace(p, sums=sums))
    with pytest.raises(ValueError, match="2 axes and is prepared for products over axis 0"):
        jaxfp8.matmul(x, dataclasses.replace(p, contracting=0))
    for taken_apart in (p, jaxfp8.prepare(jaxfp8.quantize(normal(64, 40)))):
        with pytest.raises(ValueError, match=r"1 axes and is prepared .* before the last two"):
            jaxfp8.matmul(x, jax.tree.map(lambda leaf: leaf[0], taken_apart))
    fp8 = dataclasses.replace(p, packed=jaxfp8.quantize(normal(40, 64)).T)
    with pytest.raises(ValueError, match="of 64 integers is needed"):
        jaxfp8.matmul(x, fp8)


def test_wrong_use_says_what_to_do():
    q = jaxfp8.quantize(normal(64, 64), jnp.int8, channelwise_axes=(1,))
    p, x = jaxfp8.prepare(q), normal(3, 64)
    with pytest.raises(TypeError, match="only `rhs` may be"):
        jaxfp8.matmul(p, x.T)
    with pytest.raises(ValueError, match="prepared for products over axis -2 alone"):
        jaxfp8.dot_general(x, p, (((1,), (1,)), ((), ())))
    with pytest.raises(ValueError, match="columns as a batch axis"):
        jaxfp8.einsum("mnk,kn->nm", normal(3, 64, 64), p)
    odd = jaxfp8.quantize(normal(3, 64), jnp.int8, tiled_axes={1: 3})
    with pytest.raises(ValueError, match=r"tiles of 3 along the contracted axis.*unprepare"):
        jaxfp8.matmul(odd, p)
    with pytest.raises(ValueError, match=r"\(3, 63\)"):
        jaxfp8.matmul(x[:, :63], p)
    with pytest.raises(TypeError, match="an int is needed"):
        jaxfp8.prepare(q, (0, 1))
    with pytest.raises(ValueError, match="an axis 2 is needed"):
        jaxfp8.prepare(q, 2)
    with pytest.raises(ValueError, match="needs 1, 64"):
        jaxfp8.prepare(QArray(q.qvalue, jnp.ones((1, 63))))
    with pytest.raises(ValueError, match="bias"):
        jaxfp8.matmul(x, p, bias=jnp.ones(63))


@pytest.mark.slow
def test_recipes_take_prepared_weights():
    x, numbers = normal(3, 64, seed=1), (((1,), (0,)), ((), ()))
    recipes = (jaxfp8.INT8_DYNAMIC, jaxfp8.INT8_ASYMMETRIC, jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC)
    for recipe in (*recipes, jaxfp8.FP8_BLOCK):
        q = recipe.quantize_weight(normal(64, 128), contracting=(0,))
        p = jaxfp8.prepare(q)

        def loss(x, w, recipe=recipe):
            return jnp.sum(jaxfp8.recipe_dot_general(x, w, numbers, recipe) ** 2)

        products = [jaxfp8.recipe_dot_general(x, w, numbers, recipe) for w in (p, q)]
        assert_close(*products)
        assert_close(jax.grad(loss)(x, p), jax.grad(loss)(x, q))


def test_strict_takes_it():
    p = jaxfp8.prepare(jaxfp8.quantize(normal(64, 64), jnp.int8))
    with jaxfp8.strict():
        jaxfp8.matmul(normal(3, 64), p)


def test_it_prints_what_it_is():
    p = jaxfp8.prepare(jaxfp8.quantize(normal(2, 8, 64), E5M2))
    assert repr(p) == "PreparedArray(float8_e5m2[2,8,64], contracting=-2)"
    assert "contracting=-2" in repr(jax.tree.map(lambda leaf: None, p))


def test_what_was_taken_apart_wrongly_is_refused():
    p, x = jaxfp8.prepare(jaxfp8.quantize(normal(64, 64), jnp.int8)), normal(3, 64)
    with pytest.raises(ValueError, match=r"packed as \(16, 64, 4\).*columns / 64"):
        jaxfp8.matmul(x, jax.tree.map(lambda leaf: leaf[0], p))
    with pytest.raises(ValueError, match="products over axis -3, but"):
        jaxfp8.matmul(x, PreparedArray(p.packed, -3))
    with pytest.raises(ValueError, match="over axis 0"):
        jaxfp8.matmul(x, PreparedArray(p.packed, 0))
    with pytest.raises(TypeError, match="a QArray, or a pytree with one"):
        jaxfp8.prepare(x)
    assert repr(PreparedArray(None, -2)) == "PreparedArray(None, contracting=-2)"


def test_it_dequantizes_to_what_it_was():
    q = jaxfp8.quantize(normal(8, 64), E4M3, channelwise_axes=(1,))
    assert_same(jaxfp8.dequantize(jaxfp8.prepare(q)), jaxfp8.dequantize(q))
