"""Values that several operations read, functions inside functions, and control flow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rewrite.programs.table import Table, weight
from rewrite.support import BF16, E4M3, F32, Data

TABLE = Table()
program = TABLE.add

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
def dequantized_inside_jit(x, q, s):
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
def scan_dequantized_inside(x, qs, ss):
    def layer(x, w):
        q, s = w
        return jax.nn.relu(x @ (q.astype(F32) * s)), None

    return lax.scan(layer, x, (qs, ss))[0]


@program(_stack)
def scan_dequantized_outside(x, qs, ss):
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
