"""Programs with a dot on 8-bit data, as people write them, and how many calls each becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rewrite.support import BF16, E4M3, E5M2, F16, F32, Data


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its arguments, and the number of scaled dots it must hold when rewritten.

    `plain` computes the same where the float64 oracle cannot follow the function. `floor` is the
    relative error that a float32 sum in another order may have, once what follows enlarged it.
    """

    name: str
    fun: Callable[..., Any]
    make: Callable[[Data], tuple[Any, ...]]
    calls: int = 1
    plain: Callable[..., Any] | None = None
    floor: float = 1e-7

    def args(self) -> tuple[Any, ...]:
        return self.make(Data())


PROGRAMS: list[Program] = []


def program(
    make: Callable[[Data], tuple[Any, ...]],
    calls: int = 1,
    plain: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register a function under its own name."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(fun.__name__, fun, make, calls, plain))
        return fun

    return register


def weight(dtype: Any = E4M3, x: Any = BF16, scale: Any = "n", transposed: bool = False) -> Any:
    """Arguments x [M, K], q [K, N] and a scale of a named shape."""

    def make(data: Data) -> tuple[Any, ...]:
        m, k, n = data.m, data.k, data.n
        shapes = {
            "": (),
            "1": (1,),
            "n": (n,),
            "1n": (1, n),
            "k1": (k, 1),
            "11": (1, 1),
            "m1": (m, 1),
        }
        q = data.bits8(*((n, k) if transposed else (k, n)), dtype=dtype)
        return data.normal(m, k, dtype=x), q, data.scale(*shapes[scale])

    return make


def both(dtype: Any = E4M3, other: Any = None) -> Any:
    """Arguments x_q [M, K], w_q [K, N], and scales (M, 1) and (1, N)."""

    def make(data: Data) -> tuple[Any, ...]:
        m, k, n = data.m, data.k, data.n
        return (
            data.bits8(m, k, dtype=dtype),
            data.bits8(k, n, dtype=other or dtype),
            data.scale(m, 1),
            data.scale(1, n),
        )

    return make


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


# Views between


@program(weight(transposed=True))
def transposed_weight(x, q, s):
    return x @ (q.astype(F32) * s[:, None]).T.astype(BF16)


@program(weight(transposed=True))
def transposed_by_dimension_numbers(x, q, s):
    w = q.astype(BF16) * s[:, None].astype(BF16)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


@program(lambda d: (d.normal(5, 32), d.bits8(4, 8, 24), d.scale(24)))
def merged_axes(x, q, s):
    return x @ (q.astype(F32) * s).reshape(32, 24)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def split_axes_einsum(x, q, s):
    w = (q.astype(F32) * s).reshape(32, 3, 8)
    return jnp.einsum("md,dhk->mhk", x, w)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3)))
def blocks_by_reshape(x, q, s):
    w = (q.astype(F32).reshape(4, 8, 3, 8) * s[:, None, :, None]).reshape(32, 24)
    return x @ w


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3)))
def blocks_by_repeat(x, q, s):
    return x @ (q.astype(F32) * jnp.repeat(jnp.repeat(s, 8, 0), 8, 1))


@program(lambda d: (d.normal(5, 30), d.bits8(30, 23), d.scale(4, 3)))
def partial_edge_blocks(x, q, s):
    return x @ (q.astype(F32) * jnp.repeat(jnp.repeat(s, 8, 0), 8, 1)[:30, :23])


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 24)))
def groups_along_k(x, q, s):
    return x @ (q.astype(F32).reshape(4, 8, 24) * s[:, None]).reshape(32, 24)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def squeezed_and_expanded(x, q, s):
    return x @ (q[None].astype(F32) * s)[0]


@program(lambda d: (d.normal(5, 16), d.bits8(32, 24), d.scale(24)))
def static_slice(x, q, s):
    return x @ (q.astype(F32) * s)[8:24]


@program(lambda d: (d.normal(5, 32), d.bits8(3, 32, 24), d.scale(3, 24), jnp.int32(1)))
def dynamic_layer_of_a_stack(x, q, s, i):
    return x @ (q.astype(F32) * s[:, None])[i]


