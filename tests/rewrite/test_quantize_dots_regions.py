"""quantize_dots rounds the dots inside loops, branches and calls, and says which it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.float_programs import (
    STACK,
    W,
    X,
    Y,
    close,
    expected,
    in_cond,
    in_custom_jvp,
    in_custom_vjp,
    in_shard_map,
    in_while,
    jitted,
    layers,
    normal,
    rematerialised,
    scanned,
    step_jvp,
    step_vjp,
)

import jaxfp8

REGIONS = [
    scanned,
    in_while,
    in_cond,
    rematerialised,
    jitted,
    in_custom_jvp,
    in_custom_vjp,
    in_shard_map,
]


@pytest.mark.parametrize("region", REGIONS)
def test_dots_inside_a_region_are_rounded(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    close(g(Y, STACK), layers(Y, STACK, jaxfp8.FP8_DYNAMIC))
    report = g.explain(Y, STACK)
    assert report.matched and not report.missed


@pytest.mark.parametrize("region", [in_custom_jvp, in_custom_vjp, scanned, rematerialised])
def test_value_is_the_same_under_differentiation(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    value, _ = jax.value_and_grad(lambda x: g(x, STACK).sum())(Y)
    close(value, layers(Y, STACK, jaxfp8.FP8_DYNAMIC).sum())


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_inside_and_outside_agree(axes):
    xs = normal(3, 6, 40) if axes[0] == 0 else X
    ws = jnp.stack([W, 2 * W, -W]) if axes[1] == 0 else W

    def f(x, w):
        return jnp.tanh(x @ w)

    inside = jaxfp8.quantize_dots(jax.vmap(f, axes), jaxfp8.FP8_DYNAMIC)(xs, ws)
    outside = jax.vmap(jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC), axes)(xs, ws)
    np.testing.assert_allclose(inside, outside, rtol=1e-6, atol=1e-6)


def test_dot_in_the_condition_of_a_loop_stays_as_it_is():
    def f(x, w):
        return jax.lax.while_loop(lambda x: (x @ w).sum() < 10, lambda x: x + x @ w @ w.T, x)

    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC)
    report = g.explain(X, W)
    assert len(report.matched) == 2
    assert ["condition" in site.reason for site in report.missed] == [True]


def test_convolution_is_reported_as_left():
    def f(kernel, x):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    (site,) = (
        jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC)
        .explain(normal(3, 2, 3, 3), normal(1, 2, 8, 8))
        .missed
    )
    assert "no kernel for convolutions" in site.reason and not site.rhs.eight_bit


def test_weight_may_leave_a_region():
    def f(x, stack):
        y, turned = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w.T), x, stack)
        return y @ turned[0].T

    y = layers(Y, STACK, jaxfp8.FP8_DYNAMIC)
    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC, where=lambda path, dot: True)
    close(g(Y, STACK), expected(y, STACK[0], jaxfp8.FP8_DYNAMIC))


def test_jit_that_donates_and_shards_keeps_its_parameters():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = jax.jit(lambda x, w: x @ w, in_shardings=(device, device), donate_argnums=0)
    g = jaxfp8.quantize_dots(lambda x, w: step(x + 0, w), jaxfp8.FP8_DYNAMIC)
    close(g(X, W), expected(X, W, jaxfp8.FP8_DYNAMIC))
    assert "donated_invars=(True, False)" in str(jax.make_jaxpr(g)(X, W))


DONATING = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=0)


@pytest.mark.parametrize(
    "step",
    [step_jvp, step_vjp, lambda x, w: DONATING(x + 0, w)],
    ids=["custom_jvp", "custom_vjp", "donating"],
)
def test_jitted_function_may_return_more_than_a_function_inside_it(step):
    f = jax.jit(lambda x, w: (step(x, w), x.sum(), x))
    y, total, same = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC)(Y, STACK[0])
    close(y, layers(Y, STACK[:1], jaxfp8.FP8_DYNAMIC))
    close(total, Y.sum())
    np.testing.assert_array_equal(same, Y)


def test_function_with_a_mutable_array_is_called_as_it_is():
    def f(x, w):
        total = jax.new_ref(jnp.zeros(()))
        y = x @ w
        total[...] += y.sum()
        return y * total[...]

    g = jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC)
    with pytest.warns(jaxfp8.FallbackWarning, match="mutable array"):
        np.testing.assert_array_equal(g(X, W), f(X, W))
    assert not g.explain(X, W).matched
