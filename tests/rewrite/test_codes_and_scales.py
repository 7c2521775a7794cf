"""A function that makes codes with a rounded scale is given products of that scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.scales import (
    arguments,
    close,
    codes_of,
    exact,
    product_of_codes,
    static_arguments,
)
from rewrite.support import BF16, E4M3, F32, Data, count, float64, relative_l2, specs

import jaxfp8


# Scales of the rows of x that are computed in bfloat16, for codes in it, or in float32.
def _largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x.astype(jnp.bfloat16)), -1, keepdims=True) / 127


def test_codes_that_suit_the_largest_value_of_their_row() -> None:
    """Dynamic quantization, all of it in bfloat16."""

    def model(x: Any, q: Any) -> Any:
        scale = _largest(x)
        return product_of_codes(codes_of(x, scale), scale, q)

    x, q, _ = arguments()
    x = x.astype(jnp.bfloat16)
    scale = _largest(x)
    want = exact(codes_of(x, scale), q, 1.0) * np.asarray(scale, np.float64)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    close(jaxfp8.rewrite(model)(x, q), want)


@pytest.mark.parametrize(
    "scale_of", [_largest, lambda x: _largest(x) * 3, lambda x: _largest(x[:1])]
)
def test_a_scale_that_is_widened_is_one_for_codes_and_product(scale_of: Any) -> None:
    """XLA may leave out its rounding: for both, or the codes would not suit the product."""

    def model(x: Any, q: Any) -> Any:
        scale = scale_of(x).astype(F32)
        codes = codes_of(x, scale)
        return jax.lax.dot(codes, q, preferred_element_type=jnp.int32).astype(F32) * scale

    x, q, _ = arguments()
    biases = []
    for i in range(16):
        largest = x.at[:, 0].set(jnp.arange(3.0, 8.0) + i / 17)
        got, want = (f(largest, q) for f in (jaxfp8.rewrite(model), jax.jit(model)))
        biases.append(np.vdot(got, want) / np.vdot(want, want) - 1)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    assert np.abs(biases).max() < 2**-14


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda amax: jnp.repeat(amax / 127, 8, axis=-1),
        lambda amax: jnp.repeat(amax, 8, axis=-1) / 127,
        lambda amax: jnp.repeat(amax, 8, axis=-1) * jnp.bfloat16(1 / 127),
    ],
)
def test_codes_that_suit_a_scale_of_the_largest_value_of_a_block(scale_of: Any) -> None:
    """The scale of codes and that of the product are rounded alike."""

    def model(x: Any, q: Any) -> Any:
        amax = jnp.max(jnp.abs(x.astype(jnp.bfloat16).reshape(5, 4, 8)), axis=-1)
        scale = scale_of(amax).astype(F32)
        codes = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
        return (codes.astype(F32) * scale) @ q.astype(F32)

    _, q, _ = arguments()
    x = 0.75 + Data().normal(5, 32) / 100
    x = x.at[:, ::8].set(jnp.asarray([[1.7], [1.9], [2.1], [2.6], [3.1]]))
    assert count(jaxfp8.rewrite(model), x, q) == 1
    close(jax.jit(jaxfp8.rewrite(model))(x, q), jax.jit(model)(x, q))


@pytest.mark.parametrize("where", ["codes", "weight", "product"])
def test_a_given_scale_is_rounded_where_codes_were_made_with_it(where: str) -> None:
    """Static quantization: the codes suit the rounded scale, and another would be a bias."""

    def model(x: Any, given: Any, q: Any) -> Any:
        scale = given.astype(jnp.bfloat16)
        return product_of_codes(codes_of(x, scale), scale, q, where)

    args = static_arguments()
    assert count(jaxfp8.rewrite(model), *args) == 1
    close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


def _in_scan(codes: Any, given: Any, q: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        return carry, product_of_codes(codes, given.astype(jnp.bfloat16), q)

    return jax.lax.scan(turn, 0, length=2)[1]


def _in_carry(codes: Any, given: Any, q: Any) -> Any:
    def turn(codes: Any, _: Any) -> Any:
        scale = given.astype(jnp.bfloat16)
        return codes_of(codes.astype(F32) + 1, scale), product_of_codes(codes, scale, q)

    return jax.lax.scan(turn, codes, length=2)[1]


REGIONS = {
    "checkpoint": lambda codes, given, q: jax.checkpoint(
        lambda s: product_of_codes(codes, s.astype(jnp.bfloat16), q)
    )(given),
    "cond": lambda codes, given, q: jax.lax.cond(
        codes[0, 0] < 100,
        lambda: product_of_codes(codes, given.astype(jnp.bfloat16), q),
        lambda: jnp.zeros((codes.shape[0], q.shape[1]), F32),
    ),
    "scan": _in_scan,
    "carry": _in_carry,
}


@pytest.mark.parametrize("region", REGIONS)
def test_codes_that_were_made_outside_a_region_are_known_as_such(region: str) -> None:
    def model(x: Any, given: Any, q: Any) -> Any:
        codes = codes_of(x, given.astype(jnp.bfloat16))
        return REGIONS[region](codes, given, q)

    args = static_arguments()
    assert count(jaxfp8.rewrite(model), *args) == 1
    close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


def test_codes_that_the_forward_pass_made_are_known_in_the_backward_pass() -> None:
    @jax.custom_vjp
    def layer(x: Any, given: Any, w: Any) -> Any:
        return forward(x, given, w)[0]

    def forward(x: Any, given: Any, w: Any) -> Any:
        codes = codes_of(x, given.astype(jnp.bfloat16))
        return codes.astype(jnp.bfloat16) @ w, (codes, given)

    def backward(residuals: Any, dy: Any) -> Any:
        codes, given = residuals
        wide = codes.astype(jnp.bfloat16) * given.astype(jnp.bfloat16)
        return None, None, jax.lax.dot(wide.T, dy)

    layer.defvjp(forward, backward)
    x, given, q = static_arguments()
    w = q.astype(jnp.bfloat16)
    gradient = jax.grad(lambda w, f: (f(x, given, w).astype(F32) ** 2).sum())
    got, want = (np.asarray(gradient(w, f), np.float64) for f in (jaxfp8.rewrite(layer), layer))
    assert abs(np.vdot(got, want) / np.vdot(want, want) - 1) < 2**-10
    # As a value, too: the second half of a derivative has a first half then.
    again = jax.vjp(lambda w: gradient(w, jaxfp8.rewrite(layer)), w)[0]
    np.testing.assert_array_equal(np.asarray(again, np.float64), got)


def test_what_the_function_computes_of_a_rounded_scale_suits_the_product() -> None:
    """Squared distances to the entries of a codebook: sums of terms that nearly cancel."""

    def model(x: Any, codes: Any, s: Any) -> Any:
        wide = codes.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
        products = jax.lax.dot(x, wide, preferred_element_type=F32)
        return (x.astype(F32) ** 2).sum(1)[:, None] - 2 * products + (wide.astype(F32) ** 2).sum(0)

    _, codes, s = arguments()
    s = jnp.exp2(jnp.round(s)) * 1.0039  # a power of two in bfloat16, which holds wide exactly
    wide = codes.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
    got = np.asarray(jaxfp8.rewrite(model)(wide.T, codes, s), np.float64)
    terms = (np.asarray(wide, np.float64) ** 2).sum(0)
    assert np.abs(np.diag(got)).max() < 1e-5 * terms.max()


# A scale of the activation that is one number, as with one row


def _by_token_and_channel(x: Any, q: Any, s: Any) -> Any:
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-12) / 448
    codes = jnp.clip(x / scale, -448, 448).astype(E4M3)
    total = jnp.dot(codes.astype(BF16), q.astype(BF16), preferred_element_type=F32)
    return total * scale * s


def _weight_on_the_left(x: Any, q: Any, s: Any) -> Any:
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / 448
    codes = jnp.clip(x / scale[:, None], -448, 448).astype(E4M3)
    total = jnp.dot(q.T.astype(BF16), codes.T.astype(BF16), preferred_element_type=F32)
    return total * scale * s[:, None]


@pytest.mark.parametrize("fun", [_by_token_and_channel, _weight_on_the_left])
def test_a_number_is_not_multiplied_into_the_scales_of_columns(fun: Any) -> None:
    """It is the scale of its own side: multiplying the other's scales is one operation more."""
    data = Data()
    args = data.normal(1, 32), data.bits8(32, 24), data.scale(24)
    (spec,) = specs(jaxfp8.rewrite(fun), *args)
    sides = (spec.lhs, spec.rhs)
    assert all(side.scale for side in sides)
    assert sorted(max(side.scale_shape) for side in sides) == [1, 24]
    (want,) = float64(fun, *args)
    assert relative_l2(jax.jit(jaxfp8.rewrite(fun))(*args), want) < 1e-5
