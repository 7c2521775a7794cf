"""Views between dequantizing and the dot, masks, dimension numbers, and vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rewrite.programs.table import Table, weight
from rewrite.support import BF16, F32

TABLE = Table()
program = TABLE.add

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


@program(lambda d: (d.normal(5, 24), d.bits8(24, 24), d.scale(6, 24), d.scale(4, 24)))
def groups_of_4_and_of_6_along_k(x, q, s, t):
    return x @ (q.astype(F32) * jnp.repeat(s, 4, 0) * jnp.repeat(t, 6, 0))


@program(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(3, 4)))
def transposed_blocks_by_index(x, q, s):
    k, n = np.arange(32) // 8, np.arange(24) // 8
    return x @ (q.astype(F32) * s[n[None, :], k[:, None]])


@program(lambda d: (d.normal(5, 32), d.bits8(32, 4, 6), d.scale(4, 6)))
def free_axes_exchanged(x, q, s):
    return jnp.tensordot(x, jnp.transpose(q.astype(F32) * s, (0, 2, 1)), 1)


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