@program(lambda d: (d.normal(5, 32), d.bits8(4, 32, 24), d.scale(4, 1, 24), jnp.asarray([2, 0])))
def gathered_experts(x, q, s, ids):
    return jnp.einsum("md,edf->emf", x, (q.astype(F32) * s)[ids])


@program(lambda d: (d.normal(5, 32), d.bits8(32, 12), d.bits8(32, 12), d.scale(12), d.scale(12)))
def concatenated_weights(x, q1, q2, s1, s2):
    return x @ jnp.concatenate([q1.astype(F32) * s1, q2.astype(F32) * s2], axis=1)


@program(lambda d: (d.normal(5, 32), d.bits8(30, 24), d.scale(24)))
def padded_with_zero(x, q, s):
    return x @ jnp.pad(q.astype(F32) * s, ((0, 2), (0, 0)))


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def masked_with_zero(x, q, s):
    mask = (jnp.arange(32) % 3 > 0)[:, None]
    return x @ jnp.where(mask, q.astype(F32) * s, 0)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)), calls=2)
def split_in_two(x, q, s):
    a, b = jnp.split(q.astype(F32) * s, 2, axis=1)
    return jnp.tanh(x @ a) * (x @ b)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def behind_a_barrier(x, q, s):
    return x @ lax.optimization_barrier(q.astype(F32) * s)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def reversed_rows(x, q, s):
    return x @ (q.astype(F32) * s)[::-1]


# Dimension numbers


@program(lambda d: (d.normal(2, 3, 32, dtype=BF16), d.bits8(32, 4, 6), d.scale(4, 6)))
def dense_general(x, q, s):
    return jnp.einsum("bsd,dhk->bshk", x, q.astype(BF16) * s.astype(BF16))


@program(lambda d: (d.normal(2, 3, 4, 6), d.bits8(4, 6, 32), d.scale(32)))
def two_contracted_axes(x, q, s):
    return jnp.einsum("bshk,hkd->bsd", x, q.astype(F32) * s)


@program(
    lambda d: (d.bits8(2, 3, 7, 8), d.bits8(2, 3, 5, 8), d.scale(2, 3, 7, 1), d.scale(2, 3, 5, 1))
)
def attention_scores(q, k, s_q, s_k):
    return jnp.einsum("bhqd,bhkd->bhqk", q.astype(F32) * s_q, k.astype(F32) * s_k)


@program(lambda d: (d.normal(2, 5, 32), d.bits8(2, 32, 24), d.scale(2, 24)))
def vmapped(x, q, s):
    return jax.vmap(lambda x, q, s: x @ (q.astype(F32) * s))(x, q, s)


@program(lambda d: (d.normal(32), d.bits8(32, 24), d.scale(24)))
def vector_times_matrix(x, q, s):
    return x @ (q.astype(F32) * s)


@program(lambda d: (d.normal(32), d.bits8(32), d.scale()))
def inner_product(x, q, s):
    return jnp.vdot(x, q.astype(F32) * s)


# Epilogues


def _bias(d: Data) -> tuple[Any, ...]:
    return (*weight(x=F32)(d), d.normal(24))


@program(_bias)
def vector_bias(x, q, s, b):
    return x @ (q.astype(F32) * s) + b


@program(_bias)
def bias_as_flax_adds_it(x, q, s, b):
    y = x @ (q.astype(F32) * s)
    return y + jnp.reshape(b, (1,) * (y.ndim - 1) + (-1,))


@program(_bias)
def bias_subtracted(x, q, s, b):
    return b - x @ (q.astype(F32) * s)


@program(_bias)
def scale_after_bias(x, q, s, b):
    return (x @ q.astype(F32) + b) * s


@program(_bias)
def relu(x, q, s, b):
    return jax.nn.relu(x @ (q.astype(F32) * s) + b)


@program(_bias)
def relu_by_maximum(x, q, s, b):
    return jnp.maximum(0.0, x @ (q.astype(F32) * s) + b)


@program(_bias)
def gelu_tanh(x, q, s, b):
    return jax.nn.gelu(x @ (q.astype(F32) * s) + b)


@program(_bias)
def gelu_tanh_by_hand(x, q, s, b):
    y = x @ (q.astype(F32) * s) + b
    return 0.5 * y * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (y + 0.044715 * y * y * y)))


