"""Programs that look like a dot on 8-bit data and are not: they must be left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rewrite.programs import Program, weight
from rewrite.support import BF16, E4M3, F32, Data

NEGATIVES: list[Program] = []


def negative(make: Callable[[Data], tuple[Any, ...]]) -> Callable[..., Any]:
    """Register a function under its own name, with no call expected of it."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        NEGATIVES.append(Program(fun.__name__, fun, make, 0))
        return fun

    return register


int8 = weight(dtype=jnp.int8, x=F32)


@negative(lambda d: (d.normal(5, 32), d.normal(32, 24)))
def no_eight_bit_data_at_all(x, w):
    return jax.nn.relu(x @ w)


@negative(weight(x=F32))
def select_with_a_constant_other_than_zero(x, q, s):
    mask = (jnp.arange(32) % 2 == 0)[:, None]
    return x @ jnp.where(mask, q.astype(F32) * s, 1.0)


@negative(int8)
def requantized_before_the_dot_by_truncation(x, q, s):
    return x @ jnp.trunc(q.astype(F32) * s)


@negative(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(32, 24)))
def scale_for_every_element(x, q, s):
    return x @ (q.astype(F32) * s)


@negative(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(3, 32, 24)))
def vmap_over_scales_for_every_element(x, q, s):
    return jax.vmap(lambda s: x @ (q.astype(F32) * s))(s)


@negative(lambda d: (d.normal(5, 32), d.bits8(32), d.normal(32, 24)))
def eight_bit_factors_of_a_float_operand(x, q, w):
    return (x * q.astype(F32)) @ w


@negative(weight(x=F32))
def offset_of_fp8_values(x, q, s):
    return x @ (q.astype(F32) - 3.0)


@negative(lambda d: (*int8(d), d.normal(24)))
def offset_that_is_not_whole(x, q, s, z):
    return x @ ((q.astype(F32) - z) * s)


@negative(int8)
def offset_after_the_scale(x, q, s):
    return x @ (q.astype(F32) * s - 3.0)


@negative(int8)
def int8_multiplication_that_wraps(x, q, s):
    return x @ (q * jnp.int8(3) * jnp.int8(7)).astype(F32).at[0, 0].set(0.5)


@negative(int8)
def square_of_the_values(x, q, s):
    return x @ jnp.square(q.astype(F32) * s)


@negative(weight(x=F32))
def tanh_of_the_values(x, q, s):
    return x @ jnp.tanh(q.astype(F32))


@negative(weight(x=F32))
def sum_with_another_matrix(x, q, s):
    return x @ (q.astype(F32) * s + x[:1, :1])


@negative(lambda d: (*weight(x=F32)(d), d.normal(32, 4), d.normal(4, 24)))
def low_rank_update_of_the_weight(x, q, s, a, b):
    return x @ (q.astype(F32) * s + a @ b)


@negative(weight(x=F32))
def complex_product(x, q, s):
    return x.astype(jnp.complex64) @ q.astype(F32).astype(jnp.complex64)


@negative(weight(x=F32))
def padded_with_one(x, q, s):
    return x @ jnp.pad((q.astype(F32) * s)[:-1], ((0, 1), (0, 0)), constant_values=1.0)


@negative(weight(x=F32))
def values_divided_into_something(x, q, s):
    return x @ (s / (q.astype(F32) + 0.0 * s + 500.0))


@negative(lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=jnp.int8)))
def int8_dot_that_wraps(x, q):
    return jnp.dot(x.astype(jnp.int8), q, preferred_element_type=jnp.int8)


@negative(lambda d: (d.bits8(5, 32, dtype=jnp.int8), jnp.ones((32, 24), jnp.int32)))
def int8_times_int32(a, b):
    return jnp.dot(a.astype(jnp.int32), b)


@negative(weight(x=F32))
def cumulative_sum_of_the_values(x, q, s):
    return x @ jnp.cumsum(q.astype(F32) * s, axis=0)


@negative(lambda d: (d.normal(0, 32), d.bits8(32, 24)))
def empty_operand(x, q):
    return x @ q.astype(F32)


@negative(weight(x=F32))
def scales_reshaped_through_their_tiles(x, q, s):
    w = (q.astype(F32).reshape(4, 8, 24) * s).reshape(8, 4, 24)
    return x.reshape(5, 2, 16) @ jnp.cumprod(w, 0).reshape(2, 16, 24)[0]


@negative(weight(x=BF16))
def sorted_values(x, q, s):
    return x @ jnp.sort(q.astype(BF16), axis=0)


@negative(weight(x=F32))
def quantized_anew(x, q, s):
    w = (q.astype(F32) * s).astype(jnp.int32).astype(F32)
    return x @ w


@negative(weight(x=F32))
def rounded_to_fewer_bits_than_bfloat16(x, q, s):
    return x @ lax.reduce_precision(q.astype(F32) * s, 8, 4)


@negative(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 24)))
def joined_within_a_tile(x, q, s):
    w = q.astype(F32) * jnp.repeat(s, 8, 0)
    return x @ jnp.concatenate([w[:12], w[8:28]])


@negative(weight(x=F32))
def dequantized_but_never_multiplied(x, q, s):
    return lax.dot(x, x.T), q.astype(F32) * s, jnp.zeros((), E4M3)
