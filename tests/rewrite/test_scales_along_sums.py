"""Scales that change along the sum are multiplied into a bfloat16 operand, outside the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rewrite.support import BF16, E4M3, F16, F32, Data, float64, relative_l2, specs

import jaxfp8

K, N = 32, 24
# XLA on the CPU may leave out the rounding of `q s`, which the rewrite has in another place.
ONE_MORE = 1.5


def _product(x: Any, q: Any, s: Any) -> Any:
    return x @ (q.astype(x.dtype) * s.astype(x.dtype))


def _turned(x: Any, q: Any, s: Any) -> Any:
    return ((q.astype(x.dtype) * s.astype(x.dtype)).T @ x.T).T


def _short_blocks(x: Any, q: Any, s: Any) -> Any:
    return _product(x, q, jnp.repeat(s[::8], 8, axis=0))


def _with_columns(x: Any, q: Any, s: Any) -> Any:
    return x @ (q.astype(x.dtype) * s.astype(x.dtype) * (s[:N, 0] + 1).astype(x.dtype))


def _shifted(x: Any, q: Any, s: Any) -> Any:
    return x @ ((q.astype(x.dtype) - 3) * s.astype(x.dtype))


def _rounded_before(x: Any, q: Any, s: Any) -> Any:
    return _product(jax.nn.softmax(x.astype(F32)).astype(x.dtype), q, s)


def _batched(x: Any, q: Any, s: Any) -> Any:
    q, s = (jnp.stack([v, jnp.roll(v, 1, 0)]) for v in (q, s))
    return jnp.einsum("mk,bkn->bmn", x, q.astype(x.dtype) * s.astype(x.dtype))


def _batched_alike(x: Any, q: Any, s: Any) -> Any:
    x, q, s = (jnp.stack([v, jnp.roll(v, 1, -2)], axis=1) for v in (x, q, s))
    return jnp.einsum("mbk,kbn->bmn", x, q.astype(x.dtype) * s.astype(x.dtype))


TAKEN = {
    "right": _product,
    "left": _turned,
    "blocks of 8": _short_blocks,
    "by column, too": _with_columns,
    "rounded before": _rounded_before,
    "batch": _batched_alike,
}


def _args(dtype: Any = BF16, codes: Any = E4M3) -> tuple[Any, ...]:
    data = Data()
    return data.normal(5, K, dtype=dtype), data.bits8(K, N, dtype=codes), data.scale(K, 1)


def _scales_along_sums(fun: Any, *args: Any) -> int:
    """How many operands have a scale that changes along the sum in the calls of a function."""
    sides = [side for spec in specs(jaxfp8.rewrite(fun), *args) for side in (spec.lhs, spec.rhs)]
    return sum(s.scale and any(s.tiles[a] < s.shape[a] for a in s.contracting) for s in sides)


@pytest.mark.parametrize("form", TAKEN)
def test_no_scale_is_left_along_the_sum_and_the_error_is_that_of_the_function(form: str) -> None:
    fun, args = TAKEN[form], _args()
    assert _scales_along_sums(fun, *args) == 0
    (site,) = jaxfp8.explain(fun)(*args).matched
    assert "operand's scale changes along the sum; the " in site.note
    (exact,) = float64(fun, *args)
    written = relative_l2(jax.jit(fun)(*args), exact)
    assert relative_l2(jax.jit(jaxfp8.rewrite(fun))(*args), exact) <= ONE_MORE * written


def test_zero_points_stay_with_the_codes() -> None:
    args = _args(codes=jnp.int8)
    assert _scales_along_sums(_shifted, *args) == 0
    (spec,) = specs(jaxfp8.rewrite(_shifted), *args)
    assert spec.rhs.zero_point
    (exact,) = float64(_shifted, *args)
    assert relative_l2(jaxfp8.rewrite(_shifted)(*args), exact) < 0.01


@pytest.mark.parametrize("codes", [E4M3, jnp.int8], ids=["e4m3", "int8"])
def test_attention_over_a_cache_with_a_scale_for_each_token(codes: Any) -> None:
    data = Data()
    q = data.normal(2, 1, 4, 8, dtype=BF16)
    keys, values = ((data.bits8(2, 16, 2, 8, dtype=codes), data.scale(2, 16, 2, 1)) for _ in "kv")

    def attend(q: Any, k: Any, of_k: Any, v: Any, of_v: Any) -> Any:
        k, v = k.astype(q.dtype) * of_k.astype(q.dtype), v.astype(q.dtype) * of_v.astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v)

    args = q, *keys, *values
    assert len(specs(jaxfp8.rewrite(attend), *args)) == 2
    assert _scales_along_sums(attend, *args) == 0
    (exact,) = float64(attend, *args)
    written = relative_l2(jax.jit(attend)(*args), exact)
    assert relative_l2(jax.jit(jaxfp8.rewrite(attend))(*args), exact) <= ONE_MORE * written


def test_nan_and_infinities_reach_what_they_reached() -> None:
    x, q, s = _args()
    q = q.at[:, 1].set(0)
    x = x.at[0].set(0).at[1, 2].set(jnp.nan).at[2, 3].set(jnp.inf)
    for special in (jnp.inf, jnp.nan, 0.0):
        args = x, q, s.at[5].set(special)
        y, written = (jax.jit(f)(*args) for f in (jaxfp8.rewrite(_product), _product))
        for kind in (jnp.isnan, jnp.isposinf, jnp.isneginf):
            np.testing.assert_array_equal(kind(y), kind(written))


def test_gradients_are_those_of_the_function() -> None:
    def loss(fun: Any) -> Any:
        return jax.jit(jax.grad(lambda x, q, s: (fun(x, q, s).astype(F32) ** 2).sum(), (0, 2)))

    args = _args()
    for found, written in zip(
        loss(jaxfp8.rewrite(_product))(*args), loss(_product)(*args), strict=True
    ):
        assert relative_l2(found, np.asarray(written, np.float64)) < 0.02


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_a_mesh_may_split_the_weight_along_the_sum_and_the_other_operand_by_rows(kind: Any) -> None:
    x, q, s = _args()
    x = jnp.concatenate([x, x, x])[:12]
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    rows = NamedSharding(mesh, PartitionSpec("a"))
    with jax.set_mesh(mesh):
        y = jax.jit(jaxfp8.rewrite(_product))(*jax.device_put((x, q, s), rows))
    want = jax.jit(jaxfp8.rewrite(_product))(x, q, s)
    assert relative_l2(y, np.asarray(want, np.float64)) < 0.01


def test_types_tell_the_mesh_where_no_context_does() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    x, q, s = _args()
    rows = jax.device_put(jnp.concatenate([x, x, x])[:12], NamedSharding(mesh, PartitionSpec("a")))
    q, s = jax.device_put((q, s), NamedSharding(mesh, PartitionSpec()))
    y = jax.jit(jaxfp8.rewrite(_product))(rows, q, s)
    assert relative_l2(y, np.asarray(_product(rows, q, s), np.float64)) < 0.01


# What stays as it is


def _widened(x: Any, q: Any, s: Any) -> Any:
    return jnp.dot(x, q.astype(F32) * s, preferred_element_type=F32)


def _by_element(x: Any, q: Any, s: Any) -> Any:
    return _product(x, q, jnp.repeat(jnp.concatenate([s, 2 * s], axis=1), N // 2, axis=1))


def _long_blocks(x: Any, q: Any, s: Any) -> Any:
    return _product(x, q, jnp.repeat(s[::16], 16, axis=0))


KEPT = {
    "float32": (_product, F32),
    "float16": (_product, F16),
    "scaled in float32": (_widened, BF16),
    "by columns in one scale": (_by_element, BF16),
    "by the batch of one side": (_batched, BF16),
    "blocks of 16": (_long_blocks, BF16),
}


@pytest.mark.parametrize("form", KEPT)
def test_what_would_lose_accuracy_or_gain_nothing_stays_in_the_call(form: str) -> None:
    fun, dtype = KEPT[form]
    args = _args(dtype)
    assert _scales_along_sums(fun, *args) == 1
    (site,) = jaxfp8.explain(fun)(*args).matched
    assert "is multiplied by it" not in site.note


def test_a_product_that_is_the_operand_is_read_in_16_bits() -> None:
    w = jaxfp8.quantize(Data().normal(K, K), channelwise_axes=(1,))

    def fun(x: Any, q: Any, s: Any) -> Any:
        y = _widened(x, w.qvalue, w.scale).astype(BF16)
        return _product(y, q, s), y

    first, _ = specs(jaxfp8.rewrite(fun), *_args())
    assert first.epilogue.out_dtype == "bfloat16"