@program(_bias)
def gelu_erf(x, q, s, b):
    return jax.nn.gelu(x @ (q.astype(F32) * s) + b, approximate=False)


@program(_bias)
def gelu_erf_by_hand(x, q, s, b):
    y = x @ (q.astype(F32) * s) + b
    return y * 0.5 * (1.0 + jax.scipy.special.erf(y / jnp.sqrt(2.0)))


@program(_bias)
def silu(x, q, s, b):
    return jax.nn.silu(x @ (q.astype(F32) * s) + b)


@program(_bias)
def silu_by_hand(x, q, s, b):
    y = x @ (q.astype(F32) * s) + b
    return y / (1.0 + jnp.exp(-y))


@program(weight(x=BF16))
def gelu_in_bf16(x, q, s):
    return jax.nn.gelu(x @ (q.astype(BF16) * s.astype(BF16)))


@program(lambda d: (*weight(x=F32)(d), d.normal(5, 24)))
def residual(x, q, s, r):
    return r + x @ (q.astype(F32) * s)


@program(lambda d: (*weight(x=BF16)(d), d.normal(5, 24, dtype=BF16)))
def residual_relu_bf16(x, q, s, r):
    return jax.nn.relu(x @ (q.astype(BF16) * s.astype(BF16)) + r)


@program(weight(x=BF16))
def cast_output(x, q, s):
    return jnp.dot(x, (q.astype(F32) * s).astype(BF16), preferred_element_type=F32).astype(BF16)


@program(weight(x=F32))
def fp8_output(x, q, s):
    y = x @ (q.astype(F32) * s)
    return jnp.clip(y / 0.25, -448.0, 448.0).astype(E4M3)


@program(weight(x=F32))
def int8_output(x, q, s):
    y = jax.nn.relu(x @ (q.astype(F32) * s))
    return jnp.clip(jnp.round(y * 4.0), -128, 127).astype(jnp.int8)


@program(weight(x=F32))
def fp8_output_with_amax(x, q, s):
    y = jax.nn.relu(x @ (q.astype(F32) * s))
    return jnp.clip(y / 0.25, -57344.0, 57344.0).astype(E5M2), jnp.max(jnp.abs(y))


@program(weight(x=F32))
def output_with_amax(x, q, s):
    y = x @ (q.astype(F32) * s)
    return y, jnp.max(jnp.abs(y))


@program(weight(x=F32))
def amax_by_row(x, q, s):
    y = x @ (q.astype(F32) * s)
    return y, jnp.max(jnp.abs(y), axis=1)


@program(weight(x=F32))
def amax_of_an_fp8_output(x, q, s):
    y = jnp.clip(100.0 * (x @ (q.astype(F32) * s)), -448.0, 448.0).astype(E4M3)
    return y, jnp.max(jnp.abs(y)).astype(F32)


# Sums cast to FP8, as a dot does whose output dtype that is: without saturating


@program(lambda d: (d.bits8(5, 32), d.bits8(32, 24)))
def fp8_sums(x_q, w_q):
    return lax.dot(x_q, w_q)


@program(lambda d: (d.bits8(5, 32, dtype=E5M2), d.bits8(32, 24, dtype=E5M2)))
def e5m2_sums(x_q, w_q):
    return x_q @ w_q


@program(lambda d: (d.bits8(2, 5, 32), d.bits8(24, 32)))
def fp8_sums_seen_through_a_view(x_q, w_q):
    numbers = (((2,), (1,)), ((), ()))
    return lax.dot_general(x_q, w_q, numbers, preferred_element_type=E4M3).swapaxes(0, 1)


@program(weight(x=F32))
def fp8_sums_of_dequantised_values(x, q, s):
    return lax.dot(x, q.astype(F32) * s, preferred_element_type=E4M3)


def _fp8_sums_again(dot: Callable[..., Any]) -> Callable[..., Any]:
    def f(x_q, w_q, q, s):
        y = dot(x_q, w_q)
        return y.astype(F32) @ (q.astype(F32) * s), jnp.max(jnp.abs(y)).astype(F32)

    return f


def _rounded_once(x_q: Any, w_q: Any) -> Any:
    """Where XLA on the CPU rounds to float16 first."""
    return lax.dot(x_q, w_q, preferred_element_type=F32).astype(E4M3)


