"""The programs of the table in other hands: other spellings of scales, blocks and views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rewrite.programs import Program
from rewrite.support import BF16, E4M3, E5M2, F32, Data

Make = Callable[[Data], tuple[Any, ...]]
STYLES: list[Program] = []
INT8, UINT8, INT32 = jnp.int8, jnp.uint8, jnp.int32
ROWS, COLUMNS = np.arange(32) // 8, np.arange(24) // 8


def styles(
    make: Make,
    calls: int = 1,
    plain: Callable[..., Any] | None = None,
    floor: float = 1e-7,
    **functions: Callable[..., Any],
) -> None:
    """Register functions of the same arguments, by name."""
    for name, fun in functions.items():
        STYLES.append(Program(name, fun, make, calls, plain, floor))


def deq(q: Any, s: Any, dtype: Any = F32) -> Any:
    return q.astype(dtype) * s.astype(dtype)


def by_column(d: Data) -> tuple[Any, ...]:
    return d.normal(5, 32), d.bits8(32, 24), d.scale(24)


def in_blocks(d: Data) -> tuple[Any, ...]:
    return d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3)


def integers(dtype: Any, zero: Any) -> Make:
    """Arguments x, q, a scale by column, and a zero point."""
    return lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=dtype), d.scale(24), zero(d))


# Scales

styles(
    by_column,
    reciprocal_scale=lambda x, q, s: x @ (q.astype(F32) * jnp.reciprocal(s)),
    one_over_scale=lambda x, q, s: x @ (q.astype(F32) * (1.0 / s)),
    scale_to_a_power=lambda x, q, s: x @ (q.astype(F32) * s**-1),
    scale_computed_first=lambda x, q, s: x @ (q.astype(F32) * jnp.sqrt(jax.nn.softplus(s))),
    scale_bounded_from_below=lambda x, q, s: x @ (q.astype(F32) * jnp.maximum(s, 1e-6)),
    numpy_multiply=lambda x, q, s: jnp.matmul(x, jnp.multiply(q.astype(F32), s)),
    scale_in_the_einsum=lambda x, q, s: jnp.einsum("bd,df,f->bf", x, q.astype(F32), s),
    scale_first_in_the_einsum=lambda x, q, s: jnp.einsum("f,bd,df->bf", s, x, q.astype(F32)),
    einsum_without_an_arrow=lambda x, q, s: jnp.einsum("bd,df", x, q.astype(F32) * s),
    einsum_transposed=lambda x, q, s: jnp.einsum("bd,df->fb", x, q.astype(F32) * s),
    tensordot=lambda x, q, s: jnp.tensordot(x, q.astype(F32) * s, axes=1),
    weight_on_the_left=lambda x, q, s: (q.astype(F32) * s).T @ x.T,
    fp8_scales=lambda x, q, s: x @ deq(q, s.astype(E5M2)),
    vmap_of_rows=lambda x, q, s: jax.vmap(lambda row: row @ deq(q, s))(x),
    vmap_of_columns=lambda x, q, s: jax.vmap(
        lambda c, t: x @ (c.astype(F32) * t), in_axes=(1, 0), out_axes=1
    )(q, s),
    named_weight=lambda x, q, s: x @ checkpoint_name(deq(q, s), "w"),
)
styles(
    by_column,
    plain=lambda x, q, s: x @ deq(q, s),
    rounded_to_bfloat16=lambda x, q, s: x @ lax.reduce_precision(q.astype(F32) * s, 8, 7),
)
styles(
    by_column,
    floor=1e-5,
    product_used_by_softmax=lambda x, q, s: jax.nn.softmax(x @ deq(q, s)),
)


def _by_exponent(x: Any, q: Any, e: Any) -> Any:
    return x @ (q.astype(F32) * jnp.exp2(e.astype(F32) - 127))


def _by_exponent_bits(x: Any, q: Any, e: Any) -> Any:
    return x @ (q.astype(F32) * lax.bitcast_convert_type(e.astype(INT32) << 23, F32))


styles(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), jnp.arange(115, 139, dtype=UINT8)),
    plain=_by_exponent,
    exponent_as_scale=_by_exponent,
    exponent_bits_as_scale=_by_exponent_bits,
)

# Blocks

styles(
    in_blocks,
    blocks_by_kron=lambda x, q, s: x @ (q.astype(F32) * jnp.kron(s, jnp.ones((8, 8)))),
    blocks_by_broadcast=lambda x, q, s: (
        x @ deq(q, jnp.broadcast_to(s[:, None, :, None], (4, 8, 3, 8)).reshape(32, 24))
    ),
    blocks_by_index=lambda x, q, s: x @ deq(q, s[jnp.arange(32) // 8][:, jnp.arange(24) // 8]),
    blocks_by_numpy_index=lambda x, q, s: x @ deq(q, s[ROWS][:, COLUMNS]),
    blocks_by_one_index=lambda x, q, s: x @ deq(q, s[np.ix_(ROWS, COLUMNS)]),
    blocks_by_take=lambda x, q, s: x @ deq(q, jnp.take(jnp.take(s, ROWS, 0), COLUMNS, 1)),
    blocks_by_repeat_of_known_length=lambda x, q, s: (
        x
        @ deq(
            q,
            jnp.repeat(jnp.repeat(s, 8, 0, total_repeat_length=32), 8, 1, total_repeat_length=24),
        )
    ),
)
styles(
    lambda d: (d.normal(5, 30), d.bits8(30, 23), d.scale(4, 3)),
    partial_blocks_by_index=lambda x, q, s: x @ deq(q, s[ROWS[:30]][:, COLUMNS[:23]]),
    partial_blocks_by_padding=lambda x, q, s: (
        x
        @ deq(jnp.pad(q, ((0, 2), (0, 1))).reshape(4, 8, 3, 8), s[:, None, :, None]).reshape(
            32, 24
        )[:30, :23]
    ),
)
styles(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 24)),
    groups_as_an_axis_of_the_einsum=lambda x, q, s: jnp.einsum(
        "bgk,gkn->bn", x.reshape(5, 4, 8), deq(q.reshape(4, 8, 24), s[:, None])
    ),
    groups_scaled_after=lambda x, q, s: jnp.einsum(
        "gbn,gn->bn",
        jnp.einsum("bgk,gkn->gbn", x.reshape(5, 4, 8), q.reshape(4, 8, 24).astype(F32)),
        s,
    ),
)
styles(
    lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 24)),
    calls=4,
    loop_over_groups=lambda x, q, s: sum(
        x[:, 8 * i : 8 * i + 8] @ deq(q[8 * i : 8 * i + 8], s[i]) for i in range(4)
    ),
)

# Zero points


def shift_in_int32(x: Any, q: Any, s: Any, z: Any) -> Any:
    return x @ ((q.astype(INT32) - z).astype(F32) * s)


def shift_in_float(x: Any, q: Any, s: Any, z: Any) -> Any:
    return x @ ((q.astype(F32) - z.astype(F32)) * s)


for _name, _zero in {
    "int32": lambda d: jnp.arange(-12, 12, dtype=INT32),
    "one_int32": lambda d: jnp.int32(7),
    "int8": lambda d: d.bits8(1, 24, dtype=INT8),
}.items():
    styles(
        integers(INT8, _zero),
        **{
            f"zero_point_of_{_name}_in_int32": shift_in_int32,
            f"zero_point_of_{_name}_in_float": shift_in_float,
        },
    )
styles(
    integers(UINT8, lambda d: d.normal(24)),
    zero_point_computed_in_float=lambda x, q, s, m: (
        x @ ((q.astype(F32) - jnp.clip(jnp.round(m / s), 0, 255)) * s)
    ),
    zero_point_computed_and_converted=lambda x, q, s, m: (
        x @ ((q.astype(INT32) - jnp.clip(m / s, 0, 255).astype(INT32)).astype(F32) * s)
    ),
)
styles(
    integers(UINT8, lambda d: jnp.arange(24, dtype=INT32) * 77),
    zero_point_of_four_bits=lambda x, q, s, z: (
        x @ ((q.astype(INT32) - ((z >> 2) & 0xF)).astype(F32) * s)
    ),
    unsigned_as_signed_by_a_flipped_bit=lambda x, q, s, z: (
        x @ deq(lax.bitcast_convert_type(q ^ np.uint8(0x80), INT8), s)
    ),
)
styles(
    lambda d: (
        d.normal(5, 32),
        d.bits8(32, 24, dtype=UINT8),
        d.bits8(4, 24, dtype=UINT8),
        d.scale(4, 24),
    ),
    zero_points_by_group=lambda x, q, z, s: (
        x
        @ ((q.astype(F32).reshape(4, 8, 24) - z[:, None].astype(F32)) * s[:, None]).reshape(32, 24)
    ),
)


# Integers through and through


def _qlinear(d: Data) -> tuple[Any, ...]:
    return (d.bits8(5, 32, dtype=UINT8), d.bits8(32, 24, dtype=INT8), d.scale(24) * 0.01)


styles(
    _qlinear,
    qlinear_matmul=lambda a, b, s: jnp.clip(
        jnp.round(((a.astype(INT32) - 120) @ (b.astype(INT32) - 3)) * s) + 5, -128, 127
    ).astype(INT8),
    qgemm_with_a_bias_in_int32=lambda a, b, s: jnp.clip(
        jnp.round((jnp.dot(a, b, preferred_element_type=INT32) + jnp.arange(24)) * s), -128, 127
    ).astype(INT8),
    integers_multiplied_in_int16=lambda a, b, s: (
        jnp.dot(a.astype(jnp.int16), b.astype(jnp.int16), preferred_element_type=INT32) * s
    ),
    integers_summed_in_float=lambda a, b, s: jnp.dot(a, b, preferred_element_type=F32) * s,
)


def _int8_by_token(x: Any, q: Any, s: Any) -> Any:
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    x8 = jnp.round(x / scale).astype(INT8)
    q8 = lax.bitcast_convert_type(q, INT8)
    return jnp.dot(x8, q8, preferred_element_type=INT32) * scale * s


def _fp8_by_token_before(x: Any, q: Any, s: Any) -> Any:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), 1e-12) / 448
    return ((x / scale).astype(E4M3).astype(F32) * scale) @ deq(q, s)


def _fp8_by_token_after(x: Any, q: Any, s: Any) -> Any:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), 1e-12) / 448
    x8 = jnp.clip(x / scale, -448, 448).astype(E4M3)
    return jnp.dot(x8, q, preferred_element_type=BF16) * scale.astype(BF16) * s.astype(BF16)


styles(
    by_column,
    int8_by_token=_int8_by_token,
    fp8_by_token_scaled_before=_fp8_by_token_before,
    fp8_by_token_scaled_after=_fp8_by_token_after,
)

# Views


def _experts(d: Data) -> tuple[Any, ...]:
    ids = jnp.asarray([0, 3, 1, 2, 0])
    return d.normal(5, 32), d.bits8(4, 32, 24), d.scale(4, 1, 24), ids


styles(
    _experts,
    experts_taken=lambda x, q, s, i: jnp.einsum("bd,bdf->bf", x, jnp.take(deq(q, s), i, axis=0)),
    expert_taken=lambda x, q, s, i: x @ jnp.take(deq(q, s), i[1], axis=0),
    expert_taken_before=lambda x, q, s, i: x @ deq(jnp.take(q, i[1], 0), jnp.take(s, i[1], 0)),
    columns_taken=lambda x, q, s, i: x @ jnp.take(deq(q, s)[0], i, axis=1),
    every_expert=lambda x, q, s, i: jnp.einsum("bd,edf->bef", x, deq(q, s)),
    experts_summed=lambda x, q, s, i: jnp.einsum(
        "te,td,edf->tf", jax.nn.softmax(x[:, :4]), x, deq(q, s)
    ),
)


def _two(d: Data) -> tuple[Any, ...]:
    return d.normal(5, 32), jnp.asarray(True), d.bits8(32, 24), d.bits8(32, 24), d.scale(24)


styles(
    _two,
    one_of_two_weights=lambda x, p, a, b, s: x @ jnp.where(p, deq(a, s), deq(b, 2 * s)),
    one_of_two_before_scaling=lambda x, p, a, b, s: (
        x @ (jnp.where(p, a.astype(F32), b.astype(F32)) * s)
    ),
    columns_of_two_weights=lambda x, p, a, b, s: (
        x @ jnp.where(jnp.arange(24) > 9, deq(a, s), deq(b, 2 * s))
    ),
    weight_from_a_cond=lambda x, p, a, b, s: (
        x @ lax.cond(p, lambda: deq(a, s), lambda: b.astype(F32) * 2.0)
    ),
    weight_from_a_switch=lambda x, p, a, b, s: (
        x @ lax.switch(p.astype(INT32) + 1, [lambda: deq(a, s), lambda: deq(b, s)] * 2)
    ),
    weight_from_a_remat=lambda x, p, a, b, s: x @ jax.checkpoint(deq)(a, s),
    dropout_of_the_weight=lambda x, p, a, b, s: (
        x @ jnp.where(jnp.arange(768).reshape(32, 24) % 3 > 0, deq(a, s) / 0.9, 0.0)
    ),
    weights_stacked=lambda x, p, a, b, s: jnp.einsum(
        "bd,edf->bef", x, jnp.stack([deq(a, s), deq(b, s)])
    ),
)


def _stack(d: Data) -> tuple[Any, ...]:
    return d.normal(5, 32), d.bits8(3, 32, 32), d.scale(3, 32) * 0.2


def _dequantized_by_a_scan(x: Any, q: Any, s: Any) -> Any:
    stack = lax.scan(lambda c, w: (c, deq(*w)), 0, (q, s))[1]
    return jnp.einsum("bd,ldf->lbf", x, stack)


styles(
    _stack,
    weights_from_a_scan=_dequantized_by_a_scan,
    scan_over_layer_numbers=lambda x, q, s: lax.scan(
        lambda x, i: (jnp.tanh(x @ deq(q[i], s[i])), None), x, jnp.arange(3)
    )[0],
    loop_over_a_dequantized_stack=lambda x, q, s: (
        lambda stack: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ stack[i]), x)
    )(deq(q, s[:, None])),
    map_over_a_stack=lambda x, q, s: lax.map(lambda w: x @ deq(*w), (q, s)),
)

styles(
    _stack,
    calls=3,
    layers_unstacked=lambda x, q, s: sum(x @ w for w in jnp.unstack(deq(q, s[:, None]))),
)

# Derivatives


def _sine(x: Any, q: Any, s: Any) -> Any:
    return jnp.sum(jnp.sin(x @ deq(q, s)))


def _layers(x: Any, q: Any, s: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ deq(*w)), None), x, (q, s))[0])


styles(
    by_column,
    calls=2,
    floor=1e-5,
    value_and_gradient=jax.value_and_grad(_sine),
    gradient_for_each_row=jax.vmap(jax.grad(_sine), (0, None, None)),
    gradient_of_a_remat=jax.grad(jax.checkpoint(_sine)),
    linearised=lambda x, q, s: jax.linearize(lambda x: _sine(x, q, s), x)[1](x),
)
styles(
    by_column,
    calls=3,
    floor=1e-5,
    hessian_times_vector=lambda x, q, s: jax.jvp(jax.grad(lambda x: _sine(x, q, s)), (x,), (x,))[1],
)
styles(_stack, calls=2, floor=1e-5, gradient_of_a_scan=jax.grad(_layers))


# Straight-through estimators


def _fake(w: Any) -> Any:
    scale = jnp.max(jnp.abs(w), 0, keepdims=True) / 448
    return jnp.clip(w / scale, -448, 448).astype(E4M3).astype(F32) * scale


styles(
    lambda d: (d.normal(5, 32), d.normal(32, 24)),
    floor=1e-2,
    straight_through=lambda x, w: x @ (w + lax.stop_gradient(_fake(w) - w)),
    straight_through_by_difference=lambda x, w: (
        x @ (lax.stop_gradient(_fake(w)) + (w - lax.stop_gradient(w)))
    ),
)

# Devices


def _over(fun: Any, *specs: Any) -> Any:
    """The function on two devices, inputs and output sharded as told."""
    kind = (jax.sharding.AxisType.Auto,)

    def mapped(*args: Any) -> Any:
        mesh = jax.make_mesh((2,), ("m",), axis_types=kind, devices=jax.devices()[:2])
        *ins, out = (jax.P(*spec) for spec in specs)
        return jax.shard_map(fun, mesh=mesh, in_specs=tuple(ins), out_specs=out)(*args)

    return mapped


def _plain(x: Any, q: Any, s: Any) -> Any:
    return x @ deq(q, s)


def _next(x: Any) -> Any:
    return lax.ppermute(x, "m", [(0, 1), (1, 0)])


DEVICES: dict[str, Any] = {
    "rows_gathered": _over(
        lambda x, q, s: x @ lax.all_gather(deq(q, s), "m", axis=0, tiled=True),
        ("m",), ("m",), (), ("m",),
    ),
    "columns_gathered": _over(
        lambda x, q, s: x @ lax.all_gather(deq(q, s), "m", axis=1, tiled=True),
        ("m",), (None, "m"), ("m",), ("m",),
    ),
    "shards_permuted": _over(
        lambda x, q, s: lax.psum(_next(x) @ _next(deq(q, s)), "m"),
        (None, "m"), ("m",), (), (),
    ),
    "rows_exchanged_for_columns": _over(
        lambda x, q, s: x @ lax.all_to_all(deq(q, s), "m", 1, 0, tiled=True),
        (), ("m",), (), (None, "m"),
    ),
    "columns_by_device_number": _over(
        lambda x, q, s: x @ lax.dynamic_slice_in_dim(deq(q, s), lax.axis_index("m") * 12, 12, 1),
        (), (), (), (None, "m"),
    ),
}  # fmt: skip
STYLES.extend(
    Program(name, fun, lambda d: (d.normal(4, 32), d.bits8(32, 24), d.scale(24)), 1, _plain)
    for name, fun in DEVICES.items()
)
