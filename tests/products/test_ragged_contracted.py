"""Groups along the contracted axis, on the CPU: by scaled dots of all of K."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_case import Ragged, with_nan

import jaxfp8
from jaxfp8._call.library import strictness
from jaxfp8._call.ops import ragged_lowering
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._value.spec import EpilogueSpec, OperandSpec

pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")

FP8, E5M2 = "float8_e4m3fn", "float8_e5m2"
along_k = functools.partial(Ragged, grouping="contracted")
LINES = {"lhs_tile": (1, 10**6), "rhs_tile": (1, 10**6)}
TENSOR = {"lhs_tile": (10**6, 10**6), "rhs_tile": (10**6, 10**6)}
CASES = {
    "blocks": along_k(sizes=(3, 0, 131, 1, 9), rows=5, columns=130, depth=300),
    "lines of blocks": along_k(
        sizes=(127, 2, 100), rows=3, columns=4, depth=257, rhs=E5M2, rhs_tile=(1, 128)
    ),
    "tensor": along_k(sizes=(4, 20), rows=6, columns=3, depth=17, lhs=E5M2, **TENSOR),
    "int8": along_k(sizes=(2, 30), rows=5, columns=7, depth=40, lhs="int8", rhs="int8", **LINES),
    "no positions": along_k(sizes=(0, 0), rows=3, columns=4, depth=16, **LINES),
    "too many": along_k(sizes=(-2, 5, 2**31 - 1, 9), rows=8, columns=4, depth=16, **LINES),
}
NUMBERS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())),
    lhs_ragged_dimensions=[1],
    rhs_group_dimensions=[],
)


def run(case, lhs, rhs, **more):
    sizes = jnp.asarray(case.sizes, jnp.int32)
    return np.asarray(jax.jit(functools.partial(jaxfp8.ragged_dot, **more))(lhs, rhs.mT, sizes))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_float64(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    case.assert_right(run(case, lhs, rhs, preferred_element_type=jnp.float32), wide, 0)


def test_it_is_the_general_ragged_dot_of_jax():
    x, y, sizes = normal(0, 5, 9), normal(1, 9, 6), jnp.array([4, 0, 2])
    q = jaxfp8.quantize(y, channelwise_axes=(1,))
    wanted = jax.lax.ragged_dot_general(
        x, jaxfp8.dequantize(q), sizes, NUMBERS, precision="highest"
    )
    np.testing.assert_allclose(jaxfp8.ragged_dot(x, q, sizes), wanted, rtol=1e-5, atol=1e-5)


def test_it_is_the_gradient_of_the_weights_of_rows_in_groups():
    x = jaxfp8.quantize(normal(0, 9, 5), channelwise_axes=(1,))
    w, dy, sizes = normal(1, 3, 5, 6), normal(2, 9, 6), jnp.array([4, 0, 3])
    (wanted,) = jax.vjp(lambda w: jaxfp8.ragged_dot(x, w, sizes), w)[1](dy)
    np.testing.assert_allclose(jaxfp8.ragged_dot(x.T, dy, sizes), wanted, rtol=1e-5, atol=1e-5)


def test_an_operand_may_be_stored_either_way():
    case = CASES["lines of blocks"]
    lhs, rhs, _ = case.draw()
    turned = [jaxfp8.QArray(q.qvalue.T, q.scale.T, tiles=q.tiles[::-1]) for q in (lhs, rhs)]
    sizes = jnp.asarray(case.sizes)
    y = jaxfp8.ragged_dot(turned[0].T, turned[1], sizes)
    np.testing.assert_allclose(y, jaxfp8.ragged_dot(lhs, rhs.T, sizes), rtol=1e-5)


def test_nan_stays_in_its_group_and_is_lost_in_none():
    case = along_k(sizes=(130, 1, 0, 169), rows=3, columns=4, depth=500, rhs_tile=(1, 128))
    lhs, rhs, wide = case.draw()
    rest = (slice(None), slice(300, None))
    lhs, left = with_nan(lhs, wide[0], (0, 130), rest)
    rhs, right = with_nan(rhs, wide[1], (2, 130), rest)
    y = run(case, lhs, rhs, preferred_element_type=jnp.float32)
    case.assert_right(y, (left, right), 0)
    assert np.isnan(y[1, 0]).all()
    assert np.isnan(y).sum() == 6


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_of_other_positions_do_not_count(scale):
    case = along_k(sizes=(130, 120), rows=3, columns=4, depth=500, rhs_tile=(1, 128))
    lhs, rhs, wide = case.draw()
    sides = [
        jaxfp8.QArray(q.qvalue, q.scale.at[:, 2:].set(scale), tiles=q.tiles) for q in (lhs, rhs)
    ]
    case.assert_right(run(case, *sides), wide, 0)


def test_an_empty_group_is_zeros_whatever_the_scales():
    one = jaxfp8.QArray(jnp.ones((2, 8), FP8), jnp.float32(np.nan))
    y = jaxfp8.ragged_dot(one, one.mT, jnp.array([0, 3, 0]))
    np.testing.assert_array_equal(y, np.array([0, np.nan, 0]).repeat(4).reshape(3, 2, 2))


def test_zero_points_count():
    rng = np.random.default_rng(3)
    codes = [rng.integers(-128, 128, shape, np.int8) for shape in ((3, 20), (4, 20))]
    zeros = [rng.integers(-9, 9, (3, 5)), rng.integers(-9, 9, (4, 1))]
    lhs, rhs = (
        jaxfp8.QArray(jnp.asarray(c), jnp.full(z.shape, 0.5), jnp.asarray(z, jnp.int8), tiles=t)
        for c, z, t in zip(codes, zeros, ((1, 4), (1, 20)), strict=True)
    )
    left = (codes[0].astype(np.int64) - zeros[0].repeat(4, 1)) * 0.5
    right = (codes[1].astype(np.int64) - zeros[1]) * 0.5
    y = jaxfp8.ragged_dot(lhs, rhs.mT, jnp.array([7, 0, 10]))
    wanted = [left[:, :7] @ right[:, :7].T, np.zeros((3, 4)), left[:, 7:17] @ right[:, 7:17].T]
    np.testing.assert_array_equal(y, wanted)


def test_vmap_computes_each():
    case = CASES["tensor"]
    lhs, rhs, _ = case.draw()
    sizes = jnp.array([[1, 2], [9, 8]], jnp.int32)
    dot = functools.partial(jaxfp8.ragged_dot, lhs, rhs.mT)
    apart = np.stack([dot(s) for s in sizes])
    np.testing.assert_allclose(jax.vmap(dot)(sizes), apart, rtol=1e-6)


def test_gradients_are_those_of_the_dequantized_operands():
    x, sizes = normal(0, 5, 8), jnp.array([2, 0, 5])
    q = jaxfp8.quantize(normal(1, 8, 3), channelwise_axes=(1,))

    def ours(x, scale):
        return jnp.sum(jaxfp8.ragged_dot(x, jaxfp8.QArray(q.qvalue, scale), sizes) ** 2)

    def theirs(x, scale):
        inside = jnp.repeat(jnp.eye(3), np.array([2, 0, 5]), axis=1, total_repeat_length=7)
        wide = q.qvalue.astype(jnp.float32)[:7] * scale
        return jnp.sum(jnp.einsum("mk,kn,gk->gmn", x[:, :7], wide, inside) ** 2)

    for mine, other in zip(
        jax.grad(ours, (0, 1))(x, q.scale), jax.grad(theirs, (0, 1))(x, q.scale), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_positions_of_no_group_do_not_reach_derivatives():
    case = along_k(sizes=(130, 0, 169), rows=3, columns=4, depth=500, rhs_tile=(1, 128))
    lhs, rhs, wide = case.draw()
    lhs, rhs = (
        dataclasses.replace(
            with_nan(q, w, (slice(None), slice(299, None)))[0], scale=q.scale.at[:, 3].set(jnp.nan)
        )
        for q, w in zip((lhs, rhs), wide, strict=True)
    )

    def by_scales(of_lhs, of_rhs):
        sides = [dataclasses.replace(q, scale=s) for q, s in ((lhs, of_lhs), (rhs, of_rhs))]
        return jnp.sum(jaxfp8.ragged_dot(sides[0], sides[1].mT, jnp.asarray(case.sizes)))

    for gradient in jax.grad(by_scales, (0, 1))(lhs.scale, rhs.scale):
        assert np.isfinite(gradient).all()
        assert not np.any(gradient[:, 3])


def test_strict_says_that_groups_multiply_all_of_k(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    case = CASES["tensor"]
    lhs, rhs, _ = case.draw()

    def dot(sizes):
        return jaxfp8.ragged_dot(lhs, rhs.mT, sizes)

    reason = "each group multiplies all of K"
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match=reason):
        jax.vmap(dot)(jnp.asarray([case.sizes], jnp.int32))


Q = jaxfp8.QArray(jnp.ones((4, 8), jnp.int8), jnp.ones((4, 1)))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((Q, Q, [1]), r"are \[4, 8\] and \[4, 8\].* as `w.mT`"),
        ((np.ones((2, 4, 8)), Q.mT, [1]), r"are \[2, 4, 8\] and \[8, 4\].*\[M, K\] and \[K, N\]"),
        ((Q, Q.mT, 3), r"`group_sizes` has shape \[\].* one size for each group"),
        ((Q, Q.mT, [[1]]), r"`group_sizes` has shape \[1, 1\]"),
    ],
    ids=["K", "rank", "number", "matrix"],
)
def test_bad_arguments_are_named(operands, message):
    lhs, rhs, sizes = operands
    with pytest.raises(ValueError, match=message):
        jaxfp8.ragged_dot(lhs, rhs, np.array(sizes))


# What the kernel takes


def spec(dtype=FP8, *, rows=5, columns=7, depth=300, groups=3, tile=None, zero_point=False):
    sides = [
        OperandSpec(
            dtype=dtype,
            shape=(lines, depth),
            contracting=(1,),
            batch=(),
            tiles=(1, tile or max(depth, 1)),
            scale=True,
            zero_point=zero_point,
        )
        for lines in (rows, columns)
    ]
    return RaggedSpec(
        lhs=sides[0], rhs=sides[1], groups=groups, epilogue=EpilogueSpec(out_dtype="float32")
    )


MOST = (2**31 - 1) // 2


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (spec(), None),
        (spec(tile=128), None),
        (spec(tile=384, depth=1000), None),
        (spec("int8", depth=131056), None),
        (spec("uint8", depth=33024), None),
        (spec(tile=64), "scales have tiles of 64 along K"),
        (spec(tile=1), "scales have tiles of 1 along K"),
        (spec("int8", tile=128), "along which scales change"),
        (spec("int8", depth=131057), "sums up to 131056 products of int8"),
        (spec("uint8", depth=33025), "sums up to 33024 products of uint8"),
        (spec(zero_point=True), "no zero points"),
        (spec(groups=0), "nothing to multiply"),
        (spec(depth=0), "nothing to multiply"),
        (spec(rows=65, columns=33, groups=MOST // 9), None),
        (spec(rows=65, columns=33, groups=MOST // 9 + 1), "counts rows and tiles in 32 bits"),
        (spec(depth=MOST - 15), None),
        (spec(depth=MOST), "counts rows and tiles in 32 bits"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_the_reason_is_named(problem, reason):
    found = ragged_lowering.why_no_kernel(problem)
    assert found is None if reason is None else reason in found


def test_the_call_has_lines_of_whole_16_bytes_and_scales_of_one_group():
    problem = spec(tile=128)
    shapes = [((5, 300), FP8), ((7, 300), FP8), ((3,), "int32"), ((5, 3), "float32")]
    shapes += [((7, 3), "float32")]
    call = functools.partial(ragged_lowering.call, spec=problem)
    traced = jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    (eqn,) = [e for e in traced.eqns if e.primitive.name == "ffi_call"]
    got = [v.aval.shape for v in eqn.invars]
    assert got == [(5, 304), (7, 304), (3,), (5, 3), (1, 7, 3)]
    assert traced.out_avals[0].shape == (3, 5, 7)


@pytest.mark.parametrize(
    ("depth", "sizes"), [(300, [296, 4, 0]), (304, [296, 2**31 - 1, 5])], ids=["padded", "whole"]
)
def test_no_group_gets_padding_of_k(depth, sizes):
    got = ragged_lowering._sizes(jnp.array([296, 2**31 - 1, 5], jnp.int32), spec(depth=depth))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, sizes)