@program(
    lambda d: (d.bits8(5, 32), d.bits8(32, 24), d.bits8(24, 7), d.scale(7)),
    calls=2,
    plain=_fp8_sums_again(_rounded_once),
)
def fp8_sums_multiplied_again(x_q, w_q, q, s):
    return _fp8_sums_again(lax.dot)(x_q, w_q, q, s)


@program(lambda d: (d.normal(2, 3, 32), d.bits8(32, 24), d.scale(24), d.normal(24)))
def bias_through_a_reshape(x, q, s, b):
    y = x.reshape(6, 32) @ (q.astype(F32) * s)
    return jax.nn.relu(y.reshape(2, 3, 24) + b)


@program(lambda d: (d.normal(2, 3, 32), d.bits8(32, 24), d.scale(24), d.normal(3, 2, 24)))
def residual_through_a_transpose(x, q, s, r):
    return jnp.transpose(x @ (q.astype(F32) * s), (1, 0, 2)) + r


# Zeros put over values by a mask that is data


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(), d.normal(32, 24) > 0))
def elements_masked_under_one_scale(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3), d.normal(32, 24) > 0))
def elements_masked_in_blocks(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * jnp.repeat(jnp.repeat(s, 8, 0), 8, 1), 0)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(32, 1), d.normal(32, 24) > 0))
def elements_masked_under_scales_along_k(x, q, s, keep):
    return jax.nn.relu(x @ jnp.where(keep, q.astype(F32) * s, 0) + 1.0)


# vmap over scales of one 8-bit array, which is copied for each as bytes


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(3, 24)))
def vmap_over_a_scale_alone(x, q, s):
    return jax.vmap(lambda s: x @ (q.astype(F32) * s))(s)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(3)))
def vmap_over_a_divisor_alone(x, q, s):
    return jax.vmap(lambda s: x @ (q.astype(F32) / s), out_axes=1)(s)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(3, 32, 1)))
def vmap_over_a_scale_along_k_alone(x, q, s):
    return jax.vmap(lambda s: (q.astype(F32) * s).T @ x.T)(s)


@program(lambda d: (d.normal(3, 5, 32), d.bits8(32, 24), d.scale(3, 4, 3)))
def vmap_over_rows_and_scales_of_blocks(x, q, s):
    def f(x, s):
        return x @ (q.astype(F32) * jnp.repeat(jnp.repeat(s, 8, 0), 8, 1))

    return jax.vmap(f)(x, s)


@program(
    lambda d: (
        d.normal(5, 32),
        d.bits8(32, 24, dtype=jnp.int8),
        d.bits8(2, 24, dtype=jnp.int8),
        d.scale(3, 24),
    )
)
def vmap_over_a_zero_point_and_over_a_scale(x, q, z, s):
    def f(z, s):
        return x @ ((q.astype(jnp.int32) - z.astype(jnp.int32)).astype(F32) * s)

    return jax.vmap(jax.vmap(f, (None, 0)), (0, None))(z, s)


# Sharing


@program(weight(x=F32))
def product_used_twice(x, q, s):
    y = x @ (q.astype(F32) * s)
    return jax.nn.relu(y), jnp.sum(y)


@program(weight(x=F32), calls=2)
def weight_used_twice(x, q, s):
    w = q.astype(F32) * s
    return jnp.tanh(x @ w) @ w.T


@program(weight(x=F32))
def weight_also_returned(x, q, s):
    w = q.astype(F32) * s
    return x @ w, w


@program(lambda d: (jnp.asarray([3, 1, 2]), d.bits8(40, 32), d.scale(40, 1)))
def tied_embedding(ids, q, s):
    table = q.astype(F32) * s
    return jnp.tanh(table[ids]) @ table.T


@program(lambda d: (*weight(x=F32)(d), d.bits8(32, 24), d.scale(24)), calls=2)
def gated(x, q, s, q2, s2):
    return jax.nn.silu(x @ (q.astype(F32) * s)) * (x @ (q2.astype(F32) * s2))


@program(lambda d: (*weight(x=F32)(d), d.bits8(32, 24), d.scale(24)), calls=2)
def sum_of_two_products(x, q, s, q2, s2):
    return x @ (q.astype(F32) * s) + x @ (q2.astype(F32) * s2)


