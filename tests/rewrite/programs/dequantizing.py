"""Scales before a dot and after it, dtypes, and zero points."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from rewrite.programs.table import Table, both, weight
from rewrite.support import BF16, E4M3, E5M2, F16, F32

TABLE = Table()
program = TABLE.add

# The scale before the dot


@program(
    lambda d: (d.bits8(5, 32), d.bits8(32, 24), jnp.asarray(0.5, BF16), jnp.asarray(0.25, BF16))
)
def the_classic_program(a_q, b_q, a_scale, b_scale):
    return lax.dot(a_q.astype(BF16) * a_scale, b_q.astype(BF16) * b_scale)


@program(weight())
def scale_by_column_then_bf16(x, q, s):
    return x @ (q.astype(F32) * s).astype(BF16)


@program(weight(scale=""))
def scalar_scale(x, q, s):
    return x @ (q.astype(BF16) * s.astype(BF16))


@program(weight(scale="1"))
def scale_of_shape_1_promotes_the_dot(x, q, s):
    return jnp.dot(x, q.astype(BF16) * s)


@program(weight(scale="1n"))
def scale_1n_broadcasts_implicitly(x, q, s):
    return x @ (q.astype(BF16) * s.astype(BF16))


@program(weight(scale="n"))
def scale_divided(x, q, s):
    return x @ (q.astype(F32) / s)


@program(weight(scale="n"))
def scale_on_the_left(x, q, s):
    return x @ (s * q.astype(F32))


@program(weight(scale=""))
def literal_scale(x, q, s):
    return x @ (q.astype(BF16) * 0.125)


@program(weight(scale="n"))
def nested_scales(x, q, s):
    return x @ (((q.astype(F32) * 2.0) / s) * s[None, :] * 0.5)


@program(weight(scale="n"))
def negated(x, q, s):
    return x @ -(q.astype(F32) * s)


@program(weight(scale="k1"))
def scale_along_k(x, q, s):
    return x @ (q.astype(F32) * s)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(32, 1), d.scale(1, 24)))
def scale_along_k_and_by_column(x, q, s_k, s_n):
    return x @ (q.astype(F32) * s_k * s_n)


@program(weight(dtype=E5M2))
def e5m2(x, q, s):
    return x @ (q.astype(BF16) * s.astype(BF16))


@program(weight(dtype=jnp.int8))
def int8_weight(x, q, s):
    return x @ (q.astype(BF16) * s.astype(BF16))


@program(weight(dtype=jnp.uint8))
def uint8_weight(x, q, s):
    return x @ (q.astype(F32) * s)


@program(weight(dtype=jnp.uint8))
def fp8_bits_in_uint8(x, q, s):
    clean = jnp.where((q & 0x7F) == 0x7F, jnp.uint8(0), q)
    return x @ (lax.bitcast_convert_type(clean, E4M3).astype(BF16) * s.astype(BF16))


@program(weight(x=F16))
def float16(x, q, s):
    return x @ (q.astype(F16) * s.astype(F16))


@program(weight(x=F32))
def no_scale(x, q, s):
    return x @ q.astype(F32)


@program(weight())
def mixed_dtypes_by_preferred_element_type(x, q, s):
    return jnp.dot(x, q.astype(BF16), preferred_element_type=F32) * s


# The scale after the dot


@program(weight())
def scale_after(x, q, s):
    return jnp.dot(x, q.astype(BF16)) * s


@program(weight())
def divided_after(x, q, s):
    return jnp.dot(x, q.astype(BF16)) / s


@program(both())
def row_and_column_scales_after(a, b, s_m, s_n):
    return jnp.dot(a.astype(BF16), b.astype(BF16), preferred_element_type=F32) * s_m * s_n


@program(both())
def scales_multiplied_first(a, b, s_m, s_n):
    return jnp.dot(a.astype(BF16), b.astype(BF16), preferred_element_type=F32) * (s_m * s_n)


@program(both())
def scaled_before_and_after(a, b, s_m, s_n):
    return jnp.dot(a.astype(F32) * s_m, b.astype(F32)) * s_n * 3.0


@program(both(jnp.int8))
def int8_dot_then_scales(a, b, s_m, s_n):
    return jnp.dot(a, b, preferred_element_type=jnp.int32).astype(F32) * s_m * s_n


@program(both(jnp.int8))
def int8_dot_alone(a, b, s_m, s_n):
    return jnp.dot(a, b, preferred_element_type=jnp.int32)


@program(both())
def fp8_dot_without_convert(a, b, s_m, s_n):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=F32) * s_m * s_n


@program(weight(scale="m1"))
def row_scale_after_float_lhs(x, q, s):
    return jnp.dot(x, q.astype(BF16), preferred_element_type=F32) * s


# Zero points


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=jnp.int8), jnp.int16(3)))
def scalar_zero_point_in_int32(x, q, z):
    return x @ ((q.astype(jnp.int32) - z.astype(jnp.int32)).astype(F32) * 0.1)


@program(
    lambda d: (
        d.normal(5, 32),
        d.bits8(32, 24, dtype=jnp.uint8),
        d.bits8(24, dtype=jnp.uint8),
        d.scale(24),
    )
)
def zero_point_by_column_in_float(x, q, z, s):
    return x @ ((q.astype(F32) - z.astype(F32)) * s)


@program(weight(dtype=jnp.uint8, x=F32))
def uint8_minus_128(x, q, s):
    return x @ ((q.astype(F32) - 128) * s)


@program(lambda d: (d.bits8(5, 32, dtype=jnp.uint8), d.bits8(32, 24, dtype=jnp.int8), d.scale(24)))
def zero_points_on_both_sides_int32_dot(a, b, s):
    acc = jnp.dot(a.astype(jnp.int32) - 120, b.astype(jnp.int32) + 2)
    return acc.astype(F32) * 0.01 * s


@program(
    lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=jnp.int8), d.bits8(1, 24, dtype=jnp.int8))
)
def zero_point_in_int16(x, q, z):
    return x @ (q.astype(jnp.int16) - z.astype(jnp.int16)).astype(F32)
