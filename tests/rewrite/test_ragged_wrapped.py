"""Ragged dots inside wrappers, as tokamax traces them, and groups of batch entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import jaxfp8

GROUPS, ROWS, DEPTH, COLUMNS = 3, 11, 32, 24
SIZES = jnp.array([4, 0, 5])
X = jax.random.normal(jax.random.key(0), (ROWS, DEPTH), jnp.bfloat16)
Q = jaxfp8.quantize(
    jax.random.normal(jax.random.key(1), (GROUPS, DEPTH, COLUMNS)), channelwise_axes=(0, 2)
)
ARGS = X, Q.qvalue, Q.scale.astype(jnp.bfloat16), SIZES
ROWS_IN_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
ALONG_K = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def op(x, w, sizes, numbers):
    """One operation of tokamax: a `custom_vmap` that sums in float32 and returns its residuals."""

    def multiply(x, w, sizes):
        wide = lax.ragged_dot_general(
            x,
            w,
            sizes,
            numbers,
            precision=(lax.Precision.DEFAULT, lax.Precision.DEFAULT),
            preferred_element_type=jnp.float32,
        )
        y = wide.astype(jnp.promote_types(x.dtype, w.dtype))
        return y, x, w, sizes, y

    def of_batch(size, batched, *args):
        axes = [0 if flag else None for flag in batched]
        return jax.vmap(multiply, axes)(*args), (True,) * 5

    call = custom_vmap(multiply)
    call.def_vmap(of_batch)
    return call(x, w, sizes)


@jax.custom_vjp
def like_tokamax(x, w, sizes):
    return op(x, w, sizes, ROWS_IN_GROUPS)[0]


def _forward(x, w, sizes):
    y, *residuals = op(x, w, sizes, ROWS_IN_GROUPS)
    return y, residuals


def _backward(residuals, dy):
    x, w, sizes, _ = residuals
    d_x = op(dy, w, sizes, TRANSPOSED)[0]
    return d_x.astype(x.dtype), op(x, dy, sizes, ALONG_K)[0].astype(w.dtype), None


like_tokamax.defvjp(_forward, _backward, optimize_remat=True)


def experts(x, q, scale, sizes):
    return like_tokamax(x, q.astype(x.dtype) * scale, sizes)


def distance(ours, theirs):
    ours, theirs = (np.asarray(y, np.float64) for y in (ours, theirs))
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_wrapped_ragged_dot_is_captured(wrap):
    f = wrap(experts)
    report = jaxfp8.explain(f)(*ARGS)
    assert (len(report.matched), len(report.missed)) == (1, 0)
    assert distance(jaxfp8.rewrite(f, strict=True)(*ARGS), experts(*ARGS)) < 2**-7


def gradient_of(f, x, scale):
    return jnp.sum(f(x, Q.qvalue, scale, SIZES).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("outside", [True, False], ids=["rewrite(grad)", "grad(rewrite)"])
def test_its_backward_product_is_captured(outside):
    """A residual that comes back as it went in is still 8-bit data."""
    inner = experts if outside else jaxfp8.rewrite(experts)
    step = jax.grad(functools.partial(gradient_of, inner), (0, 1))
    if outside:
        products = jaxfp8.explain(step)(X, ARGS[2]).matched
        assert [site.dims[1:] for site in products] == [(ROWS, COLUMNS, DEPTH), (ROWS, DEPTH, 24)]
        step = jaxfp8.rewrite(step)
    theirs = jax.grad(functools.partial(gradient_of, experts), (0, 1))(X, ARGS[2])
    for mine, other in zip(step(X, ARGS[2]), theirs, strict=True):
        assert distance(mine, other) < 0.01


def test_its_rule_for_vmap_stays():
    stacked = [jnp.stack([x, x]) for x in (X, Q.qvalue.view(jnp.uint8), ARGS[2], SIZES)]

    def each(x, codes, scale, sizes):
        return experts(x, lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale, sizes)

    y = jax.vmap(jaxfp8.rewrite(each))(*stacked)
    np.testing.assert_array_equal(y, jax.vmap(each)(*stacked))


OF_BATCHES = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 0, 0), (3, 0, 0, 0)], ids=str)
def test_groups_of_batches_are_the_plain_dot(sizes):
    """JAX multiplies all entries of the batch, whatever the sizes, and so does the call."""
    x = jax.random.normal(jax.random.key(2), (GROUPS, 5, DEPTH))

    def gated(x, q, scale, sizes):
        y = lax.ragged_dot_general(x, q.astype(x.dtype) * scale, sizes, OF_BATCHES)
        return jax.nn.relu(y)

    args = x, Q.qvalue, Q.scale, jnp.array(sizes)
    (row,) = jaxfp8.explain(gated)(*args).sites
    assert row.rewritten and row.dims == (GROUPS, 5, COLUMNS, DEPTH)
    assert "relu" in row.epilogue
    y = jaxfp8.rewrite(gated, strict=True)(*args)
    np.testing.assert_allclose(y, gated(*args), rtol=1e-5, atol=1e-5)


def test_the_remedy_for_batches_is_captured():
    """Rows of a batch are no call of their own; `jax.lax.map` over the batch is one."""
    x = jnp.stack([X, -X])

    def mapped(x, q, scale, sizes):
        wide = q.astype(x.dtype) * scale
        return lax.map(lambda rows: lax.ragged_dot(rows, wide, sizes), x)

    args = x, *ARGS[1:]
    assert len(jaxfp8.explain(mapped)(*args).matched) == 1
    assert distance(jaxfp8.rewrite(mapped, strict=True)(*args), mapped(*args)) < 0.01