@program(lambda d: (*weight(x=F32)(d), d.bits8(24, 7)), calls=2)
def fp8_chain(x, q, s, q2):
    y = jnp.clip(jax.nn.relu(x @ (q.astype(F32) * s)), -448.0, 448.0).astype(E4M3)
    return y.astype(BF16) @ q2.astype(BF16)


# Structure


@program(weight(x=F32))
def inside_jit(x, q, s):
    return jax.jit(lambda x, w: x @ w)(x, q.astype(F32) * s)


@program(weight(x=F32))
def dequantised_inside_jit(x, q, s):
    w = jax.jit(lambda q, s: q.astype(F32) * s)(q, s)
    return x @ w


@program(weight(x=F32))
def inside_custom_jvp(x, q, s):
    @jax.custom_jvp
    def f(x, q, s):
        return x @ (q.astype(F32) * s)

    f.defjvp(lambda p, t: (f(*p), t[0] @ p[1].astype(F32)))
    return f(x, q, s)


# Control flow


def _stack(d: Data) -> tuple[Any, ...]:
    return d.normal(5, 32), d.bits8(3, 32, 32), d.scale(3, 32) * 0.2


@program(_stack)
def scan_dequantised_inside(x, qs, ss):
    def layer(x, w):
        q, s = w
        return jax.nn.relu(x @ (q.astype(F32) * s)), None

    return lax.scan(layer, x, (qs, ss))[0]


@program(_stack)
def scan_dequantised_outside(x, qs, ss):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, qs.astype(F32) * ss[:, None])[0]


@program(_stack)
def scan_with_one_scale_for_all_layers(x, qs, ss):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), x[0]), x, qs.astype(F32) * 0.1)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 32), d.scale(32)))
def scan_over_a_constant_weight(x, q, s):
    w = q.astype(F32) * s
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


@program(lambda d: (d.normal(5, 32), d.bits8(32, 32), d.scale(32)))
def scan_that_carries_its_weight(x, q, s):
    def body(state, _):
        x, w = state
        return (jnp.tanh(x @ w), w), None

    return lax.scan(body, (x, q.astype(F32) * s), None, length=3)[0][0]


@program(lambda d: (d.normal(5, 32), d.bits8(32, 32), d.scale(32)))
def fori_loop(x, q, s):
    w = q.astype(F32) * s
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) + i, x)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 32), d.scale(32)))
def while_loop(x, q, s):
    w = q.astype(F32) * s * 0.01
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.1, lambda x: x @ w, x)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24), jnp.asarray(True)))
def one_branch_of_a_cond(x, q, s, p):
    w = q.astype(F32) * s
    return lax.cond(p, lambda x: x @ w, lambda x: x[:, :24], x)


@program(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), d.bits8(32, 24), d.scale(24), jnp.int32(1)),
    calls=2,
)
def switch_between_weights(x, q1, q2, s, i):
    w1, w2 = q1.astype(F32) * s, q2.astype(F32) * s
    return lax.switch(i, [lambda x: x @ w1, lambda x: x @ w2, lambda x: x[:, :24]], x)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def rematerialised(x, q, s):
    return jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w))(x, q.astype(F32) * s)


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)))
def jit_that_donates(x, q, s):
    return jax.jit(lambda x, q, s: x @ (q.astype(F32) * s), donate_argnums=())(x, q, s)


def _mesh() -> Any:
    kind = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), ("model",), axis_types=kind, devices=jax.devices()[:2])


@program(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)),
    plain=lambda x, q, s: jax.nn.relu(x @ (q.astype(F32) * s)),
)
def shard_map_over_columns(x, q, s):
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda x, w: jax.nn.relu(x @ w),
        mesh=_mesh(),
        in_specs=(spec(), spec(None, "model")),
        out_specs=spec(None, "model"),
    )
    return mapped(x, q.astype(F32) * s)


@program(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24)),
    plain=lambda x, q, s: x @ (q.astype(F32) * s),
)
def shard_map_over_rows_with_a_sum(x, q, s):
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda x, q, s: lax.psum(x @ (q.astype(F32) * s), "model"),
        mesh=_mesh(),
        in_specs=(spec(None, "model"), spec("model"), spec()),
        out_specs=spec(),
    )
    return mapped(x, q, s)
