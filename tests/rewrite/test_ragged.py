"""Experts as programs write them: `jax.lax.ragged_dot` of dequantized weights is captured."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
from jaxfp8._call.library import ffi

GROUPS, ROWS, DEPTH, COLUMNS = 3, 11, 32, 24
SIZES = jnp.array([4, 0, 5])
X = jax.random.normal(jax.random.key(0), (ROWS, DEPTH))
W = jax.random.normal(jax.random.key(1), (GROUPS, DEPTH, COLUMNS))


def codes(dtype=jnp.float8_e4m3fn, axes=(0, 2), w=W):
    return jaxfp8.quantize(w, dtype, channelwise_axes=axes)


def written(x, q, scale, sizes, dtype=jnp.float32):
    return lax.ragged_dot(x.astype(dtype), q.astype(dtype) * scale.astype(dtype), sizes)


def by_group(x, w, sizes):
    """Float64, group by group; rows of no group are zeros."""
    out, start = np.zeros((x.shape[0], w.shape[2])), 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows] = np.asarray(x, np.float64)[rows] @ np.asarray(w[group], np.float64)
        start += size
    return out


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("axes", [(), (0,), (0, 2), (2,)])
def test_scales_of_any_axes_are_captured(dtype, axes):
    q = codes(dtype, axes, abs(W) if dtype == jnp.uint8 else W)
    report = jaxfp8.explain(written)(X, q.qvalue, q.scale, SIZES)
    assert (len(report.matched), len(report.missed)) == (1, 0)
    y = jaxfp8.rewrite(written, strict=True)(X, q.qvalue, q.scale, SIZES)
    wide = q.qvalue.astype(jnp.float32) * q.scale
    np.testing.assert_allclose(y, by_group(X, wide, SIZES), rtol=1e-5, atol=1e-5)


def by_block(x, q, scale, sizes):
    blocks = q.reshape(GROUPS, 2, 16, COLUMNS).astype(jnp.float32) * scale[:, :, None]
    return lax.ragged_dot(x, blocks.reshape(q.shape), sizes)


def stored_otherwise(x, q, scale, sizes):
    return lax.ragged_dot(x, jnp.swapaxes(q.astype(jnp.float32) * scale, 1, 2), sizes)


def with_zero_points(x, q, scale, sizes):
    return lax.ragged_dot(x, (q.astype(jnp.float32) - 3) * scale, sizes)


def gated(x, q, scale, sizes):
    up = lax.ragged_dot(x, q.astype(x.dtype) * scale, sizes)
    return jax.nn.silu(up) * up


@pytest.mark.parametrize(
    ("fun", "q", "scale"),
    [
        (by_block, codes().qvalue, jnp.full((GROUPS, 2, COLUMNS), 0.25)),
        (stored_otherwise, jnp.swapaxes(codes().qvalue, 1, 2), jnp.full((GROUPS, COLUMNS, 1), 0.5)),
        (with_zero_points, codes(jnp.int8).qvalue, jnp.full((GROUPS, 1, COLUMNS), 0.5)),
        (gated, codes().qvalue, codes().scale),
    ],
    ids=["blocks", "[G, N, K]", "zero points", "gated"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_other_spellings_are_captured(fun, q, scale, wrap):
    wrapped = wrap(fun)
    assert len(jaxfp8.explain(wrapped)(X, q, scale, SIZES).matched) == 1
    y = jaxfp8.rewrite(wrapped, strict=True)(X, q, scale, SIZES)
    np.testing.assert_allclose(y, fun(X, q, scale, SIZES), rtol=1e-4, atol=1e-4)


def test_each_group_multiplies_its_own_rows():
    q = codes()
    f = jax.jit(jaxfp8.rewrite(functools.partial(written, dtype=jnp.bfloat16)))
    f(X, q.qvalue, q.scale, SIZES).block_until_ready()
    ffi.reset_kernel_calls()
    f(X, q.qvalue, q.scale, SIZES).block_until_ready()
    assert sum(ffi.kernel_calls().values()) == 2  # the groups with rows


def test_groups_along_the_contracted_axis_are_captured():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    dy = jaxfp8.quantize(X[:, :COLUMNS], channelwise_axes=(1,))

    def gradient(x, q, scale, sizes):
        return lax.ragged_dot_general(x, q.astype(x.dtype) * scale, sizes, numbers)

    args = X, dy.qvalue, dy.scale, SIZES
    assert len(jaxfp8.explain(gradient)(*args).matched) == 1
    y = jaxfp8.rewrite(gradient, strict=True)(*args)
    np.testing.assert_allclose(y, gradient(*args), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_function():
    q = codes()

    def loss(f, x, scale):
        return jnp.sum(f(x, q.qvalue, scale, SIZES) ** 2)

    ours = jax.grad(functools.partial(loss, jaxfp8.rewrite(written)), (0, 1))(X, q.scale)
    theirs = jax.grad(functools.partial(loss, written), (0, 1))(X, q.scale)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-3)


def test_experts_of_layers_in_a_scan_are_captured():
    q = codes(w=jax.random.normal(jax.random.key(2), (GROUPS, DEPTH, DEPTH)))
    stacked = jnp.stack([q.qvalue.view(jnp.uint8)] * 2), jnp.stack([q.scale, 0.5 * q.scale])

    def model(x, stacked):
        def layer(x, of_layer):
            values, scale = of_layer
            wide = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(x.dtype) * scale
            return jnp.tanh(lax.ragged_dot(x, wide, SIZES)), None

        return lax.scan(layer, x, stacked)[0]

    y = jaxfp8.rewrite(model, strict=True)(X, stacked)
    np.testing.assert_allclose(y, model(X, stacked), rtol=1e-4, atol=1e-4)


def test_the_report_names_kernel_and_scales():
    q = codes()
    (row,) = jaxfp8.explain(written)(X, q.qvalue, q.scale, SIZES).sites
    assert row.rewritten and row.dims == (1, ROWS, COLUMNS, DEPTH)
    assert row.kernels["cpu"] in ffi.available_kernels()
    assert row.rhs.scale == "per axis 0, 2" and row.epilogue == "scale -> float32"


def test_another_machine_is_asked():
    q = codes()

    def rows(x, q, scale, sizes):
        return written(x, q, scale, sizes, jnp.bfloat16)

    for capability, taken in ((90, True), (75, False)):
        target = jaxfp8.Target("cuda", capability)
        report = jaxfp8.explain(rows, target=target)(
            X.astype(jnp.bfloat16), q.qvalue, q.scale, SIZES
        )
        assert report.sites[0].rewritten is taken


def test_nan_of_an_expert_stays_with_its_rows():
    q = codes()
    bad = q.qvalue.at[0, 0, 0].set(jnp.nan)
    y = jaxfp8.rewrite(written, strict=True)(X, bad, q.scale, SIZES)
    assert np.isnan(y[:4, 0]).all() and np.isfinite(y[4:]).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
def test_codes_of_both_sides_are_captured(dtype):
    x, q = X.astype(dtype), codes(dtype)

    def direct(x, q, sizes):
        return lax.ragged_dot(x, q, sizes, preferred_element_type=jnp.float32)

    assert len(jaxfp8.explain(direct)(x, q.qvalue, SIZES).matched) == 1
    y = jaxfp8.rewrite(direct, strict=True)(x, q.qvalue, SIZES)
    np.testing.assert_allclose(y, by_group(x, q.qvalue, SIZES), rtol=1e-5, atol=1e-5)


def axes(contracting, batch=((), ()), ragged=0, groups=()):
    return lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], groups)


ROWS_OF_BATCH = axes(((2,), (2,)), ((0,), (0,)), ragged=1, groups=[1])
POSITIONS_OF_BATCH = axes(((1,), (1,)), ((0,), (0,)), ragged=1)


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "numbers", "reason"),
    [
        ((2, 9, 8), (2, 3, 8, 4), (2, 3), ROWS_OF_BATCH, "batch"),
        ((2, 9, 8), (2, 9, 4), (2, 3), POSITIONS_OF_BATCH, "batch"),
        ((9, 5, 8), (3, 8, 4), (3,), axes(((2,), (1,)), groups=[0]), "one other"),
        ((9, 8), (3, 8, 2, 4), (3,), axes(((1,), (1,)), groups=[0]), "one other"),
        ((9, 5, 8), (9, 4), (3,), axes(((0,), (0,))), "one other"),
        ((9, 5, 8), (9, 5, 4), (3,), axes(((0, 1), (0, 1))), "one contracted axis"),
    ],
    ids=["rows of a batch", "K of a batch", "lhs axes", "rhs axes", "axes beside K", "two of K"],
)
def test_other_axes_are_missed_with_a_reason(lhs, rhs, sizes, numbers, reason):
    def general(x, q, sizes):
        return lax.ragged_dot_general(x, q.astype(x.dtype) * 0.5, sizes, numbers)

    args = jnp.ones(lhs), jnp.ones(rhs, jnp.float8_e4m3fn), jnp.ones(sizes, jnp.int32)
    (row,) = jaxfp8.explain(general)(*args).sites
    assert not row.rewritten and reason in row.reason
    with pytest.warns(jaxfp8.FallbackWarning, match=reason):
        y = jaxfp8.rewrite(general)(*args)
    np.testing.assert_array_equal(y, general(*args))


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (
            lambda x, q, scale: lax.ragged_dot(
                x, q.astype(x.dtype) * scale * abs(W[:, :, :1]), SIZES
            ),
            "varies with every element",
        ),
        (
            lambda x, q, scale: lax.ragged_dot(
                x.astype(jnp.int32), q.astype(x.dtype) * scale, SIZES
            ),
            "the other operand is int32",
        ),
        (
            lambda x, q, scale: lax.ragged_dot(
                x.astype(jnp.int8), q, SIZES, preferred_element_type=jnp.int32
            ),
            "the output dtype is int32",
        ),
    ],
    ids=["elementwise scales", "int32", "int32 sums"],
)
def test_a_miss_has_a_reason(fun, reason):
    q = codes(jnp.int8)
    (row,) = jaxfp8.explain(fun)(X, q.qvalue, q.scale).sites
    assert not row.rewritten and reason in row.reason


def test_ragged_dots_of_floats_are_counted():
    report = jaxfp8.explain(lambda x, w: lax.ragged_dot(x, w, SIZES) @ w[0].T)(X, W)
    assert (report.others, report.sites) == (2, ())
