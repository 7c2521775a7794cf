"""What follows a dot: bias, residual, activation, amax, and outputs in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rewrite.programs.table import Table, weight
from rewrite.support import BF16, E4M3, E5M2, F32, Data

TABLE = Table()
program = TABLE.add

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
    return x @ (q.astype(F32) * s) - b


@program(_bias)
def subtracted_from_a_bias(x, q, s, b):
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


@program(lambda d: (*weight(x=F32)(d), d.normal(5, 24)))
def residual_subtracted(x, q, s, r):
    return x @ (q.astype(F32) * s) - r


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
def fp8_sums_of_dequantized_values(x, q, s):
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
