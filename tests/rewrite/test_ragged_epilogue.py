"""What programs write behind a ragged dot: residual, biases, activation, 8-bit output, casts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._rewrite.ir import graph

GROUPS, ROWS, DEPTH, COLUMNS = 3, 11, 32, 24
SIZES = jnp.array([4, 0, 5])  # two rows are of no group
GROUP_OF_ROW = np.array([0] * 4 + [2] * 7)  # as `jnp.repeat` fills up
IN_A_GROUP = np.arange(ROWS) < 9


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Q = jaxfp8.quantize(normal(GROUPS, DEPTH, COLUMNS), channelwise_axes=(0, 2))
WIDE = np.asarray(jaxfp8.dequantize(Q), np.float64)
X, BIAS = normal(ROWS, DEPTH, seed=1), normal(GROUPS, COLUMNS, seed=2)
RESIDUAL = normal(ROWS, COLUMNS, seed=3)
IDS = jnp.asarray(GROUP_OF_ROW)


def product(x, scale, sizes=SIZES):
    w = Q.qvalue.astype(x.dtype) * scale.astype(x.dtype)
    return lax.ragged_dot(x, w, sizes)


def repeated(bias, sizes):
    return jnp.repeat(bias, sizes, axis=0, total_repeat_length=ROWS)


def picked(bias, sizes):
    return bias[repeated(jnp.arange(GROUPS), sizes)]


# The addend of each program, and what it is in float64. Those picked by row are of 16 bits here.
PICKED = ("repeat", "bias[repeat]", "bias[ids]")
ADDENDS = {
    "none": (lambda b, r, ids: 0 * r[:1, :1], 0 * RESIDUAL[:1, :1]),
    "residual": (lambda b, r, ids: r, RESIDUAL),
    "bias of all": (lambda b, r, ids: b[0], BIAS[0]),
    "repeat": (lambda b, r, ids: repeated(b, SIZES), BIAS[GROUP_OF_ROW]),
    "bias[repeat]": (lambda b, r, ids: picked(b, SIZES), BIAS[GROUP_OF_ROW]),
    "bias[ids]": (lambda b, r, ids: b[ids], BIAS[GROUP_OF_ROW]),
}
CURVES = {
    "silu": (jax.nn.silu, lambda z: z / (1 + np.exp(-z))),
    "relu": (jax.nn.relu, lambda z: np.maximum(z, 0)),
    "gelu_tanh": (
        jax.nn.gelu,
        lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    ),
}


def layer(addend, curve):
    def f(x, scale, bias, residual, ids):
        return curve(product(x, scale) + addend(bias, residual, ids).astype(x.dtype))

    return f


ARGS = X, Q.scale, BIAS, RESIDUAL, IDS
OF_16_BITS = X.astype(jnp.bfloat16), *ARGS[1:]
SUMS = np.where(IN_A_GROUP[:, None], np.einsum("mk,mkn->mn", X, WIDE[GROUP_OF_ROW]), 0)


def args_of(addend):
    return OF_16_BITS if addend in PICKED else ARGS


def distance(ours, theirs):
    ours, theirs = (np.asarray(y, np.float64) for y in (ours, theirs))
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("addend", ADDENDS)
def test_addend_and_activation_are_inside(addend, curve):
    (written, exact), (activate, definition) = ADDENDS[addend], CURVES[curve]
    f, args = layer(written, activate), args_of(addend)
    (row,) = jaxfp8.explain(f)(*args).sites
    assert row.epilogue == f"scale, residual, {curve} -> {args[0].dtype}"
    y, want = jaxfp8.rewrite(f, strict=True)(*args), definition(SUMS + exact)
    if addend in PICKED:
        assert distance(y, want) < min(2**-7, 1.05 * distance(f(*args), want))
    else:
        near(y, want)
        near(y, f(*args))


@pytest.mark.parametrize("addend", ["residual", *PICKED])
def test_rows_of_no_group_are_those_of_the_program(addend):
    f, args = layer(ADDENDS[addend][0], jax.nn.silu), args_of(addend)
    behind = np.asarray(f(*args), np.float32)[9:]
    assert np.all(behind != 0)
    y = np.asarray(jaxfp8.rewrite(f, strict=True)(*args), np.float32)[9:]
    near(y, behind, rtol=2**-6 if addend in PICKED else 1e-6, atol=1e-6)


@pytest.mark.parametrize("addend", PICKED)
def test_a_picked_bias_in_float32_stays_outside(addend):
    f = layer(ADDENDS[addend][0], jax.nn.silu)
    (row,) = jaxfp8.explain(f)(*ARGS).sites
    assert row.epilogue == "scale -> float32"
    near(jaxfp8.rewrite(f, strict=True)(*ARGS), f(*ARGS))


def test_an_activation_alone_keeps_the_zeros_of_rows_of_no_group():
    f = jaxfp8.rewrite(lambda x, scale: jax.nn.gelu(product(x, scale)), strict=True)
    assert not np.asarray(f(X, Q.scale))[9:].any()


def test_nothing_is_left_behind_the_call():
    f = layer(ADDENDS["residual"][0], jax.nn.silu)
    jaxpr = jax.make_jaxpr(jaxfp8.rewrite(f))(*ARGS)
    names = [eqn.primitive.name for eqn in graph.equations(jaxpr.jaxpr)]
    assert names.count("ragged_dot") == 1 and not {"logistic", "add", "mul"} & set(names)


def test_each_group_is_multiplied_by_a_kernel():
    f = jax.jit(jaxfp8.rewrite(layer(ADDENDS["repeat"][0], jax.nn.silu)))
    f(*OF_16_BITS).block_until_ready()
    ffi.reset_kernel_calls()
    f(*OF_16_BITS).block_until_ready()
    assert sum(ffi.kernel_calls().values()) >= 2  # the groups with rows


def test_a_cast_is_inside():
    def f(x, scale):
        return jax.nn.silu(product(x, scale)).astype(jnp.bfloat16)

    (row,) = jaxfp8.explain(f)(X, Q.scale).sites
    assert row.epilogue == "scale, silu -> bfloat16"
    y = jaxfp8.rewrite(f, strict=True)(X, Q.scale)
    assert y.dtype == jnp.bfloat16
    near(y, f(X, Q.scale), rtol=2**-7)


def test_a_residual_minus_the_product():
    def f(x, scale, residual):
        return jax.nn.relu(residual - product(x, scale))

    (row,) = jaxfp8.explain(f)(X, Q.scale, RESIDUAL).sites
    assert row.epilogue == "scale, residual, relu -> float32"
    near(jaxfp8.rewrite(f, strict=True)(X, Q.scale, RESIDUAL), np.maximum(RESIDUAL - SUMS, 0))


def test_an_output_of_8_bits_and_its_amax():
    def f(x, scale, bias):
        y = jax.nn.silu(product(x, scale) + bias[0])
        codes = jnp.clip(jnp.round(y / 0.05), -128, 127).astype(jnp.int8)
        return codes, jnp.max(jnp.abs(y))

    (row,) = jaxfp8.explain(f)(X, Q.scale, BIAS).sites
    assert row.epilogue == "scale, residual, silu, amax, out scale -> int8"
    ours, theirs = (g(X, Q.scale, BIAS) for g in (jaxfp8.rewrite(f, strict=True), f))
    assert np.abs(np.asarray(ours[0], int) - np.asarray(theirs[0], int)).max() <= 1
    near(ours[1], theirs[1])


def test_sums_cast_to_fp8_are_rounded_once():
    x = (X / 64).astype(jnp.float8_e4m3fn)
    f = lambda x: lax.ragged_dot(x, Q.qvalue, SIZES)  # noqa: E731
    wide = lax.ragged_dot(x, Q.qvalue, SIZES, preferred_element_type=jnp.float32)
    want = np.asarray(wide).astype(jnp.float8_e4m3fn).astype(np.float32)
    assert np.isfinite(want).sum() > 200
    y = jaxfp8.rewrite(f, strict=True)(x)
    assert y.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(y, np.float32), want)


@pytest.mark.parametrize("addend", ["residual", "bias of all", "repeat"])
@pytest.mark.parametrize("outside", [True, False], ids=["rewrite(grad)", "grad(rewrite)"])
def test_gradients_are_those_of_the_program(outside, addend):
    f = layer(ADDENDS[addend][0], jax.nn.silu)

    def gradients(f):
        loss = lambda *args: jnp.sum(f(*args, IDS) ** 2)  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))

    ours = jaxfp8.rewrite(gradients(f)) if outside else gradients(jaxfp8.rewrite(f))
    args, bound = args_of(addend)[:4], 0.02 if addend in PICKED else 1e-5
    for mine, other in zip(ours(*args), gradients(f)(*args), strict=True):
        same_zeros = not np.any(mine) and not np.any(other)
        assert same_zeros or distance(mine, other) < bound


def test_forward_and_second_derivatives_are_those_of_the_program():
    f = layer(ADDENDS["residual"][0], jax.nn.silu)

    def second(f):
        along = lambda x: jax.jvp(lambda x: f(x, *ARGS[1:]), (x,), (X,))[1]  # noqa: E731
        return jax.grad(lambda x: jnp.sum(along(x)))(X)

    near(second(jaxfp8.rewrite(f)), second(f), rtol=1e-4, atol=1e-3)


def test_two_readers_share_the_product_alone():
    def f(x, scale):
        y = product(x, scale)
        return y, jax.nn.silu(y)

    (row,) = jaxfp8.explain(f)(X, Q.scale).sites
    assert row.epilogue == "scale -> float32"
    for mine, other in zip(jaxfp8.rewrite(f)(X, Q.scale), f(X, Q.scale), strict=True):
        near(mine, other)


def test_a_second_addend_stays_outside():
    def f(x, scale, bias, residual):
        return jax.nn.silu(product(x, scale) + bias[0] + residual)

    (row,) = jaxfp8.explain(f)(*ARGS[:4]).sites
    assert row.epilogue == "scale, residual -> float32"
    near(jaxfp8.rewrite(f)(*ARGS[:4]), f(*ARGS[:4]))


@pytest.mark.parametrize("shape", [(), (1, COLUMNS), (ROWS, 1)], ids=str)
def test_a_factor_is_a_scale(shape):
    def f(x, scale, factor):
        return jax.nn.relu(product(x, scale) * factor)

    args = X, Q.scale, normal(*shape, seed=5)
    (row,) = jaxfp8.explain(f)(*args).sites
    assert row.epilogue == "scale, relu -> float32"
    near(jaxfp8.rewrite(f, strict=True)(*args), np.maximum(SUMS * args[2], 0))


def weighted(x, scale, weights):
    """The product times the weights of a router, rounded once."""
    w = Q.qvalue.astype(x.dtype) * scale.astype(x.dtype)
    y = lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32)
    return (y * weights[:, None]).astype(x.dtype)


@pytest.mark.parametrize("x", [X, X.astype(jnp.bfloat16)], ids=["float32", "bfloat16"])
def test_weights_of_rows_are_inside_with_the_cast_behind_them(x):
    args = x, Q.scale, np.abs(normal(ROWS, seed=6))
    f = jaxfp8.rewrite(weighted, strict=True)
    (row,) = jaxfp8.explain(weighted)(*args).sites
    assert row.epilogue == f"scale -> {x.dtype}"
    outputs = [
        eqn.primitive.name
        for eqn in graph.equations(jax.make_jaxpr(f)(*args).jaxpr)
        if eqn.primitive.name in ("mul", "convert_element_type", "ragged_dot")
        and eqn.outvars[0].aval.shape == (ROWS, COLUMNS)
    ]
    assert outputs == ["ragged_dot"]
    assert distance(f(*args), SUMS * args[2][:, None]) < (1e-6 if x is X else 2**-7)


@pytest.mark.parametrize("weight", [np.inf, np.nan], ids=str)
def test_weights_that_are_not_finite_reach_their_rows_but_for_those_of_no_group(weight):
    """As scales do. The program has NaN in rows of no group: their sums are zeros."""
    weights = np.ones(ROWS, np.float32)
    weights[[1, 7, 10]] = weight
    y = np.asarray(jaxfp8.rewrite(weighted, strict=True)(X, Q.scale, weights))
    expected = np.asarray(weighted(X, Q.scale, weights))
    np.testing.assert_array_equal(np.isfinite(y)[:9], np.isfinite(expected)[:9])
    assert not np.isfinite(y[[1, 7]]).any() and not y[9:].any()


def test_weights_behind_a_residual_stay_outside():
    def f(x, scale, residual, weights):
        return (product(x, scale) + residual) * weights[:, None]

    args = X, Q.scale, RESIDUAL, normal(ROWS, seed=6)
    (row,) = jaxfp8.explain(f)(*args).sites
    assert row.epilogue == "scale, residual -> float32"
    near(jaxfp8.rewrite(f, strict=True)(*args), f(*args))


@pytest.mark.parametrize("outside", [True, False], ids=["rewrite(grad)", "grad(rewrite)"])
def test_gradients_with_weights_are_those_of_the_program(outside):
    def gradients(f):
        return jax.grad(lambda x, w: jnp.sum(f(x, Q.scale, w) ** 2), (0, 1))

    ours = jaxfp8.rewrite(gradients(weighted)) if outside else gradients(jaxfp8.rewrite(weighted))
    args = X, normal(ROWS, seed=6)
    for mine, other in zip(ours(*args), gradients(weighted)(*args), strict=True):
        assert distance(mine, other) < 1e-5


def test_a_known_factor_is_inside():
    f = lambda x, scale: jax.nn.relu(product(x, scale) * -0.5)  # noqa: E731
    (row,) = jaxfp8.explain(f)(X, Q.scale).sites
    assert row.epilogue == "scale, relu -> float32"
    near(jaxfp8.rewrite(f)(X, Q.scale), np.maximum(-0.5 * SUMS, 0))


def test_groups_along_the_contracted_axis_are_sums_alone():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    dy = jaxfp8.quantize(RESIDUAL, channelwise_axes=(1,))

    def f(x, scale):
        y = lax.ragged_dot_general(x, dy.qvalue.astype(x.dtype) * scale, SIZES, numbers)
        return jax.nn.relu(y + 1)

    (row,) = jaxfp8.explain(f)(X, dy.scale).sites
    assert row.rewritten and row.epilogue == "scale -> float32"
    near(jaxfp8.rewrite(f, strict=True)(X, dy.scale), f(X, dy.scale))


@pytest.mark.parametrize("zero", [3, 100_000])
def test_zero_points_are_looked_at_when_it_runs(zero):
    q = jaxfp8.quantize(WIDE.astype(np.float32), jnp.int8, channelwise_axes=(0, 2))

    def f(x, zero, residual):
        w = (q.qvalue.astype(jnp.int32) - zero).astype(jnp.float32) * q.scale
        return jax.nn.silu(lax.ragged_dot(x, w, SIZES) + residual)

    args = X, jnp.full((GROUPS, 1, 1), zero), RESIDUAL
    assert "zero point, residual, silu" in jaxfp8.explain(f)(*args).sites[0].epilogue
    near(jaxfp8.rewrite(f, strict=True)(*args), f(*args), rtol=1e-4, atol=1e-4)


def test_rows_quantized_in_front_are_one_call():
    def f(x, residual):
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
        codes = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
        w = q.qvalue.astype(jnp.float32) * q.scale
        return jax.nn.silu(lax.ragged_dot(codes.astype(jnp.float32) * scale, w, SIZES) + residual)

    q = jaxfp8.quantize(WIDE.astype(np.float32), jnp.int8, channelwise_axes=(0, 2))
    (row,) = jaxfp8.explain(f)(X, RESIDUAL).sites
    assert row.lhs.quantized == "one call" and row.epilogue == "scale, residual, silu -> float32"
    near(jaxfp8.rewrite(f, strict=True)(X, RESIDUAL), f(X, RESIDUAL))


def test_the_call_for_a_gpu_has_it_inside():
    f = layer(ADDENDS["residual"][0], jax.nn.silu)
    (row,) = jaxfp8.explain(f, target=jaxfp8.Target("cuda", 90))(*OF_16_BITS).sites
    (here,) = jaxfp8.explain(f, target=jaxfp8.Target("cpu"))(*OF_16_BITS).sites
    assert row.rewritten and row.epilogue == here.epilogue and "silu" in row.epilogue


def test_a_norm_in_front_of_quantized_rows_is_in_their_call_on_a_gpu():
    def f(x):
        wide = x.astype(jnp.float32)
        root = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        rows = (wide * root).astype(x.dtype).astype(jnp.float32)
        scale = jnp.maximum(abs(rows).max(-1, keepdims=True), 1e-12) / 448
        codes = jnp.clip(rows / scale, -448, 448).astype(jnp.float8_e4m3fn)
        return lax.ragged_dot(codes, Q.qvalue, SIZES, preferred_element_type=jnp.float32) * scale

    target = jaxfp8.Target("cuda", 90)
    (row,) = jaxfp8.explain(f, target=target)(OF_16_BITS[0]).sites
    assert (row.lhs.quantized, row.lhs.producer) == ("one call", "RMSNorm")
    y = jaxfp8.rewrite(f, strict=True, target=target)(OF_16_BITS[0])
    assert distance(y, f(OF_16_BITS[0])) < 0.01


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
def test_vmap_computes_each():
    f = layer(ADDENDS["bias of all"][0], jax.nn.silu)
    biases = normal(2, GROUPS, COLUMNS, seed=4)
    ours = jax.vmap(lambda b: jaxfp8.rewrite(f)(X, Q.scale, b, RESIDUAL, IDS))(biases)
    near(ours, [f(X, Q.scale, b, RESIDUAL, IDS) for b in biases])


NUMBERS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
OLD = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX refuses explicit axes")


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=OLD)])
def test_columns_of_a_mesh(kind):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((4,), ("a",), axis_types=kinds, devices=jax.devices()[:4])
    columns = jax.NamedSharding(mesh, jax.P(None, "a"))
    asked = {"out_sharding": columns} if kind == "Explicit" else {}

    def f(x, codes, scale, residual):
        w = codes.astype(x.dtype) * scale
        y = lax.ragged_dot_general(x, w, SIZES, NUMBERS, **asked)
        return jax.nn.silu(y + residual)

    with jax.set_mesh(mesh):
        weights = [
            jax.device_put(a, jax.NamedSharding(mesh, jax.P(None, None, "a")))
            for a in (Q.qvalue, Q.scale)
        ]
        args = jax.device_put(X, jax.NamedSharding(mesh, jax.P())), *weights
        args += (jax.device_put(RESIDUAL, columns),)
        assert "residual, silu" in jaxfp8.explain(f)(*args).sites[0].epilogue
        y = jax.jit(jaxfp8.rewrite(f, strict=True))(*args)
    z = SUMS + RESIDUAL
    near(np.asarray(y), z / (1 + np.exp(-z)))
