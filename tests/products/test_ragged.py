"""Rows in groups, each times a matrix of its own, on the CPU.

`test_ragged_contracted` has groups along the contracted axis.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_case import Ragged

import jaxfp8
from jaxfp8._call.library import ffi, strictness
from jaxfp8._call.ops import ragged_lowering, ragged_reference
from jaxfp8._call.ops.ragged_reference import RaggedSpec, group_ends
from jaxfp8._value.spec import EpilogueSpec, OperandSpec

pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")

E5M2 = "float8_e5m2"
LINES = {"lhs_tile": (1, 10**6), "rhs_tile": (1, 10**6)}
TENSOR = {"lhs_tile": (10**6, 10**6), "rhs_tile": (10**6, 10**6)}
CASES = {
    "blocks": Ragged(sizes=(3, 0, 7, 1), rows=13, columns=140, depth=300),
    "lines": Ragged(sizes=(0, 2, 2), rows=4, columns=5, depth=33, lhs=E5M2, **LINES),
    "tensor": Ragged(sizes=(4,), rows=6, columns=3, depth=17, rhs=E5M2, **TENSOR),
    "int8": Ragged(sizes=(2, 3), rows=5, columns=7, depth=40, lhs="int8", rhs="int8", **LINES),
    "no rows in groups": Ragged(sizes=(0, 0), rows=3, columns=4, depth=16, **LINES),
    "too many rows": Ragged(sizes=(-2, 5, 2**31 - 1, 9), rows=8, columns=4, depth=16, **LINES),
    "masked": Ragged(sizes=(3, 0, 9, -1), rows=5, columns=6, depth=20, grouping="masked", **LINES),
    "masked blocks": Ragged(sizes=(1, 2), rows=3, columns=130, depth=130, grouping="masked"),
}


def run(case, lhs, rhs, **more):
    sizes = jnp.asarray(case.sizes, jnp.int32)
    return jax.jit(functools.partial(jaxfp8.ragged_dot, **more))(lhs, rhs.mT, sizes)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_float64(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    case.assert_right(np.asarray(run(case, lhs, rhs, preferred_element_type=jnp.float32)), wide, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_output_is_rounded_once(dtype):
    case = CASES["tensor"]
    lhs, rhs, wide = case.draw()
    scaled = jaxfp8.QArray(lhs.qvalue, lhs.scale * 2.0**-12, tiles=lhs.tiles)
    y = np.asarray(run(case, scaled, rhs, preferred_element_type=dtype))
    assert y.dtype == dtype
    case.assert_right(y, (wide[0] * 2.0**-12, wide[1]), 0)


def test_it_is_the_ragged_dot_of_jax():
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(9, 8), (3, 8, 6)]))
    experts = jaxfp8.quantize(w, channelwise_axes=(0, 2))
    sizes = jnp.array([4, 1, 4])
    wanted = jax.lax.ragged_dot(x, jaxfp8.dequantize(experts), sizes, precision="highest")
    np.testing.assert_allclose(jaxfp8.ragged_dot(x, experts, sizes), wanted, rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_group():
    case = Ragged(sizes=(2, 3), rows=6, columns=4, depth=16, **LINES)
    lhs, rhs, _ = case.draw()
    nan = jnp.asarray(np.nan, lhs.qvalue.dtype)
    lhs = jaxfp8.QArray(lhs.qvalue.at[0, 5].set(nan).at[5, 1].set(nan), lhs.scale, tiles=lhs.tiles)
    rhs = jaxfp8.QArray(rhs.qvalue.at[1, 2, 3].set(nan), rhs.scale, tiles=rhs.tiles)
    wanted = np.zeros((6, 4), bool)
    wanted[0], wanted[2:5, 2] = True, True
    np.testing.assert_array_equal(np.isnan(run(case, lhs, rhs)), wanted)


def test_a_zero_point_counts():
    lhs = jnp.arange(12, dtype=jnp.int8).reshape(4, 3)
    q = jaxfp8.QArray(lhs, jnp.float32(0.5), jnp.int8(2))
    w = jaxfp8.QArray(jnp.ones((2, 3, 2), jnp.int8), jnp.float32(1))
    y = jaxfp8.ragged_dot(q, w, jnp.array([1, 2]))
    np.testing.assert_array_equal(y[:, 0], [-1.5, 3, 7.5, 0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_sizes_may_have_any_integer_dtype(dtype):
    w = jaxfp8.QArray(jnp.array([1, 2], jnp.int8).reshape(2, 1, 1), jnp.float32(1))
    sizes = np.array([1, min(np.iinfo(dtype).max, 2**31 - 1)], dtype)
    y = jax.jit(jaxfp8.ragged_dot)(jnp.ones((4, 1)), w, sizes)
    np.testing.assert_array_equal(y[:, 0], [1, 2, 2, 2])


def test_scales_may_be_shared_by_groups():
    w = jaxfp8.QArray(
        jnp.ones((4, 2, 2), jnp.int8), jnp.array([1.0, 3.0]).reshape(2, 1, 1), tiles=(2, 2, 2)
    )
    y = jaxfp8.ragged_dot(jnp.ones((4, 2)), w, jnp.ones(4, jnp.int32))
    np.testing.assert_array_equal(y[:, 0], [2, 2, 6, 6])


def test_vmap_computes_each():
    case = CASES["lines"]
    lhs, rhs, _ = case.draw()
    sizes = jnp.array([[1, 2, 1], [4, 0, 0]], jnp.int32)
    dot = functools.partial(jaxfp8.ragged_dot, lhs, rhs.mT)
    found = jax.vmap(dot)(sizes)
    np.testing.assert_allclose(found, np.stack([dot(s) for s in sizes]), rtol=1e-6)


def test_gradients_are_those_of_the_dequantized_operands():
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(5, 8), (2, 8, 3)]))
    q, sizes = jaxfp8.quantize(w, channelwise_axes=(0, 2)), jnp.array([2, 1])

    def ours(x, scale):
        return jnp.sum(jaxfp8.ragged_dot(x, jaxfp8.QArray(q.qvalue, scale), sizes) ** 2)

    def theirs(x, scale):
        wide = q.qvalue.astype(jnp.float32) * scale
        return jnp.sum(jax.lax.ragged_dot(x, wide, sizes, precision="highest") ** 2)

    for mine, other in zip(
        jax.grad(ours, (0, 1))(x, q.scale), jax.grad(theirs, (0, 1))(x, q.scale), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_codes_have_no_derivative():
    case = CASES["int8"]
    lhs, rhs, _ = case.draw()
    scale = jax.grad(lambda s: jnp.sum(run(case, jaxfp8.QArray(lhs.qvalue, s), rhs)))(lhs.scale)
    assert np.all(np.isfinite(scale))


def test_strict_names_the_reason(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    case = CASES["tensor"]
    lhs, rhs, _ = case.draw()
    dot = functools.partial(jaxfp8.ragged_dot, lhs, rhs.mT)
    reason = "group by group because it is under `vmap`; each group multiplies all rows"
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match=reason):
        jax.vmap(dot)(jnp.array([[1]]))


@pytest.mark.filterwarnings("error::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_library_multiplies_groups(name):
    """On the CPU no group is multiplied by the rows of others."""
    case = CASES[name]
    lhs, rhs, _ = case.draw()
    ffi.reset_kernel_calls()
    with jaxfp8.strict():
        run(case, lhs, rhs).block_until_ready()
    rows, groups_with_rows = case.rows, 0
    for size in case.sizes:
        size = min(max(size, 0), rows)
        groups_with_rows += size > 0
        rows -= 0 if case.grouping == "masked" else size
    assert sum(ffi.kernel_calls().values()) == groups_with_rows


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.grad(lambda x: jnp.sum(f(x)))])
def test_transforms_tell_that_groups_are_computed_one_by_one(transform, monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    x = jnp.ones((4, 8)) if transform is not jax.vmap else jnp.ones((2, 4, 8))
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match=r"`vmap`|differentiated"):
        transform(lambda x: jaxfp8.ragged_dot(x, W, SIZES))(x)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_no_group_do_not_reach_derivatives(masked):
    """They may hold anything, and so may an expert without rows."""
    x = np.random.default_rng(5).normal(size=(3, 6, 16) if masked else (6, 16)).astype(np.float32)
    weights = jaxfp8.quantize(jnp.asarray(np.ones((3, 16, 5), np.float32)), channelwise_axes=(0, 2))
    sizes = jnp.array([2, 0, 3], jnp.int32)
    x[..., 5, :] = np.nan
    rows = jaxfp8.quantize(jnp.asarray(x), channelwise_axes=(0, 1) if masked else (0,))

    def by_scales(of_rows, of_weights):
        lhs, rhs = jaxfp8.QArray(rows.qvalue, of_rows), jaxfp8.QArray(weights.qvalue, of_weights)
        return jnp.sum(jaxfp8.ragged_dot(lhs, rhs, sizes))

    for gradient in jax.grad(by_scales, (0, 1))(rows.scale, weights.scale):
        assert np.isfinite(gradient).all()
    bad = jaxfp8.QArray(weights.qvalue.at[1].set(jnp.nan), weights.scale)
    gradient = jax.grad(lambda x: jnp.sum(jaxfp8.ragged_dot(x, bad, sizes)))(jnp.nan_to_num(x))
    assert np.isfinite(gradient).all() or masked  # a masked product is one product


@pytest.mark.parametrize("dtype", ["int4", "uint8", "int16"])
def test_sizes_of_any_integer_type_count(dtype):
    whole = jaxfp8.ragged_dot(Q, W, SIZES)
    np.testing.assert_array_equal(jaxfp8.ragged_dot(Q, W, jnp.asarray(SIZES, dtype)), whole)


@pytest.mark.parametrize("kind", [np.array, jnp.array, list])
@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ([3, 2], r"`group_sizes` adds up to 5 rows.*4 at most are needed, as `lhs` has"),
        ([2, -1], r"`group_sizes` has -1 for group 1"),
        ([2**31 - 1, 1], r"adds up to 2147483648 rows"),
    ],
)
def test_known_sizes_that_do_not_fit_are_refused(sizes, match, kind):
    given = kind(sizes)
    with pytest.raises(ValueError, match=match):
        jaxfp8.ragged_dot(Q, W, given)
    with pytest.raises(ValueError, match=match):
        jax.jit(lambda q: jaxfp8.ragged_dot(q, W, given))(Q)
    masked = jaxfp8.quantize(jnp.ones((2, 4, 8)), channelwise_axes=(0, 1))
    if sizes[0] > 4:
        with pytest.raises(ValueError, match=r"-1 for group 1|2147483647 for group 0, more than"):
            jaxfp8.ragged_dot(masked, W, given)


def test_unknown_sizes_are_cut_off():
    """Below 0 they count as 0, and excess is left out, in 64 bits as well."""
    run = jax.jit(jaxfp8.ragged_dot)
    wanted = jaxfp8.ragged_dot(Q, W, np.array([0, 4]))
    np.testing.assert_array_equal(run(Q, W, np.array([-3, 7])), wanted)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(Q, W, np.array([-(2**40), 2**40])), wanted)


def test_symbolic_rows_are_products_by_definition(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    rows, groups = jax.export.symbolic_shape("m, g")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jaxfp8_scaled_dot")]

    @jax.jit
    def product(x, w, sizes):
        return jaxfp8.ragged_dot(x, jaxfp8.QArray(w, jnp.float32(0.5)), sizes)

    codes, sizes = jnp.ones((2, 8, 3), jnp.int8), jnp.array([1, 2], jnp.int32)
    with pytest.warns(jaxfp8.FallbackWarning, match="sizes are not known when the program"):
        exported = jax.export.export(product, disabled_checks=checks)(x, codes, sizes)
    y = exported.call(jnp.ones((4, 8)), codes, sizes)
    np.testing.assert_array_equal(y[:, 0], [4, 4, 4, 0])
    weights = jax.ShapeDtypeStruct((groups, 8, 3), jnp.int8)
    with pytest.raises(ValueError, match=r"symbolic shape .* number of groups has to be known"):
        jax.export.export(product)(x, weights, jax.ShapeDtypeStruct((groups,), jnp.int32))


Q = jaxfp8.QArray(jnp.ones((4, 8), jnp.int8), jnp.ones((4, 1)))
W = jaxfp8.QArray(jnp.ones((2, 8, 3), jnp.int8), jnp.ones((2, 1, 3)))
SIZES = np.array([1, 2], np.int32)
PREPARED = jaxfp8.prepare(jaxfp8.QArray(jnp.ones((64, 64), jnp.int8), jnp.ones((1, 64))))


@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        ((np.ones((4, 8)), np.ones((2, 8, 3)), SIZES), TypeError, "one of them has to be 8-bit"),
        ((Q, W.mT, SIZES), ValueError, r"are \[4, 8\] and \[2, 3, 8\].* as `w.mT`"),
        ((W, Q, SIZES), ValueError, r"\[M, K\] and \[G, K, N\], .* or \[M, K\] and \[K, N\] are"),
        ((np.ones((3, 4, 8), np.int8), W, SIZES), ValueError, "the same number of groups"),
        ((Q, W, SIZES[:1]), ValueError, r"`group_sizes` has shape \[1\]"),
        ((Q, W, np.ones(2)), TypeError, "`group_sizes` has dtype float32.*`jnp.bincount`"),
        ((Q, PREPARED, SIZES), TypeError, "`rhs` is prepared"),
    ],
    ids=["floats", "K", "rank", "groups", "sizes", "dtype", "prepared"],
)
def test_bad_arguments_are_named(operands, error, message):
    with pytest.raises(error, match=message):
        jaxfp8.ragged_dot(*operands)


def test_a_bad_precision_is_named():
    with pytest.raises(ValueError, match=r"jaxfp8.ragged_dot.*`precision` is 'exact'"):
        jaxfp8.ragged_dot(Q, W, SIZES, precision="exact")


@pytest.mark.parametrize(("precision", "wanted"), [(None, "default"), ("highest", "highest")])
def test_the_precision_is_that_of_its_dots(precision, wanted, monkeypatch):
    seen, dot = set(), ragged_reference.scaled_dot

    def record(problem, **named):
        seen.add(problem.precision)
        return dot(problem, **named)

    monkeypatch.setattr(ragged_reference, "scaled_dot", record)
    call = functools.partial(jaxfp8.ragged_dot, precision=precision)
    jax.make_jaxpr(jax.vmap(call, (None, None, 0)))(Q, W, SIZES[None])
    jax.make_jaxpr(jax.vmap(call, (None, None, 0)))(Q, W[0], SIZES[None])
    assert seen == {wanted}


def test_a_bad_output_dtype_is_named():
    with pytest.raises(TypeError, match="`preferred_element_type` is int32"):
        jaxfp8.ragged_dot(Q, W, SIZES, preferred_element_type=jnp.int32)


def test_ends_do_not_overflow():
    sizes = jnp.full(64, 2**31 - 1, jnp.int32)
    np.testing.assert_array_equal(group_ends(sizes, 2**30), np.full(64, 2**30))


# What the kernel takes


def spec(lhs="int8", rhs="int8", *, lhs_tiles=(1, 8), rhs_tile=None, depth=8, **more):
    sides = [
        OperandSpec(
            dtype=dtype,
            shape=shape,
            contracting=(axis,),
            batch=batch,
            tiles=tiles,
            scale=more.get("scale", True),
            zero_point=more.get("zero_point", False),
        )
        for dtype, shape, axis, batch, tiles in (
            (lhs, (4, depth), 1, (), lhs_tiles),
            (rhs, (2, 3, depth), 2, (0,), (1, 1, rhs_tile or max(depth, 1))),
        )
    ]
    return RaggedSpec(
        lhs=sides[0], rhs=sides[1], groups=2, epilogue=EpilogueSpec(out_dtype="float32")
    )


FLOAT8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (spec(), None),
        (spec(FLOAT8, E5M2, lhs_tiles=(1, 128), depth=300), None),
        (spec("bfloat16"), None),
        (spec("float16", E5M2, lhs_tiles=(1, 300), rhs_tile=128, depth=300), None),
        (
            spec("float16", E5M2, lhs_tiles=(1, 300), rhs_tile=64, depth=300),
            "scales have tiles of 64 along K",
        ),
        (spec("bfloat16", lhs_tiles=(1, 4)), "one scale along K"),
        (spec("float32"), "need 16 bits, and these are float32"),
        (spec("int8", "bfloat16"), "not int8 by bfloat16"),
        (spec(FLOAT8, "int8"), "not float8_e4m3fn by int8"),
        (spec(zero_point=True), "no zero points"),
        (spec(FLOAT8, FLOAT8, lhs_tiles=(1, 64), depth=300), "scales have tiles of 64 along K"),
        (spec(lhs_tiles=(1, 128), depth=300), "along which scales change"),
        (spec(depth=2**17, lhs_tiles=(1, 2**17)), "sums up to 131056 products of int8"),
        (spec(depth=0), "nothing to multiply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_reason_is_named(problem, reason):
    found = ragged_lowering.why_no_kernel(problem)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("k_first", [False, True], ids=["NK", "KN"])
def test_weights_beside_16_bits_go_into_the_call_as_they_are_stored(k_first):
    case = Ragged(
        sizes=(2, 3), rows=5, columns=7, depth=300, lhs="bfloat16", rhs="uint8",
        rhs_tile=(1, 128), zero_points=True, k_first=k_first,
    )  # fmt: skip
    lhs, rhs, _ = case.draw()
    weights = dataclasses.replace(
        spec("bfloat16", "uint8"),
        lhs=dataclasses.replace(spec("bfloat16", depth=300, scale=False).lhs, shape=lhs.shape),
        rhs=OperandSpec(
            dtype="uint8",
            shape=rhs.shape,
            contracting=(1 if k_first else 2,),
            batch=(0,),
            tiles=(1, *((128, 1) if k_first else (1, 128))),
            scale=True,
            zero_point=True,
        ),
    )
    call = functools.partial(ragged_lowering.call, spec=weights)
    sizes = jnp.asarray(case.sizes, jnp.int32)
    traced = jax.make_jaxpr(call)(lhs, rhs.qvalue, sizes, rhs.scale, rhs.zero_point)
    (eqn,) = [e for e in traced.eqns if e.primitive.name == "ffi_call"]
    factor = (2, 3, 7) if k_first else (2, 7, 3)
    got = [v.aval.shape for v in eqn.invars]
    assert got == [(5, 300), rhs.shape, (2,), factor, factor]
    assert [v.aval.dtype.name for v in eqn.invars[3:]] == ["float32", "int32"]
    assert f"'rhs_mn_major', {k_first}" in str(eqn.params["attributes"])


def test_without_a_gpu_a_program_for_one_is_scaled_dots():
    case = CASES["tensor"]
    lhs, rhs, _ = case.draw()
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    traced = jax.jit(jaxfp8.ragged_dot).trace(lhs, rhs.mT, jnp.array([1]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxfp8_ragged_dot" not in text
    assert "jaxfp8_scaled_dot" in text
