"""Programs that look like what a kernel computes, and mean something else in part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rewrite.programs import weight
from rewrite.support import BF16, E4M3, E5M2, F16, F32, Data


@dataclasses.dataclass(frozen=True)
class Lookalike:
    """A function whose rewrite must compute what it computes.

    Attributes:
      calls: how many scaled dots it becomes.
      without: steps that the calls must not hold, in the words of the report.
    """

    name: str
    fun: Callable[..., Any]
    make: Callable[[Data], tuple[Any, ...]]
    calls: int
    without: tuple[str, ...]

    def args(self) -> tuple[Any, ...]:
        return self.make(Data())


LOOKALIKES: list[Lookalike] = []


def lookalike(
    make: Callable[[Data], tuple[Any, ...]], calls: int = 1, without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Register a function under its own name."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        LOOKALIKES.append(Lookalike(fun.__name__, fun, make, calls, without))
        return fun

    return register


wide = weight(x=F32, scale="")
_ALL = ("relu", "silu", "gelu_tanh", "gelu_erf")


def product(x: Any, q: Any) -> Any:
    return x @ (q.astype(F32) * 0.25)


# Steps that a kernel would take in another order


@lookalike(wide, without=("-> float8_e4m3fn",))
def relu6_before_an_fp8_output(x, q, s):
    return jnp.clip(jnp.clip(100 * product(x, q), 0, 6), -448, 448).astype(E4M3)


@lookalike(wide, without=("-> int8",))
def clip_before_round_and_clip(x, q, s):
    return jnp.clip(jnp.round(jnp.clip(product(x, q), -3, 3)), -128, 127).astype(jnp.int8)


@lookalike(wide, without=("-> int8",))
def minimum_before_an_int8_output(x, q, s):
    return jnp.clip(jnp.round(jnp.minimum(9 * product(x, q), 6)), -128, 127).astype(jnp.int8)


@lookalike(wide, without=("-> uint8",))
def relu6_before_a_uint8_output(x, q, s):
    y = jax.nn.relu6(9 * product(x, q))
    return jnp.clip(jnp.round(y), 0, 255).astype(jnp.uint8)


@lookalike(wide, without=("-> uint8",))
def relu_scaled_by_a_negative_number_before_a_uint8_output(x, q, s):
    y = jax.nn.relu(product(x, q)) * -s
    return jnp.maximum(jnp.minimum(jnp.round(y), 255), -7).astype(jnp.int32)


@lookalike(wide, without=("silu",))
def activation_after_round(x, q, s):
    return jax.nn.silu(jnp.round(product(x, q))).astype(jnp.int8)


@lookalike(wide, without=("silu",))
def activation_after_clip(x, q, s):
    return jax.nn.silu(jnp.clip(product(x, q), -1, 1))


@lookalike(wide, without=("bias", "-> int8"))
def number_added_after_round(x, q, s):
    return (jnp.round(product(x, q)) + 0.5).astype(jnp.int8)


@lookalike(lambda d: (*wide(d), d.normal(24)), without=("bias", "-> int8"))
def bias_added_after_round(x, q, s, b):
    return (jnp.round(product(x, q)) + b).astype(jnp.int8)


@lookalike(lambda d: (*wide(d), d.normal(5, 24)), without=("residual", "-> int8"))
def residual_added_after_round(x, q, s, r):
    return (jnp.round(product(x, q)) + r).astype(jnp.int8)


@lookalike(lambda d: (*wide(d), d.normal(24)), without=("bias",))
def bias_after_the_activation(x, q, s, b):
    return jax.nn.relu(product(x, q)) + b


@lookalike(lambda d: (d.bits8(5, 32, dtype=jnp.int8), d.bits8(32, 24, dtype=jnp.int8)))
def integers_added_to_an_int32_product(a, b):
    acc = jnp.dot(a, b, preferred_element_type=jnp.int32)
    return acc * 1000 - 100 * jnp.sum(b.astype(jnp.int32), 0)


@lookalike(lambda d: (d.bits8(5, 32, dtype=jnp.int8), d.bits8(32, 24, dtype=jnp.int8)))
def int32_bias_beyond_the_exactness_of_float32(a, b):
    acc = jnp.dot(a, b, preferred_element_type=jnp.int32)
    big = jnp.full((24,), 2**30 + 1, jnp.int32)
    return (acc + big - big).astype(F32) * 0.5


# What looks like an activation


@lookalike(wide, without=_ALL)
def activation_of_an_fp8_round_trip(x, q, s):
    return jax.nn.silu(product(x, q).astype(E5M2).astype(F32))


@lookalike(wide, without=_ALL)
def activation_of_an_fp4_round_trip(x, q, s):
    return jax.nn.relu(product(x, q).astype(jnp.float4_e2m1fn).astype(F32))


@lookalike(wide, without=_ALL)
def activation_of_values_that_overflow_float16(x, q, s):
    return jax.nn.relu((1e4 * product(x, q)).astype(F16).astype(F32))


@lookalike(wide, without=_ALL)
def float16_round_trip_alone(x, q, s):
    return (1e4 * product(x, q)).astype(F16).astype(F32)


@lookalike(wide, without=_ALL)
def maximum_in_fp8(x, q, s):
    return jnp.maximum(product(x, q).astype(E4M3), 0).astype(F32)


@lookalike(wide, without=_ALL)
def maximum_with_a_small_number(x, q, s):
    return jnp.maximum(product(x, q) * 1e-14, 1e-13) * 1e13


@lookalike(wide, without=_ALL)
def relu_with_a_small_offset_inside(x, q, s):
    y = jnp.tanh(product(x * 1e-14, q))
    return jnp.maximum(y + 1e-13, 0)


@lookalike(wide, without=_ALL)
def steep_swish(x, q, s):
    y = product(x * 1e-8, q)
    return y * jax.nn.sigmoid(1e8 * y)


@lookalike(wide, without=_ALL)
def relu_with_a_second_kink_far_out(x, q, s):
    y = 1e7 * product(x, q)
    return jnp.maximum(jnp.maximum(y, 0), 3 * y - 1e7)


@lookalike(wide, without=_ALL)
def silu_that_is_nan_for_large_values(x, q, s):
    y = 100 * product(x, q)
    return y * jnp.exp(y) / (1 + jnp.exp(y))


# Zeros over scales that are not finite


def _one_scale(bad: float) -> Callable[[Data], tuple[Any, ...]]:
    return lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24).at[3].set(bad))


@lookalike(_one_scale(0.0))
def zero_scale_selected_away(x, q, s):
    return x @ jnp.where(s == 0, 0, q.astype(F32) / s)


@lookalike(_one_scale(np.inf))
def infinite_scale_selected_away_by_column(x, q, s):
    return x @ jnp.where(jnp.isinf(s)[None], 0.0, q.astype(F32) * s)


@lookalike(lambda d: (*_one_scale(np.inf)(d), jnp.ones((32, 24), bool).at[:, 3].set(False)))
def infinite_scale_under_a_mask_of_elements(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@lookalike(_one_scale(np.inf))
def rows_masked_to_the_last(x, q, s):
    return x @ jnp.where((jnp.arange(32) > 40)[:, None], q.astype(F32) * s, 0)


@lookalike(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24).at[-1].set(np.nan)))
def columns_padded_beside_a_nan_scale(x, q, s):
    return x @ jnp.pad(q.astype(F32) * s, ((0, 0), (0, 4)))


@lookalike(lambda d: (d.normal(5, 36), d.bits8(32, 24), d.scale(24).at[-1].set(np.nan)))
def both_axes_padded_and_transposed(x, q, s):
    return x @ jnp.pad((q.astype(F32) * s).T, ((2, 4), (0, 4))).T


@lookalike(lambda d: (d.normal(5, 32), d.bits8(32, 24), jnp.asarray(np.nan)))
def columns_masked_under_one_nan_scale(x, q, s):
    return x @ jnp.where(jnp.arange(24) > 3, q.astype(F32) * s, 0)


@lookalike(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3).at[0, 2].set(np.inf)))
def columns_padded_within_an_infinite_block(x, q, s):
    scale = jnp.repeat(jnp.repeat(s, 8, 0), 8, 1)[:, :22]
    return x @ jnp.pad(q[:, :22].astype(F32) * scale, ((0, 0), (0, 2)))


_KEEP = (np.arange(32)[:, None] + np.arange(24) < 40) & (np.arange(24) > 3)


def _under_elements(*shape: int, bad: float, at: tuple[int, ...] = ()) -> Any:
    """Arguments x, q, a scale of a shape with one entry that is not finite, and a mask."""
    return lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(*shape).at[at].set(bad), _KEEP)


@lookalike(_under_elements(bad=np.nan))
def elements_masked_under_one_nan_scale(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@lookalike(_under_elements(32, 1, bad=np.inf, at=(30, 0)))
def elements_masked_in_a_row_of_infinite_scale(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@lookalike(_under_elements(4, 3, bad=-np.inf, at=(3, 2)))
def elements_masked_in_an_infinite_block(x, q, s, keep):
    scale = jnp.repeat(jnp.repeat(s, 8, 0), 8, 1)
    return x @ jnp.where(keep, q.astype(F32) * scale, 0)


@lookalike(_under_elements(bad=np.inf))
def batch_elements_masked_under_one_infinite_scale(x, q, s, keep):
    w = jnp.where(keep.reshape(4, 8, 24), q.astype(F32).reshape(4, 8, 24) * s, 0)
    return jnp.einsum("mbk,bkn->bmn", x.reshape(5, 4, 8), w)


@lookalike(_under_elements(4, 1, bad=np.inf, at=(2, 0)))
def rows_of_zeros_in_turn_with_masked_elements(x, q, s, keep):
    w = jnp.where(keep, q.astype(F32) * jnp.repeat(s, 8, 0), 0)
    return x @ jnp.pad(jnp.where((jnp.arange(32) < 30)[:, None], w, 0), ((0, 0), (2, 1)))


@lookalike(wide)
def columns_masked_under_a_number(x, q, s):
    return x @ jnp.where(jnp.arange(24) > 3, q.astype(F32) * 0.1, 0)


# Zero points that do not fit


def _zero(z: Any) -> Callable[[Data], tuple[Any, ...]]:
    return lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=jnp.int8), z)


@lookalike(_zero(0), calls=0)
def zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - 3e9)) * 1e-9


@lookalike(_zero(jnp.full(24, 3e9)), calls=0)
def whole_float_zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - jnp.floor(z))) * 1e-9


@lookalike(_zero(jnp.full(24, np.nan)), calls=0)
def rounded_zero_point_that_is_nan(x, q, z):
    return x @ (q.astype(F32) - jnp.round(z))


@lookalike(_zero(jnp.full(24, 2**32 - 1, jnp.uint32)))
def unsigned_zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - z.astype(F32))) * 1e-9


@lookalike(_zero(jnp.int32(2**31 - 1)))
def int32_zero_point_that_wraps(x, q, z):
    return (x @ (q.astype(jnp.int32) - z).astype(F32)) * 1e-9


# Views that stretch or join


@lookalike(wide)
def stretched_8_bit_output_beside_a_dot(x, q, s):
    return product(x, q), jnp.broadcast_to(q[0], (5, 24)).astype(F32)


@lookalike(wide)
def rows_repeated_after_dequantizing(x, q, s):
    return x @ jnp.repeat(q[:16].astype(F32) * 0.1, 2, axis=0)


@lookalike(wide)
def pieces_joined_whose_scales_have_two_dtypes(x, q, s):
    def scale(dtype):
        return jnp.broadcast_to(jnp.arange(24.0).astype(dtype)[None], (16, 24)).astype(F32)

    top, bottom = q[:16].astype(F32) * scale(BF16), q[16:].astype(F32) * scale(F16)
    return x @ jnp.concatenate([top, bottom], 0)


# An amax that what follows needs


@lookalike(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24), d.bits8(24, 7)), calls=2)
def requantized_by_its_own_amax(x, q, s, q2):
    y = x @ (q.astype(F32) * s)
    scale = jnp.max(jnp.abs(y), axis=1, keepdims=True) / 448
    y8 = jnp.clip(y / scale, -448, 448).astype(E4M3)
    return (y8.astype(F32) @ q2.astype(F32)) * scale
